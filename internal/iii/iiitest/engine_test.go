package iiitest_test

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"
	"go.uber.org/goleak"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii/iiitest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func start(t *testing.T, o iiitest.Options) (context.Context, *iiitest.Engine) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	o.Log = slog.New(slog.DiscardHandler)
	e, err := iiitest.Start(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return ctx, e
}

// A peer is a worker that says exactly what a test wants.
type peer struct {
	t      *testing.T
	socket *websocket.Conn
	// ID and token are what the engine said first.
	id, token string
}

func connect(ctx context.Context, t *testing.T, e *iiitest.Engine) *peer {
	t.Helper()
	socket, _, err := websocket.Dial(ctx, e.URL(), nil) //nolint:bodyclose // The library has closed it.
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = socket.CloseNow() })
	p := &peer{t: t, socket: socket}
	welcome := p.next(ctx)
	if welcome["type"] != "workerregistered" {
		t.Fatalf("the engine begins with %v", welcome)
	}
	p.id, _ = welcome["worker_id"].(string)
	p.token, _ = welcome["reattach_token"].(string)
	return p
}

func (p *peer) say(ctx context.Context, text string) {
	p.t.Helper()
	if err := p.socket.Write(ctx, websocket.MessageText, []byte(text)); err != nil {
		p.t.Fatal(err)
	}
}

func (p *peer) next(ctx context.Context) map[string]any {
	p.t.Helper()
	_, text, err := p.socket.Read(ctx)
	if err != nil {
		p.t.Fatal(err)
	}
	var m map[string]any
	if err := json.Unmarshal(text, &m); err != nil {
		p.t.Fatalf("%v in %s", err, text)
	}
	return m
}

// name tells who it is.
func (p *peer) name(ctx context.Context, data string) {
	p.t.Helper()
	p.say(ctx, `{"type":"invokefunction","function_id":"engine::workers::register","data":`+data+`,"action":{"type":"void"}}`)
}

// ask calls a function and returns its result or its error.
func (p *peer) ask(ctx context.Context, function, more string) (result any, code string) {
	p.t.Helper()
	const id = "fde9143a-275d-418c-959c-24830968f89c"
	p.say(ctx, `{"type":"invokefunction","invocation_id":"`+id+`","function_id":"`+function+`"`+more+`}`)
	m := p.next(ctx)
	if m["type"] != "invocationresult" || m["invocation_id"] != id || m["function_id"] != function {
		p.t.Fatalf("%s answers %v", function, m)
	}
	if failure, ok := m["error"].(map[string]any); ok {
		code, _ = failure["code"].(string)
	}
	return m["result"], code
}

func TestNamespaces(t *testing.T) {
	t.Parallel()
	ctx, e := start(t, iiitest.Options{})
	team, other, anon := connect(ctx, t, e), connect(ctx, t, e), connect(ctx, t, e)
	// Before the name, functions wait for their namespace.
	team.say(ctx, `{"type":"registerfunction","id":"f::x"}`)
	team.name(ctx, `{"name":"w","namespace":"team","pid":1}`)
	// The SDKs of Rust (0.22) and of Python (0.25) send these nulls.
	other.say(ctx, `{"type":"invokefunction","invocation_id":null,"function_id":"engine::workers::register","data":{"name":"w","pid":1,"isolation":null,"namespace":null},"action":{"type":"void"}}`)
	other.say(ctx, `{"type":"registerfunction","id":"f::x"}`)
	if err := e.Await(ctx, func() bool { return len(e.Functions()) == 2 }); err != nil {
		t.Fatal(err)
	}
	if f := e.Functions(); f[0].Namespace != "default" || f[1].Namespace != "team" || f[1].WorkerID != team.id || f[1].WorkerName != "w" {
		t.Errorf("got %+v", f)
	}
	for more, executor := range map[string]*peer{`,"namespace":"team"`: team, ``: other, `,"namespace":null`: other} {
		anon.say(ctx, `{"type":"invokefunction","invocation_id":"fde9143a-275d-418c-959c-24830968f89c","function_id":"f::x","data":{"a":1}`+more+`}`)
		call := executor.next(ctx)
		data, _ := call["data"].(map[string]any)
		if call["function_id"] != "f::x" || data["a"] != float64(1) || data["_caller_worker_id"] != anon.id || call["namespace"] != nil || call["action"] != nil {
			t.Errorf("the executor got %v", call)
		}
		id, _ := call["invocation_id"].(string)
		executor.say(ctx, `{"type":"invocationresult","invocation_id":"`+id+`","function_id":"f::x","result":null,"error":{"code":"c","message":"m","stacktrace":null}}`)
		answer := anon.next(ctx)
		failure, _ := answer["error"].(map[string]any)
		if _, traced := failure["stacktrace"]; traced || failure["code"] != "c" {
			t.Errorf("the caller got %v", answer)
		}
	}
	if _, code := anon.ask(ctx, "f::x", `,"namespace":" "`); code != "INVALID_NAMESPACE" {
		t.Errorf("a blank namespace: %s", code)
	}
	if _, code := anon.ask(ctx, "f::x", `,"namespace":"third"`); code != "function_not_found" {
		t.Errorf("a third namespace: %s", code)
	}
	if _, code := anon.ask(ctx, "f::x", `,"action":{"type":"enqueue","queue":"q"}`); code != "enqueue_error" {
		t.Errorf("a queue: %s", code)
	}
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	ctx, e := start(t, iiitest.Options{})
	first, second := connect(ctx, t, e), connect(ctx, t, e)
	first.name(ctx, `{"name":"a","pid":1}`)
	first.say(ctx, `{"type":"registerfunction","id":"f::x"}`)
	if err := e.AwaitFunction(ctx, "f::x"); err != nil {
		t.Fatal(err)
	}
	second.name(ctx, `{"name":"b","pid":1}`)
	for id, owner := range map[string]string{"f::x": first.id, "engine::mine": "", "configuration::get": ""} {
		second.say(ctx, `{"type":"registerfunction","id":"`+id+`"}`)
		m := second.next(ctx)
		if m["type"] != "registrationrejected" || m["code"] != "FUNCTION_NAMESPACE_CONFLICT" || m["function_id"] != id || m["owner_worker_id"] != owner || m["namespace"] != "default" {
			t.Errorf("%s: %v", id, m)
		}
	}
	// The same function again, by who has it, is fine; so are what the engine does
	// not know and pings.
	first.say(ctx, `{"type":"registerfunction","id":"f::x","description":"new"}`)
	first.say(ctx, `{"type":"registertriggertype","id":"x","description":"d"}`)
	first.say(ctx, `garbage`)
	first.say(ctx, `{"type":"invokefunction","invocation_id":"not a UUID","function_id":"f::x","data":{}}`)
	first.say(ctx, `{"type":"ping"}`)
	if m := first.next(ctx); m["type"] != "pong" {
		t.Errorf("got %v", m)
	}
	if f := e.Functions(); len(f) != 1 || f[0].Description != "new" {
		t.Errorf("got %+v", f)
	}
	first.say(ctx, `{"type":"unregisterfunction","id":"f::x"}`)
	if err := e.Await(ctx, func() bool { return len(e.Functions()) == 0 }); err != nil {
		t.Fatal(err)
	}

	third := connect(ctx, t, e)
	third.name(ctx, `{"name":"a","pid":1}`)
	if m := third.next(ctx); m["code"] != "WORKER_NAMESPACE_CONFLICT" || m["worker_name"] != "a" || m["owner_worker_id"] != first.id {
		t.Errorf("got %v", m)
	}
	if _, _, err := third.socket.Read(ctx); websocket.CloseStatus(err) == -1 {
		t.Errorf("then: %v", err)
	}
}

func TestReattachEvicts(t *testing.T) {
	t.Parallel()
	ctx, e := start(t, iiitest.Options{})
	old := connect(ctx, t, e)
	old.name(ctx, `{"name":"a","pid":1}`)
	old.say(ctx, `{"type":"registerfunction","id":"f::x"}`)
	if err := e.AwaitFunction(ctx, "f::x"); err != nil {
		t.Fatal(err)
	}
	thief := connect(ctx, t, e)
	thief.say(ctx, `{"type":"reattach","previous_worker_id":"`+old.id+`","reattach_token":"`+thief.token+`"}`)
	thief.name(ctx, `{"name":"a","pid":1}`)
	if m := thief.next(ctx); m["code"] != "WORKER_NAMESPACE_CONFLICT" {
		t.Errorf("with a wrong token: %v", m)
	}
	again := connect(ctx, t, e)
	again.say(ctx, `{"type":"reattach","previous_worker_id":"`+old.id+`","reattach_token":"`+old.token+`"}`)
	again.name(ctx, `{"name":"a","pid":1}`)
	again.say(ctx, `{"type":"registerfunction","id":"f::x"}`)
	if err := e.Await(ctx, func() bool { f := e.Functions(); return len(f) == 1 && f[0].WorkerID == again.id }); err != nil {
		t.Fatal(err)
	}
	if _, _, err := old.socket.Read(ctx); err == nil {
		t.Error("the old connection lives")
	}
}

func TestExecutorThatLeaves(t *testing.T) {
	t.Parallel()
	ctx, e := start(t, iiitest.Options{})
	executor, caller := connect(ctx, t, e), connect(ctx, t, e)
	executor.name(ctx, `{"name":"a"}`)
	executor.say(ctx, `{"type":"registerfunction","id":"f::x"}`)
	if err := e.AwaitFunction(ctx, "f::x"); err != nil {
		t.Fatal(err)
	}
	caller.say(ctx, `{"type":"invokefunction","invocation_id":"fde9143a-275d-418c-959c-24830968f89c","function_id":"f::x","data":{}}`)
	executor.next(ctx)
	if e.Pending() != 1 {
		t.Errorf("%d calls", e.Pending())
	}
	_ = executor.socket.CloseNow()
	failure, _ := caller.next(ctx)["error"].(map[string]any)
	if failure["code"] != "invocation_stopped" || e.Pending() != 0 || e.HasFunction("f::x") {
		t.Errorf("got %v", failure)
	}
}

func TestFunctionsOfTheEngine(t *testing.T) {
	t.Parallel()
	ctx, e := start(t, iiitest.Options{})
	hidden, shown := connect(ctx, t, e), connect(ctx, t, e)
	hidden.name(ctx, `{"name":"hidden"}`)
	shown.name(ctx, `{"name":"shown","pid":7,"isolation":"libkrun"}`)
	shown.say(ctx, `{"type":"registerfunction","id":"f::x","metadata":{"internal":true},"request_format":{"type":"object"}}`)
	shown.say(ctx, `{"type":"registerfunction","id":"f::y","description":"d"}`)
	if err := e.AwaitFunction(ctx, "f::y"); err != nil {
		t.Fatal(err)
	}
	text := func(result any) string {
		b, err := json.Marshal(result)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	result, _ := hidden.ask(ctx, "engine::workers::list", `,"data":{}`)
	if s := text(result); !strings.Contains(s, `"pid":7`) || !strings.Contains(s, `"isolation":"libkrun"`) || !strings.Contains(s, `"function_count":2`) || strings.Contains(s, "hidden") {
		t.Errorf("workers: %s", s)
	}
	// No payload at all counts as null.
	result, _ = hidden.ask(ctx, "engine::functions::list", ``)
	if s := text(result); !strings.Contains(s, "f::y") || strings.Contains(s, "f::x") {
		t.Errorf("functions: %s", s)
	}
	result, _ = hidden.ask(ctx, "engine::functions::list", `,"data":{"include_internal":true,"worker":"shown"}`)
	if s := text(result); !strings.Contains(s, "f::x") {
		t.Errorf("functions: %s", s)
	}
	result, _ = hidden.ask(ctx, "engine::functions::info", `,"data":{"function_ids":["f::x","f::y"]}`)
	if s := text(result); !strings.Contains(s, `"request_schema":{"type":"object"}`) || !strings.Contains(s, `"description":"d"`) {
		t.Errorf("functions: %s", s)
	}
	for data, want := range map[string]string{`{"function_id":"f::none"}`: "function_not_found", `{}`: "deserialization_error", `[]`: "deserialization_error", `{"function_id":1}`: "deserialization_error"} {
		if _, code := hidden.ask(ctx, "engine::functions::info", `,"data":`+data); code != want {
			t.Errorf("%s: %s", data, code)
		}
	}
}

func TestConfiguration(t *testing.T) {
	t.Parallel()
	environment := map[string]string{"N": "7", "WORD": "true story"}
	ctx, e := start(t, iiitest.Options{
		Getenv: func(key string) string { return environment[key] },
		Configuration: map[string]json.RawMessage{
			"null":     json.RawMessage("null"),
			"expanded": json.RawMessage(`{"n":"${N}","b":"${NONE:true}","s":["${WORD}","x${N}y"],"d":"${NONE:}"}`),
			"unset":    json.RawMessage(`"${NONE}"`),
		},
	})
	for _, step := range []struct{ function, data, want string }{
		{"get", `{"id":"null"}`, `{"id":"null","value":null}`},
		{"get", `{"id":"none"}`, "NOT_FOUND"},
		{"get", `{"id":"expanded"}`, `{"id":"expanded","value":{"b":true,"d":"","n":7,"s":["true story","x7y"]}}`},
		{"get", `{"id":"unset"}`, "EXPAND_FAILED"},
		{"get", `{"id":"unset","raw":true}`, `{"id":"unset","value":"${NONE}"}`},
		{"register", `{"id":"Bad Id","name":"n","description":"d","schema":{}}`, "INVALID_ID"},
		{"register", `{"id":"new","name":"n","description":"d","schema":{"type":"object"}}`, `{"description":"d","id":"new","name":"n","schema":{"type":"object"},"value":null}`},
		{"get", `{"id":"new"}`, "SCHEMA_INVALID"},
		{"set", `{"id":"new","value":[]}`, "SCHEMA_INVALID"},
		{"set", `{"id":"new","value":{"a":1}}`, `{"new_value":{"a":1},"old_value":null}`},
		{"register", `{"id":"new","name":"n2","description":"d","schema":null,"metadata":{"m":1}}`, `{"description":"d","id":"new","metadata":{"m":1},"name":"n2","schema":null,"value":{"a":1}}`},
		{"set", `{"id":"none","value":1}`, "NOT_REGISTERED"},
		{"schema", `{"id":"new"}`, `{"description":"d","id":"new","metadata":{"m":1},"name":"n2","schema":null}`},
	} {
		result, err := e.Call(ctx, "configuration::"+step.function, json.RawMessage(step.data))
		got := string(result)
		var failure *iii.Error
		if errors.As(err, &failure) {
			got = failure.Code
		}
		if got != step.want {
			t.Errorf("%s %s: got %s, %v, want %s", step.function, step.data, got, err, step.want)
		}
	}
	if result, err := e.Call(ctx, "configuration::list", nil); err != nil || strings.Count(string(result), `"id"`) != 4 {
		t.Errorf("list: %s, %v", result, err)
	}
	e.SetConfiguration("set", json.RawMessage("1"))
	if result, err := e.Call(ctx, "configuration::get", json.RawMessage(`{"id":"set"}`)); err != nil || string(result) != `{"id":"set","value":1}` {
		t.Errorf("got %s, %v", result, err)
	}
	e.SetConfiguration("set", nil)
	_, err := e.Call(ctx, "configuration::get", json.RawMessage(`{"id":"set"}`))
	var failure *iii.Error
	if !errors.As(err, &failure) || failure.Code != iii.CodeNotFound {
		t.Errorf("got %v", err)
	}

	ctx, shipped := start(t, iiitest.Options{})
	result, err := shipped.Call(ctx, "configuration::get", json.RawMessage(`{"id":"sandbox-libkrun"}`))
	if err != nil || !strings.Contains(string(result), `"image_allowlist":["python","node"]`) {
		t.Errorf("got %s, %v", result, err)
	}
	ctx, stripped := start(t, iiitest.Options{NoConfiguration: true})
	_, err = stripped.Call(ctx, "configuration::get", json.RawMessage(`{"id":"sandbox-libkrun"}`))
	if !errors.As(err, &failure) || failure.Code != iii.CodeFunctionNotFound {
		t.Errorf("got %v", err)
	}
	stripped.Handle("configuration::get", func(context.Context, json.RawMessage) (json.RawMessage, error) {
		return nil, errors.New("broken")
	})
	_, err = stripped.Call(ctx, "configuration::get", nil)
	if !errors.As(err, &failure) || failure.Code != "invocation_error" {
		t.Errorf("got %v", err)
	}
}

func TestAddresses(t *testing.T) {
	t.Parallel()
	ctx, e := start(t, iiitest.Options{})
	base := "http" + strings.TrimPrefix(e.URL(), "ws")
	for path, want := range map[string]int{
		"/nowhere":                             http.StatusNotFound,
		"/ws/channels/x?key=k&dir=read":        http.StatusNotFound,
		"/ws/channels/x?key=k":                 http.StatusBadRequest,
		"/ws/channels/x?key=k&dir=up":          http.StatusBadRequest,
		"/ws/channels/x?dir=read":              http.StatusBadRequest,
		"/ws/channels/../../x?key=k&dir=write": http.StatusNotFound,
		"/":                                    http.StatusUpgradeRequired,
	} {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, base+path, http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		request.Close = true
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		_ = response.Body.Close()
		if response.StatusCode != want {
			t.Errorf("%s: status %d, want %d", path, response.StatusCode, want)
		}
	}
	for _, path := range []string{"", "/", "//", "/otel"} {
		socket, _, err := websocket.Dial(ctx, e.URL()+path, nil) //nolint:bodyclose // The library has closed it.
		if err != nil {
			t.Errorf("%q: %v", path, err)
			continue
		}
		if err := socket.Write(ctx, websocket.MessageBinary, []byte("OTLP{}")); err != nil {
			t.Error(err)
		}
		_ = socket.CloseNow()
	}
	again, err := iiitest.Start(iiitest.Options{Address: e.Address(), Log: slog.New(slog.DiscardHandler)})
	if err == nil {
		again.Close()
		t.Error("two engines have one address")
	}
	e.Close()
	e.Close()
	if again, err = iiitest.Start(iiitest.Options{Address: e.Address(), Log: slog.New(slog.DiscardHandler)}); err != nil {
		t.Fatal(err)
	}
	again.Close()
	if _, err := again.Call(ctx, "x", nil); !errors.Is(err, iii.ErrClosed) {
		t.Errorf("got %v", err)
	}
}
