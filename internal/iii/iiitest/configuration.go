package iiitest

import (
	"encoding/json"
	"maps"
	"regexp"
	"slices"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
)

var (
	entryName   = regexp.MustCompile(`^[a-z0-9_-]{1,64}$`)
	placeholder = regexp.MustCompile(`\$\{([A-Za-z_][A-Za-z0-9_]*)(:[^}]*)?\}`)
)

// An entry is one entry of the configuration worker.
type entry struct {
	id, name, description   string
	schema, value, metadata json.RawMessage
}

func (n *entry) document(withValue bool) map[string]any {
	d := map[string]any{"id": n.id, "name": n.name, "description": n.description, "schema": orNull(n.schema)}
	if n.metadata != nil {
		d["metadata"] = n.metadata
	}
	if withValue {
		d["value"] = orNull(n.value)
	}
	return d
}

// configurationFunctions are those of the configuration worker.
func (e *Engine) configurationFunctions() map[string]Function {
	return map[string]Function{
		"configuration::get":      typed(e.getConfiguration),
		"configuration::register": typed(e.registerConfiguration),
		"configuration::set":      typed(e.setConfiguration),
		"configuration::list":     typed(e.listConfigurations),
		"configuration::schema":   typed(e.configurationSchema),
	}
}

type getRequest struct {
	ID  string `json:"id"`
	Raw bool   `json:"raw"`
}

// getConfiguration returns an entry's value: as it is when raw, else with what
// ${NAME} and ${NAME:default} stand for, checked against the schema.
func (e *Engine) getConfiguration(r getRequest) (any, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	n, err := e.entry(r.ID)
	if err != nil {
		return nil, err
	}
	value := orNull(n.value)
	if !r.Raw {
		var tree any
		if err := json.Unmarshal(value, &tree); err != nil {
			return nil, &iii.Error{Code: "ADAPTER_ERROR", Message: "configuration '" + r.ID + "' is not JSON"}
		}
		expanded, ok := e.expand(tree)
		if !ok {
			return nil, &iii.Error{Code: "EXPAND_FAILED", Message: "configuration '" + r.ID + "' names a variable that is not set"}
		}
		value = raw(expanded)
		if !fits(n.schema, expanded) {
			return nil, &iii.Error{Code: "SCHEMA_INVALID", Message: "configuration '" + r.ID + "' does not fit its schema"}
		}
	}
	return map[string]any{"id": n.id, "value": value}, nil
}

// entry finds an entry. The caller holds mu.
func (e *Engine) entry(id string) (*entry, error) {
	if n := e.entries[id]; n != nil {
		return n, nil
	}
	return nil, &iii.Error{Code: iii.CodeNotFound, Message: "configuration '" + id + "' not found"}
}

type registerRequest struct {
	ID           string          `json:"id"`
	Name         string          `json:"name"`
	Description  string          `json:"description"`
	Schema       json.RawMessage `json:"schema"`
	InitialValue json.RawMessage `json:"initial_value"`
	Metadata     json.RawMessage `json:"metadata"`
}

// registerConfiguration makes an entry, or gives one a new schema: its value stays
// unless the request brings one.
func (e *Engine) registerConfiguration(r registerRequest) (any, error) {
	if !entryName.MatchString(r.ID) {
		return nil, &iii.Error{Code: "INVALID_ID", Message: "an id is 1 to 64 of a-z, 0-9, _ and -"}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	n := &entry{id: r.ID, name: r.Name, description: r.Description, schema: r.Schema, value: r.InitialValue, metadata: r.Metadata}
	if old := e.entries[r.ID]; old != nil && r.InitialValue == nil {
		n.value = old.value
	}
	e.entries[r.ID] = n
	return n.document(true), nil
}

type setRequest struct {
	ID    string          `json:"id"`
	Value json.RawMessage `json:"value"`
}

func (e *Engine) setConfiguration(r setRequest) (any, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	n := e.entries[r.ID]
	if n == nil {
		return nil, &iii.Error{Code: "NOT_REGISTERED", Message: "configuration '" + r.ID + "' is not registered"}
	}
	var tree any
	if err := json.Unmarshal(orNull(r.Value), &tree); err != nil || !fits(n.schema, tree) {
		return nil, &iii.Error{Code: "SCHEMA_INVALID", Message: "the value does not fit the schema of configuration '" + r.ID + "'"}
	}
	old := n.value
	n.value = r.Value
	return map[string]any{"old_value": orNull(old), "new_value": orNull(r.Value)}, nil
}

func (e *Engine) listConfigurations(struct{}) (any, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	rows := []any{}
	for _, id := range slices.Sorted(maps.Keys(e.entries)) {
		rows = append(rows, e.entries[id].document(false))
	}
	return map[string]any{"configurations": rows}, nil
}

func (e *Engine) configurationSchema(r getRequest) (any, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	n, err := e.entry(r.ID)
	if err != nil {
		return nil, err
	}
	return n.document(false), nil
}

// expand replaces ${NAME} and ${NAME:default} in all strings. A string that is
// nothing else becomes a number or a boolean where the text is one. It fails when
// a variable has neither a value nor a default.
func (e *Engine) expand(tree any) (any, bool) {
	ok := true
	switch v := tree.(type) {
	case map[string]any:
		for key, member := range v {
			var fine bool
			v[key], fine = e.expand(member)
			ok = ok && fine
		}
	case []any:
		for i, element := range v {
			var fine bool
			v[i], fine = e.expand(element)
			ok = ok && fine
		}
	case string:
		text := placeholder.ReplaceAllStringFunc(v, func(found string) string {
			parts := placeholder.FindStringSubmatch(found)
			if value := e.options.Getenv(parts[1]); value != "" {
				return value
			}
			if parts[2] == "" {
				ok = false
				return ""
			}
			return parts[2][1:]
		})
		if whole := placeholder.FindString(v); whole != "" && whole == v {
			var scalar any
			if json.Unmarshal([]byte(text), &scalar) == nil {
				switch scalar.(type) {
				case float64, bool:
					return scalar, ok
				}
			}
		}
		return text, ok
	}
	return tree, ok
}

// fits reports whether a value has the type that the schema demands at the top.
func fits(schema json.RawMessage, value any) bool {
	var s struct{ Type string }
	if json.Unmarshal(orNull(schema), &s) != nil {
		return true
	}
	kinds := map[string]func(any) bool{
		"object":  func(v any) bool { _, ok := v.(map[string]any); return ok },
		"array":   func(v any) bool { _, ok := v.([]any); return ok },
		"string":  func(v any) bool { _, ok := v.(string); return ok },
		"boolean": func(v any) bool { _, ok := v.(bool); return ok },
		"number":  func(v any) bool { _, ok := v.(float64); return ok },
		"integer": func(v any) bool { n, ok := v.(float64); return ok && n == float64(int64(n)) },
	}
	check, known := kinds[s.Type]
	return !known || check(value)
}
