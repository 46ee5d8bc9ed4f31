package iii_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii/iiitest"
)

// frames collects what workers send.
type frames struct {
	mu   sync.Mutex
	sent map[string][]map[string]any // by worker
}

func (f *frames) observe(worker string, text []byte) {
	var m map[string]any
	if json.Unmarshal(text, &m) != nil {
		m = map[string]any{"type": "not JSON"}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.sent == nil {
		f.sent = map[string][]map[string]any{}
	}
	f.sent[worker] = append(f.sent[worker], m)
}

func (f *frames) of(worker string) []map[string]any {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.sent[worker]
}

// named returns the id of the connected worker of that name.
func named(t *testing.T, e *iiitest.Engine, name string) string {
	t.Helper()
	for _, w := range e.Workers() {
		if w.Name == name {
			return w.ID
		}
	}
	t.Fatalf("no worker %s is connected", name)
	return ""
}

func TestTellsItsNameBeforeItsFunctions(t *testing.T) {
	t.Parallel()
	ctx := within(t)
	var seen frames
	engine := startEngine(t, iiitest.Options{Observe: seen.observe})
	environment := map[string]string{"III_URL": engine.URL() + "/", "III_WORKER_NAME": "box ", "III_NAMESPACE": " team ", "III_ISOLATION": "libkrun"}
	o := iii.FromEnv(func(key string) string { return environment[key] }, "sandbox-libkrun")
	o.Version, o.Description = "0.2.0", "sandboxes"
	o.Functions = []iii.Function{
		{
			ID: "b::second", Description: "d", Handler: echo, Metadata: json.RawMessage(`{}`),
			RequestFormat: json.RawMessage(`{"type":"object","title":"<a>"}`), ResponseFormat: json.RawMessage(`true`),
		},
		{ID: "a::first", Handler: echo},
	}
	open(t, o)
	if err := engine.Await(ctx, func() bool { return len(engine.Functions()) == 2 }); err != nil {
		t.Fatal(err)
	}
	sent := seen.of(named(t, engine, "box "))
	if len(sent) != 3 || sent[0]["function_id"] != "engine::workers::register" || sent[1]["id"] != "b::second" || sent[2]["id"] != "a::first" {
		t.Fatalf("sent %v", sent)
	}
	told, _ := sent[0]["data"].(map[string]any)
	for key, want := range map[string]any{
		"pid": float64(os.Getpid()), "name": "box ", "namespace": "team", "isolation": "libkrun", "runtime": "go", "version": "0.2.0", "description": "sandboxes",
	} {
		if told[key] != want {
			t.Errorf("%s is %v, want %v", key, told[key], want)
		}
	}
	if features := fmt.Sprint(told["features"]); features != "[large-messages.v1]" {
		t.Errorf("its features are %s", features)
	}
	if action, _ := sent[0]["action"].(map[string]any); action["type"] != "void" || sent[0]["invocation_id"] != nil {
		t.Errorf("the worker registers with %v", sent[0])
	}
	// What is absent is left out: newer engines refuse null.
	if len(sent[2]) != 2 {
		t.Errorf("a bare function is registered with %v", sent[2])
	}
	f := engine.Functions()[1]
	if f.Namespace != "team" || f.Description != "d" || string(f.RequestFormat) != `{"type":"object","title":"<a>"}` || string(f.ResponseFormat) != "true" || string(f.Metadata) != "{}" {
		t.Errorf("got %+v", f)
	}
}

func TestOptionsAreChecked(t *testing.T) {
	t.Parallel()
	none := func(string) string { return "" }
	if o := iii.FromEnv(none, "x"); o.Name != "x" || o.Namespace != "" || o.URL != "" {
		t.Errorf("got %+v", o)
	}
	good := iii.Function{ID: "f", Handler: echo}
	for name, o := range map[string]iii.Options{
		"name":           {URL: iii.DefaultURL},
		"III_URL":        {Name: "n", URL: "http://user:secret@host"},
		"III_URL,":       {Name: "n", URL: "ws://secret host:\x7f"},
		"twice":          {Name: "n", Functions: []iii.Function{good, good}},
		"no id":          {Name: "n", Functions: []iii.Function{{Handler: echo}}},
		"no handler":     {Name: "n", Functions: []iii.Function{{ID: "f"}}},
		"what is not JS": {Name: "n", Functions: []iii.Function{{ID: "f", Handler: echo, RequestFormat: json.RawMessage("{")}}},
	} {
		o.Log = (&logbook{}).logger()
		c, err := iii.Open(o)
		if err == nil {
			_ = c.Close(t.Context())
		}
		if err == nil || !strings.Contains(err.Error(), strings.TrimSuffix(name, ",")) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func TestComesBackAfterALoss(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var net network
		var seen frames
		engine := startEngine(t, iiitest.Options{Listener: net.listen(), Observe: seen.observe})
		started, release := make(chan struct{}, 1), make(chan struct{})
		open(t, iii.Options{URL: engine.URL(), Dial: net.dial, Functions: []iii.Function{
			{ID: "f::echo", Handler: echo},
			{ID: "f::hold", Handler: func(context.Context, iii.Invocation) (json.RawMessage, error) {
				started <- struct{}{}
				<-release
				return nil, nil
			}},
		}})
		caller := open(t, iii.Options{URL: engine.URL(), Name: "caller", Dial: net.dial})
		synctest.Wait()
		before := engine.Workers()
		previous := named(t, engine, "sandbox-libkrun")

		// A call in flight when its caller's connection goes can have no result.
		lost := make(chan error, 1)
		go func() {
			_, err := caller.Invoke(t.Context(), iii.Request{Function: "f::hold"})
			lost <- err
		}()
		<-started
		for _, w := range before {
			if !engine.Disconnect(w.ID) {
				t.Fatalf("%s was gone", w.Name)
			}
		}
		if err := <-lost; !errors.Is(err, iii.ErrDisconnected) {
			t.Errorf("got %v, want ErrDisconnected", err)
		}
		synctest.Wait()
		if n := len(engine.Workers()); n != 0 {
			t.Fatalf("%d workers are there", n)
		}

		// A call made while there is no connection waits for one.
		early := make(chan error, 1)
		go func() {
			_, err := caller.Invoke(t.Context(), iii.Request{Function: "engine::workers::list"})
			early <- err
		}()
		if err := <-early; err != nil {
			t.Errorf("a call made offline: %v", err)
		}
		if err := engine.AwaitFunction(t.Context(), "f::hold"); err != nil {
			t.Fatal(err)
		}
		if _, err := caller.Invoke(t.Context(), iii.Request{Function: "f::echo"}); err != nil {
			t.Error(err)
		}
		close(release)
		synctest.Wait()

		// It took its place back with the token, before anything else.
		sent := seen.of(named(t, engine, "sandbox-libkrun"))
		if len(sent) < 4 || sent[0]["type"] != "reattach" || sent[0]["previous_worker_id"] != previous || sent[0]["reattach_token"] == nil ||
			sent[1]["function_id"] != "engine::workers::register" || sent[2]["id"] != "f::echo" || sent[3]["id"] != "f::hold" {
			t.Errorf("sent %v", sent)
		}
	})
}

func TestAnotherEngineTakesTheirPlace(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var net network
		first := startEngine(t, iiitest.Options{Listener: net.listen()})
		worker := open(t, iii.Options{URL: first.URL(), Dial: net.dial, Functions: []iii.Function{{ID: "f::echo", Handler: echo}}})
		synctest.Wait()
		if !first.HasFunction("f::echo") {
			t.Fatal("the function is missing")
		}
		first.Close()
		<-time.After(10 * time.Minute)
		second := startEngine(t, iiitest.Options{Listener: net.listen()})
		began := time.Now()
		if err := second.AwaitFunction(t.Context(), "f::echo"); err != nil {
			t.Fatal(err)
		}
		if waited := time.Since(began); waited > 39*time.Second {
			t.Errorf("it took %v", waited)
		}
		if n := len(second.Functions()); n != 1 {
			t.Errorf("%d functions", n)
		}
		if result, err := second.Call(t.Context(), "f::echo", json.RawMessage(`[1]`)); err != nil || string(result) != "[1]" {
			t.Errorf("got %s, %v", result, err)
		}
		if err := worker.Err(); err != nil {
			t.Error(err)
		}
	})
}

func TestBacksOff(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		times := make(chan time.Time, 100)
		dial := func(context.Context, string, string) (net.Conn, error) {
			times <- time.Now()
			return nil, errRefused
		}
		open(t, iii.Options{Dial: dial})
		last := <-times
		for _, seconds := range []float64{1, 2, 4, 8, 16, 30, 30, 30} {
			now := <-times
			low, high := time.Duration(seconds*0.7*1e9), time.Duration(seconds*1.3*1e9)
			if got := now.Sub(last); got < low || got > high {
				t.Errorf("waited %v, want %v to %v", got, low, high)
			}
			last = now
		}
	})
}

func TestQuietConnectionsArePingedAndKept(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var net network
		engine := startEngine(t, iiitest.Options{Listener: net.listen()})
		open(t, iii.Options{URL: engine.URL(), Dial: net.dial})
		synctest.Wait()
		before := engine.Workers()
		<-time.After(time.Hour)
		after := engine.Workers()
		if len(before) != 1 || len(after) != 1 || before[0].ID != after[0].ID {
			t.Errorf("%v became %v", before, after)
		}
	})
}

func TestTakenNameEndsTheClient(t *testing.T) {
	t.Parallel()
	ctx := within(t)
	engine := startEngine(t, iiitest.Options{})
	open(t, iii.Options{URL: engine.URL()})
	if err := engine.Await(ctx, func() bool { w := engine.Workers(); return len(w) == 1 && w[0].Name != "" }); err != nil {
		t.Fatal(err)
	}
	var log logbook
	second := open(t, iii.Options{URL: engine.URL(), Log: log.logger()})
	select {
	case <-second.Done():
	case <-ctx.Done():
		t.Fatal("the second worker of that name goes on")
	}
	var rejected *iii.RejectedError
	if err := second.Err(); !errors.As(err, &rejected) || rejected.Code != "WORKER_NAMESPACE_CONFLICT" || rejected.Name != "sandbox-libkrun" || rejected.Owner != engine.Workers()[0].ID || !strings.Contains(err.Error(), "III_WORKER_NAME") {
		t.Errorf("got %v", err)
	}
	if _, err := second.Invoke(ctx, iii.Request{Function: "engine::workers::list"}); !errors.Is(err, iii.ErrClosed) {
		t.Errorf("a call of it: %v", err)
	}
	if !strings.Contains(log.String(), "level=ERROR") {
		t.Errorf("the log is %s", &log)
	}
	// In another namespace the name is free.
	third := open(t, iii.Options{URL: engine.URL(), Namespace: "other"})
	if _, err := third.Invoke(ctx, iii.Request{Function: "engine::workers::list"}); err != nil {
		t.Error(err)
	}
}

// Later engines refuse a function for more reasons than ours knows.
func TestRefusedFunctionLeavesTheOthers(t *testing.T) {
	t.Parallel()
	ctx := within(t)
	engine := startEngine(t, iiitest.Options{})
	var log logbook
	c := open(t, iii.Options{URL: engine.URL(), Log: log.logger(), Functions: []iii.Function{{ID: "f::a", Handler: echo}, {ID: "f::b", Handler: echo}}})
	if err := engine.AwaitFunction(ctx, "f::b"); err != nil {
		t.Fatal(err)
	}
	id := named(t, engine, "sandbox-libkrun")
	engine.Inject(id, []byte(`{"type":"registrationrejected","code":"UNSUPPORTED","namespace":"default","function_id":"f::a","owner_worker_id":""}`))
	if result, err := engine.Call(ctx, "f::b", json.RawMessage("1")); err != nil || string(result) != "1" {
		t.Errorf("got %s, %v", result, err)
	}
	if err := c.Err(); err != nil || engine.Workers()[0].ID != id {
		t.Errorf("the connection did not last: %v", err)
	}
	if text := log.String(); !strings.Contains(text, "function=f::a") || !strings.Contains(text, "code=UNSUPPORTED") {
		t.Errorf("the log is %s", text)
	}
}

// Credentials, in the environment's token or in the address's query, go with each
// connection, those of channels too, and into no log.
func TestCredentialsGoWithEveryConnection(t *testing.T) {
	t.Parallel()
	ctx := within(t)
	asked := make(chan *http.Request, 8)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case asked <- r:
		default:
		}
		w.WriteHeader(http.StatusUnauthorized)
	}))
	t.Cleanup(server.Close)
	environment := map[string]string{"III_URL": "ws" + strings.TrimPrefix(server.URL, "http") + "/?tenant=secret", "III_TOKEN": " secret\n"}
	var log logbook
	o := iii.FromEnv(func(key string) string { return environment[key] }, "x")
	o.Log = log.logger()
	c := open(t, o)
	check := func(path, query string) {
		t.Helper()
		r := <-asked
		for r.URL.Path != path {
			r = <-asked // it tries again meanwhile
		}
		if got := r.Header.Values("Authorization"); len(got) != 1 || got[0] != "Bearer secret" || r.URL.Path != path || r.URL.RawQuery != query {
			t.Errorf("it asks for %s with %q", r.URL, got)
		}
	}
	check("/", "tenant=secret")
	ref := iii.ChannelRef{ChannelID: "id", AccessKey: "key", Direction: "read"}
	if _, err := c.OpenReader(ctx, ref, iii.ChannelOptions{}); err == nil || strings.Contains(err.Error(), "secret") {
		t.Errorf("got %v", err)
	}
	check("/ws/channels/id", "tenant=secret&dir=read&key=key")
	if strings.Contains(log.String(), "secret") {
		t.Errorf("the log is %s", &log)
	}
}

// FUNCTION_NAMESPACE_CONFLICT: the squatter gets the calls, everything else works,
// and the function is ours once the squatter has gone.
func TestTakenFunctionIsTakenOverLater(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var net network
		engine := startEngine(t, iiitest.Options{Listener: net.listen()})
		squatter := open(t, iii.Options{URL: engine.URL(), Dial: net.dial, Name: "squatter", Functions: []iii.Function{
			{ID: "sandbox-libkrun::create", Handler: func(context.Context, iii.Invocation) (json.RawMessage, error) {
				return json.RawMessage(`"squatter"`), nil
			}},
		}})
		synctest.Wait()
		var log logbook
		ours := open(t, iii.Options{URL: engine.URL(), Dial: net.dial, Log: log.logger(), Functions: []iii.Function{
			{ID: "sandbox-libkrun::create", Handler: echo},
			{ID: "sandbox-libkrun::list", Handler: echo},
		}})
		<-time.After(5 * time.Minute)
		if result, err := engine.Call(t.Context(), "sandbox-libkrun::create", json.RawMessage("1")); err != nil || string(result) != `"squatter"` {
			t.Errorf("got %s, %v", result, err)
		}
		if result, err := engine.Call(t.Context(), "sandbox-libkrun::list", json.RawMessage("1")); err != nil || string(result) != "1" {
			t.Errorf("got %s, %v", result, err)
		}
		if n := strings.Count(log.String(), "level=WARN"); n != 1 {
			t.Errorf("%d warnings:\n%s", n, &log)
		}
		if err := squatter.Close(t.Context()); err != nil {
			t.Error(err)
		}
		<-time.After(31 * time.Second)
		if result, err := engine.Call(t.Context(), "sandbox-libkrun::create", json.RawMessage("1")); err != nil || string(result) != "1" {
			t.Errorf("got %s, %v", result, err)
		}
		if err := ours.Err(); err != nil {
			t.Error(err)
		}
	})
}

func TestEngineRestartsUnderLoad(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var net network
		engine := startEngine(t, iiitest.Options{Listener: net.listen()})
		worker := open(t, iii.Options{URL: engine.URL(), Dial: net.dial, Functions: []iii.Function{
			{ID: "f::echo", Handler: echo},
			{ID: "f::slow", Handler: func(_ context.Context, call iii.Invocation) (json.RawMessage, error) {
				<-time.After(300 * time.Millisecond)
				return call.Data, nil
			}},
		}})
		caller := open(t, iii.Options{URL: engine.URL(), Name: "caller", Dial: net.dial})
		ctx, stop := context.WithCancel(t.Context())
		var load sync.WaitGroup
		var good atomic.Int64
		for i := range 16 {
			load.Go(func() {
				for ctx.Err() == nil {
					function := [...]string{"f::echo", "f::slow"}[i%2]
					_, err := caller.Invoke(ctx, iii.Request{Function: function, Timeout: 10 * time.Second})
					var remote *iii.Error
					switch {
					case err == nil:
						good.Add(1)
					case ctx.Err() != nil, errors.Is(err, iii.ErrDisconnected):
					case errors.As(err, &remote) && (remote.Code == iii.CodeFunctionNotFound || remote.Code == iii.CodeInvocationStopped):
					default:
						t.Errorf("a call ended with %v", err)
						return
					}
					<-time.After(10 * time.Millisecond)
				}
			})
		}
		for range 5 {
			<-time.After(3 * time.Second)
			if good.Swap(0) == 0 {
				t.Error("no call succeeded")
			}
			engine.Close()
			<-time.After(2 * time.Second)
			engine = startEngine(t, iiitest.Options{Listener: net.listen()})
			if err := engine.Await(t.Context(), func() bool { return len(engine.Workers()) == 2 && engine.HasFunction("f::slow") }); err != nil {
				t.Fatal(err)
			}
			if n := len(engine.Functions()); n != 2 {
				t.Errorf("%d functions are registered", n)
			}
		}
		stop()
		load.Wait()
		<-time.After(time.Second)
		if n := engine.Pending(); n != 0 {
			t.Errorf("%d calls wait", n)
		}
		if worker.Err() != nil || caller.Err() != nil {
			t.Errorf("ended: %v, %v", worker.Err(), caller.Err())
		}
	})
}
