package iiitest

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
)

// A Worker is one that is connected.
type Worker struct {
	// ID is the engine's name for the connection; every reconnect has a new one.
	ID string
	// Name and Namespace are its own, "" while it has not told them.
	Name, Namespace string
	// Listed is whether engine::workers::list shows it: it told its pid.
	Listed bool
	// Isolation is what it told, or "".
	Isolation string
	// Since is when it connected.
	Since time.Time
}

// Workers returns the connected workers, the oldest first.
func (e *Engine) Workers() []Worker {
	e.mu.Lock()
	defer e.mu.Unlock()
	var all []Worker
	for _, w := range e.workers {
		row := Worker{ID: w.id, Namespace: w.namespace, Listed: w.info.PID != nil, Since: w.since}
		if w.info.Name != nil {
			row.Name = *w.info.Name
		}
		if w.info.Isolation != nil {
			row.Isolation = *w.info.Isolation
		}
		all = append(all, row)
	}
	slices.SortFunc(all, func(a, b Worker) int { return a.Since.Compare(b.Since) })
	return all
}

// A RegisteredFunction is one as its worker registered it.
type RegisteredFunction struct {
	ID, Namespace, WorkerID, WorkerName     string
	Description                             string
	RequestFormat, ResponseFormat, Metadata json.RawMessage
}

func (f RegisteredFunction) row() map[string]any {
	row := map[string]any{"function_id": f.ID, "namespace": f.Namespace, "worker_name": f.WorkerName}
	if f.Description != "" {
		row["description"] = f.Description
	}
	if f.Metadata != nil {
		row["metadata"] = f.Metadata
	}
	return row
}

// Functions returns the functions of workers by namespace and id.
func (e *Engine) Functions() []RegisteredFunction {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := []RegisteredFunction{}
	for key, f := range e.functions {
		row := RegisteredFunction{
			ID: key.id, Namespace: key.namespace, WorkerID: f.worker.id, Description: f.description,
			RequestFormat: f.requestFormat, ResponseFormat: f.responseFormat, Metadata: f.metadata,
		}
		if f.worker.info.Name != nil {
			row.WorkerName = *f.worker.info.Name
		}
		all = append(all, row)
	}
	slices.SortFunc(all, func(a, b RegisteredFunction) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.ID, b.ID))
	})
	return all
}

// HasFunction reports whether a worker offers the function in the default
// namespace.
func (e *Engine) HasFunction(id string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.functions[name{defaultNamespace, id}] != nil
}

// Await waits until ok holds, which is asked anew whenever a worker, a function or a
// channel comes or goes. It returns ctx's error when that ends first.
func (e *Engine) Await(ctx context.Context, ok func() bool) error {
	for {
		e.mu.Lock()
		changed := e.changed
		e.mu.Unlock()
		if ok() {
			return nil
		}
		select {
		case <-changed:
		case <-e.done:
			return errors.New("the engine is closed")
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// AwaitFunction waits until a worker offers the function in the default namespace.
func (e *Engine) AwaitFunction(ctx context.Context, id string) error {
	if err := e.Await(ctx, func() bool { return e.HasFunction(id) }); err != nil {
		return fmt.Errorf("wait for function %s: %w", id, err)
	}
	return nil
}

// Call calls a function of the default namespace as another worker would, and
// returns its result, "null" where it has none. It fails with an *iii.Error or
// with ctx's error.
func (e *Engine) Call(ctx context.Context, function string, data json.RawMessage) (json.RawMessage, error) {
	reply := make(chan outcome, 1)
	r := request{function: function, namespace: defaultNamespace, data: data}
	if r.data == nil {
		r.data = json.RawMessage("{}")
	}
	if !e.spawn(func() { e.invoke(ctx, nil, r, uuid.NewString(), func(o outcome) { reply <- o }) }) {
		return nil, iii.ErrClosed
	}
	select {
	case o := <-reply:
		if o.failure != nil {
			body, err := decode(o.failure)
			if err != nil {
				return nil, &iii.Error{Code: iii.CodeUnknown}
			}
			return nil, &iii.Error{Code: body.text("code"), Message: body.text("message"), Stacktrace: body.text("stacktrace")}
		}
		return orNull(o.result), nil
	case <-ctx.Done():
		return nil, fmt.Errorf("call %s: %w", function, ctx.Err())
	case <-e.done:
		return nil, iii.ErrClosed
	}
}

// Handle makes f answer a function of the default namespace inside the engine, in
// place of what answered it; nil leaves nobody.
func (e *Engine) Handle(id string, f Function) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if f == nil {
		delete(e.builtins, id)
		return
	}
	e.builtins[id] = f
}

// SetConfiguration puts a value into the configuration entry, which it makes where
// there is none; nil removes the entry.
func (e *Engine) SetConfiguration(id string, value json.RawMessage) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if value == nil {
		delete(e.entries, id)
		return
	}
	e.entries[id] = &entry{id: id, value: value}
}

// Disconnect cuts the connection of a worker without a word, as a broken network
// does. It reports whether there was one.
func (e *Engine) Disconnect(workerID string) bool {
	e.mu.Lock()
	w := e.workers[workerID]
	e.mu.Unlock()
	if w == nil {
		return false
	}
	w.cut()
	return true
}

// Inject sends text to a worker as one message, whatever it is. It reports whether
// there is such a worker.
func (e *Engine) Inject(workerID string, text []byte) bool {
	e.mu.Lock()
	w := e.workers[workerID]
	e.mu.Unlock()
	if w == nil {
		return false
	}
	// nil would close the connection.
	w.send(append([]byte{}, text...))
	return true
}

// ReaderPings is how many pings came on reading ends of channels, where the engine
// never reads.
func (e *Engine) ReaderPings() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.pings
}

// Channels is how many channels the engine knows.
func (e *Engine) Channels() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.channels)
}

// Pending is how many calls wait for their result.
func (e *Engine) Pending() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.pending)
}
