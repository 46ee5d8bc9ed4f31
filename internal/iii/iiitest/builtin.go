package iiitest

import (
	"context"
	"encoding/json"
	"maps"
	"net"
	"slices"
	"strings"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
)

// maxInfos bounds the functions of one engine::functions::info.
const maxInfos = 32

// builtinFunctions are the functions of the engine itself. engine::workers::register
// is not among them: it is acted on in order with registrations.
func (e *Engine) builtinFunctions() map[string]Function {
	nothing := func(context.Context, json.RawMessage) (json.RawMessage, error) { return nil, nil }
	builtins := map[string]Function{
		"engine::channels::create": typed(e.createChannel),
		"engine::workers::list":    typed(e.listWorkers),
		"engine::functions::list":  typed(e.listFunctions),
		"engine::functions::info":  typed(e.describeFunctions),
		"engine::log::info":        nothing,
		"engine::log::warn":        nothing,
		"engine::log::error":       nothing,
		"engine::log::debug":       nothing,
	}
	if !e.options.NoConfiguration {
		maps.Copy(builtins, e.configurationFunctions())
	}
	return builtins
}

// typed makes a Function of one with types; null counts as {}.
func typed[Request any](f func(Request) (any, error)) Function {
	return func(_ context.Context, data json.RawMessage) (json.RawMessage, error) {
		var r Request
		if err := json.Unmarshal(data, &r); err != nil {
			return nil, &iii.Error{Code: "deserialization_error", Message: "the payload is not of the form of this function's"}
		}
		reply, err := f(r)
		if err != nil {
			return nil, err
		}
		return raw(reply), nil
	}
}

type listWorkersRequest struct {
	Search  string `json:"search"`
	Runtime string `json:"runtime"`
}

type workerRow struct {
	Name              *string `json:"name"`
	Description       *string `json:"description"`
	Version           *string `json:"version"`
	ID                string  `json:"id"`
	Namespace         string  `json:"namespace"`
	Runtime           string  `json:"runtime"`
	OS                *string `json:"os"`
	PID               *uint32 `json:"pid"`
	Status            string  `json:"status"`
	FunctionCount     int     `json:"function_count"`
	ConnectedAtMs     int64   `json:"connected_at_ms"`
	ActiveInvocations int     `json:"active_invocations"`
	Isolation         *string `json:"isolation"`
	IPAddress         string  `json:"ip_address"`
}

// listWorkers lists workers that told their pid, the oldest first.
func (e *Engine) listWorkers(r listWorkersRequest) (any, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	rows := []workerRow{}
	for _, w := range e.workers {
		row := e.row(w)
		if row.PID == nil || r.Runtime != "" && row.Runtime != r.Runtime ||
			r.Search != "" && (row.Name == nil || !strings.Contains(*row.Name, r.Search)) {
			continue
		}
		rows = append(rows, row)
	}
	slices.SortFunc(rows, func(a, b workerRow) int { return int(a.ConnectedAtMs - b.ConnectedAtMs) })
	return map[string]any{"workers": rows}, nil
}

// row describes a worker. The caller holds mu.
func (e *Engine) row(w *worker) workerRow {
	row := workerRow{
		Name: w.info.Name, Description: w.info.Description, Version: w.info.Version, ID: w.id, Namespace: w.namespace,
		Runtime: w.info.Runtime, OS: w.info.OS, PID: w.info.PID, Status: "connected", ConnectedAtMs: w.since.UnixMilli(),
		Isolation: w.info.Isolation,
	}
	row.IPAddress, _, _ = net.SplitHostPort(w.conn.RemoteAddr().String())
	for _, f := range e.functions {
		if f.worker == w {
			row.FunctionCount++
		}
	}
	for _, c := range e.pending {
		if c.executor == w {
			row.ActiveInvocations++
		}
	}
	return row
}

type listFunctionsRequest struct {
	Search          string   `json:"search"`
	Prefix          string   `json:"prefix"`
	Worker          string   `json:"worker"`
	Workers         []string `json:"workers"`
	IncludeInternal bool     `json:"include_internal"`
}

// listFunctions lists functions of workers by name; the engine's own count as
// internal.
func (e *Engine) listFunctions(r listFunctionsRequest) (any, error) {
	if r.Worker != "" {
		r.Workers = append(r.Workers, r.Worker)
	}
	rows := []map[string]any{}
	for _, f := range e.Functions() {
		var metadata struct{ Internal bool }
		_ = json.Unmarshal(f.Metadata, &metadata)
		if metadata.Internal && !r.IncludeInternal || !strings.HasPrefix(f.ID, r.Prefix) || !strings.Contains(f.ID, r.Search) ||
			len(r.Workers) > 0 && !slices.Contains(r.Workers, f.WorkerName) {
			continue
		}
		rows = append(rows, f.row())
	}
	if r.IncludeInternal {
		for _, id := range slices.Sorted(maps.Keys(e.snapshotBuiltins())) {
			rows = append(rows, map[string]any{"function_id": id, "namespace": defaultNamespace, "worker_name": "engine"})
		}
	}
	return map[string]any{"functions": rows}, nil
}

func (e *Engine) snapshotBuiltins() map[string]Function {
	e.mu.Lock()
	defer e.mu.Unlock()
	return maps.Clone(e.builtins)
}

type describeRequest struct {
	FunctionID  string   `json:"function_id"`
	FunctionIDs []string `json:"function_ids"`
	Namespace   string   `json:"namespace"`
}

// describeFunctions tells schemas of one function or of several.
func (e *Engine) describeFunctions(r describeRequest) (any, error) {
	ids := r.FunctionIDs
	if r.FunctionID != "" {
		ids = []string{r.FunctionID}
	}
	if len(ids) == 0 || len(ids) > maxInfos {
		return nil, &iii.Error{Code: "deserialization_error", Message: "function_id, or 1 to 32 function_ids, must be given"}
	}
	if r.Namespace == "" {
		r.Namespace = defaultNamespace
	}
	rows := []map[string]any{}
	all := e.Functions()
	for _, id := range ids {
		i := slices.IndexFunc(all, func(f RegisteredFunction) bool { return f.ID == id && f.Namespace == r.Namespace })
		if i < 0 {
			return nil, &iii.Error{Code: iii.CodeFunctionNotFound, Message: "no function " + id + " in namespace " + r.Namespace}
		}
		row := all[i].row()
		row["request_schema"] = orNull(all[i].RequestFormat)
		row["response_schema"] = orNull(all[i].ResponseFormat)
		rows = append(rows, row)
	}
	if r.FunctionID != "" {
		return rows[0], nil
	}
	return map[string]any{"functions": rows}, nil
}

func orNull(value json.RawMessage) json.RawMessage {
	if value == nil {
		return json.RawMessage("null")
	}
	return value
}
