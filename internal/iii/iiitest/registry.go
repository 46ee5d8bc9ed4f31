package iiitest

import (
	"encoding/json"
	"strings"
)

const defaultNamespace = "default"

// A name is the full name of a function.
type name struct{ namespace, id string }

type function struct {
	name
	worker                                  *worker
	description                             string
	requestFormat, responseFormat, metadata json.RawMessage
}

// registration registers or unregisters a function; before the worker has its
// name, later.
func (e *Engine) registration(w *worker, m message) {
	e.mu.Lock()
	if !w.named {
		w.early = append(w.early, m)
		e.mu.Unlock()
		return
	}
	refusal := e.register(w, m)
	e.change()
	e.mu.Unlock()
	if refusal != nil {
		w.send(refusal)
	}
}

// register does so and returns the refusal when another has the function, else
// nil. The caller holds mu.
func (e *Engine) register(w *worker, m message) json.RawMessage {
	key := name{w.namespace, m.text("id")}
	if key.id == "" || e.workers[w.id] != w {
		return nil
	}
	other := e.functions[key]
	if m.text("type") == "unregisterfunction" {
		if other != nil && other.worker == w {
			delete(e.functions, key)
		}
		return nil
	}
	owner := ""
	_, taken := e.builtins[key.id]
	taken = taken && key.namespace == defaultNamespace || strings.HasPrefix(key.id, "engine::")
	if other != nil && other.worker != w {
		taken, owner = true, other.worker.id
	}
	if taken {
		e.log.Warn("a function is taken", "worker_id", w.id, "owner", owner)
		return raw(map[string]string{
			"type": "registrationrejected", "code": "FUNCTION_NAMESPACE_CONFLICT",
			"namespace": key.namespace, "function_id": key.id, "owner_worker_id": owner,
		})
	}
	e.functions[key] = &function{
		name: key, worker: w, description: m.text("description"),
		requestFormat: m.value("request_format"), responseFormat: m.value("response_format"), metadata: m.value("metadata"),
	}
	return nil
}
