package iiitest

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/google/uuid"
)

// A call waits for its executor's result.
type call struct {
	caller   *worker // nil when the engine itself calls
	executor *worker
	// end is called once with the outcome; nil when nobody wants it.
	end func(outcome)
}

// A request is a call as its caller makes it.
type request struct {
	function             string
	namespace            string
	data, metadata       json.RawMessage
	traceparent, baggage string
}

// receiveCall takes a call from a worker. One that the engine could not read is
// dropped without an answer, as the engine does.
func (e *Engine) receiveCall(ctx context.Context, w *worker, m message) {
	id := m.text("invocation_id")
	if id == "" && m.value("invocation_id") != nil || id != "" && uuid.Validate(id) != nil || m.value("function_id") == nil {
		e.log.Warn("a call cannot be read and is dropped, as the engine does", "worker_id", w.id)
		return
	}
	r := request{
		function: m.text("function_id"), namespace: defaultNamespace, data: m.value("data"), metadata: m.value("metadata"),
		traceparent: m.text("traceparent"), baggage: m.text("baggage"),
	}
	if r.data == nil {
		r.data = json.RawMessage("null")
	}
	end := func(o outcome) { w.send(resultMessage(id, r.function, o)) }
	if id == "" {
		end = func(outcome) {}
	}
	if ns := m.value("namespace"); ns != nil {
		if r.namespace = m.text("namespace"); strings.TrimSpace(r.namespace) == "" {
			e.spawn(func() { end(failed("INVALID_NAMESPACE", "the namespace is blank")) })
			return
		}
	}
	if action, err := decode(m.value("action")); err == nil {
		switch action.text("type") {
		case "void":
			end = func(outcome) {}
		case "enqueue":
			e.spawn(func() { end(failed("enqueue_error", "this engine has no queues")) })
			return
		}
	}
	if r.function == "engine::workers::register" {
		// In order with the registrations around it.
		end(e.nameFromCall(w, r.data))
		return
	}
	e.spawn(func() { e.invoke(ctx, w, r, w.id, end) })
}

func (e *Engine) nameFromCall(w *worker, data json.RawMessage) outcome {
	var info workerInfo
	if err := json.Unmarshal(data, &info); err != nil {
		return failed("deserialization_error", "the worker's description is not of its form")
	}
	if info.Runtime == "" {
		info.Runtime = "unknown"
	}
	return outcome{result: raw(map[string]bool{"success": e.name(w, info)})}
}

// invoke brings a call to who answers it. end is called once, unless the caller
// goes first.
func (e *Engine) invoke(ctx context.Context, caller *worker, r request, callerID string, end func(outcome)) {
	e.mu.Lock()
	builtin, ok := e.builtins[r.function]
	if ok && r.namespace == defaultNamespace {
		e.mu.Unlock()
		end(outcomeOf(builtin(ctx, r.data)))
		return
	}
	f := e.functions[name{r.namespace, r.function}]
	if f == nil {
		text := e.notFound(r)
		e.mu.Unlock()
		end(failed("function_not_found", text))
		return
	}
	id := uuid.NewString()
	executor := f.worker
	e.pending[id] = &call{caller: caller, executor: executor, end: end}
	e.mu.Unlock()

	m := map[string]any{
		"type": "invokefunction", "invocation_id": id, "function_id": r.function, "data": withCaller(r.data, callerID),
	}
	for key, text := range map[string]string{"traceparent": r.traceparent, "baggage": r.baggage} {
		if text != "" {
			m[key] = text
		}
	}
	if r.metadata != nil {
		m["metadata"] = r.metadata
	}
	executor.send(raw(m))
}

// notFound says that there is no such function, and where there is one of that
// id. The caller holds mu.
func (e *Engine) notFound(r request) string {
	var elsewhere []string
	for key := range e.functions {
		if key.id == r.function {
			elsewhere = append(elsewhere, key.namespace)
		}
	}
	slices.Sort(elsewhere)
	text := fmt.Sprintf("no function %s in namespace %s", r.function, r.namespace)
	if len(elsewhere) > 0 {
		text += "; it exists in: " + strings.Join(elsewhere, ", ")
	}
	return text
}

// settle takes a result and brings it to the caller. One that no call waits for,
// or that comes from another worker than the call went to, is dropped.
func (e *Engine) settle(w *worker, m message) {
	id := m.text("invocation_id")
	e.mu.Lock()
	c := e.pending[id]
	if c == nil || c.executor != w {
		e.mu.Unlock()
		e.log.Debug("a result that no call waits for was dropped", "worker_id", w.id)
		return
	}
	delete(e.pending, id)
	e.mu.Unlock()
	c.end(outcome{result: m.value("result"), failure: m.value("error")})
}
