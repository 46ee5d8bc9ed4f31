package iii_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/coder/websocket"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii/iiitest"
)

const uuidText = "fde9143a-275d-418c-959c-24830968f89c"

// hostile are messages that no engine should send. secret is in all of them that
// can hold it.
func hostile() map[string]string {
	const secret = "S3CRET"
	return map[string]string{
		"nothing":            "",
		"not JSON":           secret,
		"half":               `{"type":"` + secret,
		"null":               "null",
		"array":              `["` + secret + `"]`,
		"string":             `"` + secret + `"`,
		"two objects":        `{"type":"ping"}{"type":"` + secret + `"}`,
		"no type":            `{"x":"` + secret + `"}`,
		"type of a number":   `{"type":1}`,
		"unknown type":       `{"type":"` + secret + `","data":{}}`,
		"other case":         `{"TYPE":"invokefunction","Type":"registrationrejected","code":"x"}`,
		"not UTF-8":          "{\"type\":\"" + secret + "\xff\xfe\"}",
		"NUL":                "{\"type\":\"\x00" + secret + "\"}",
		"deep":               `{"type":"invokefunction","invocation_id":"` + uuidText + `","function_id":"f::echo","data":` + strings.Repeat("[", 200_000) + strings.Repeat("]", 200_000) + "}",
		"deep and open":      strings.Repeat(`{"a":`, 100_000),
		"call without id":    `{"type":"invokefunction","function_id":"f::echo","data":"` + secret + `"}`,
		"call with a number": `{"type":"invokefunction","invocation_id":7,"function_id":"f::echo","data":"` + secret + `"}`,
		"call with odd id":   `{"type":"invokefunction","invocation_id":"` + secret + `","function_id":"f::echo","data":{}}`,
		"call of nobody":     `{"type":"invokefunction","invocation_id":"` + uuidText + `"}`,
		"call of a stranger": `{"type":"invokefunction","invocation_id":"` + uuidText + `","function_id":"` + secret + `","data":{}}`,
		"twice the same key": `{"type":"invokefunction","type":"ping","invocation_id":"` + uuidText + `","function_id":"f::echo","data":{"a":1,"a":"` + secret + `"}}`,
		"lone surrogates":    `{"type":"invokefunction","invocation_id":"` + uuidText + `","function_id":"f::echo","data":"\ud800` + secret + `\udfff"}`,
		"lone surrogate id":  `{"type":"invokefunction","invocation_id":"` + uuidText + `","function_id":"\ud800` + secret + `","data":{}}`,
		"result of nobody":   `{"type":"invocationresult","invocation_id":"` + uuidText + `","function_id":"x","result":"` + secret + `"}`,
		"result without id":  `{"type":"invocationresult","result":"` + secret + `"}`,
		"odd welcome":        `{"type":"workerregistered","worker_id":"` + secret + `","reattach_token":"` + secret + `"}`,
		"empty welcome":      `{"type":"workerregistered"}`,
		"refused by nobody":  `{"type":"registrationrejected","worker_name":"` + secret + `"}`,
		"refused stranger":   `{"type":"registrationrejected","code":"FUNCTION_NAMESPACE_CONFLICT","function_id":"` + secret + `"}`,
		"trigger":            `{"type":"registertrigger","id":"` + secret + `","trigger_type":"x","function_id":"f::echo","config":{}}`,
		"pong":               `{"type":"pong"}`,
		"large":              `{"type":"` + strings.Repeat(secret, 3<<20) + `"}`,
		"large call":         `{"type":"invokefunction","invocation_id":"` + uuidText + `","function_id":"f::count","data":"` + strings.Repeat("x", 62<<20) + `"}`,
	}
}

func TestHostileMessagesChangeNothing(t *testing.T) {
	t.Parallel()
	ctx := within(t)
	engine := startEngine(t, iiitest.Options{})
	var log logbook
	c := open(t, iii.Options{URL: engine.URL(), Log: log.logger(), Functions: []iii.Function{
		{ID: "f::echo", Handler: echo},
		{ID: "f::count", Handler: func(_ context.Context, call iii.Invocation) (json.RawMessage, error) {
			return fmt.Appendf(nil, "%d", len(call.Data)), nil
		}},
	}})
	if err := engine.AwaitFunction(ctx, "f::count"); err != nil {
		t.Fatal(err)
	}
	id := named(t, engine, "sandbox-libkrun")
	for name, text := range hostile() {
		if !engine.Inject(id, []byte(text)) {
			t.Fatalf("%s: the connection is gone", name)
		}
		if result, err := engine.Call(ctx, "f::echo", json.RawMessage("1")); err != nil || string(result) != "1" {
			t.Errorf("after %s: got %s, %v", name, result, err)
		}
		if _, err := c.Invoke(ctx, iii.Request{Function: "engine::workers::list"}); err != nil {
			t.Errorf("after %s: %v", name, err)
		}
	}
	if now := named(t, engine, "sandbox-libkrun"); now != id {
		t.Error("the connection was made anew")
	}
	if text := log.String(); strings.Contains(text, "S3CRET") || !strings.Contains(text, "malformed frame") {
		t.Errorf("the log is %.2000s", text)
	}
}

// The engine's own words are logged, but not without bound.
func TestWordsOfTheEngineAreCut(t *testing.T) {
	t.Parallel()
	ctx := within(t)
	engine := startEngine(t, iiitest.Options{})
	var log logbook
	open(t, iii.Options{URL: engine.URL(), Log: log.logger(), Functions: []iii.Function{{ID: "f::echo", Handler: echo}}})
	if err := engine.AwaitFunction(ctx, "f::echo"); err != nil {
		t.Fatal(err)
	}
	long := strings.Repeat("x", 1<<20)
	engine.Inject(named(t, engine, "sandbox-libkrun"), []byte(`{"type":"registrationrejected","code":"`+long+`","function_id":"f::echo","owner_worker_id":"`+long+`"}`))
	if _, err := engine.Call(ctx, "f::echo", nil); err != nil {
		t.Error(err)
	}
	if text := log.String(); !strings.Contains(text, "xxx") || len(text) > 4<<10 {
		t.Errorf("it logged %d bytes: %.1000s", len(text), text)
	}
}

func FuzzMessagesOfTheEngine(f *testing.F) {
	for _, text := range hostile() {
		if len(text) < 1000 {
			f.Add([]byte(text))
		}
	}
	f.Add([]byte(`{"type":"invokefunction","invocation_id":"` + uuidText + `","function_id":"f::echo","data":{"a":[1]},"metadata":{},"traceparent":"x"}`))
	f.Add([]byte(`{"type":"invocationresult","invocation_id":"` + uuidText + `","function_id":"f","error":{"code":"c","message":"m","stacktrace":null}}`))
	engine, err := iiitest.Start(iiitest.Options{Log: (&logbook{}).logger()})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(engine.Close)
	c, err := iii.Open(iii.Options{URL: engine.URL(), Name: "w", Log: (&logbook{}).logger(), Functions: []iii.Function{{ID: "f::echo", Handler: echo}}})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { _ = c.Close(context.Background()) })
	f.Fuzz(func(t *testing.T, text []byte) {
		// What ends a connection by right.
		var m map[string]json.RawMessage
		if json.Unmarshal(text, &m) == nil {
			var kind string
			if json.Unmarshal(m["type"], &kind) == nil && (kind == "registrationrejected" || kind == "error") {
				t.Skip("SKIPPED: it ends the connection by right")
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		if err := engine.AwaitFunction(ctx, "f::echo"); err != nil {
			t.Fatal(err)
		}
		id := engine.Workers()[0].ID
		engine.Inject(id, text)
		if result, err := engine.Call(ctx, "f::echo", json.RawMessage("1")); err != nil || string(result) != "1" {
			t.Errorf("got %s, %v", result, err)
		}
		if engine.Workers()[0].ID != id {
			t.Error("the connection was made anew")
		}
	})
}

func TestTooLargeMessageEndsTheConnectionAlone(t *testing.T) {
	t.Parallel()
	ctx := within(t)
	engine := startEngine(t, iiitest.Options{})
	c := open(t, iii.Options{URL: engine.URL(), Functions: []iii.Function{{ID: "f::echo", Handler: echo}}})
	if err := engine.AwaitFunction(ctx, "f::echo"); err != nil {
		t.Fatal(err)
	}
	id := named(t, engine, "sandbox-libkrun")
	engine.Inject(id, []byte(`{"type":"`+strings.Repeat("x", 66<<20)+`"}`))
	if err := engine.Await(ctx, func() bool { w := engine.Workers(); return len(w) == 1 && w[0].Name != "" && w[0].ID != id }); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Invoke(ctx, iii.Request{Function: "f::echo"}); err != nil {
		t.Error(err)
	}
}

func TestLargeCallsAndResults(t *testing.T) {
	t.Parallel()
	ctx := within(t)
	engine := startEngine(t, iiitest.Options{})
	c := open(t, iii.Options{URL: engine.URL(), Functions: []iii.Function{
		{ID: "f::echo", Handler: echo},
		{ID: "f::huge", Handler: func(context.Context, iii.Invocation) (json.RawMessage, error) {
			return json.RawMessage(`"` + strings.Repeat("x", iii.MaxMessage) + `"`), nil
		}},
		{ID: "f::hugeError", Handler: func(context.Context, iii.Invocation) (json.RawMessage, error) {
			return nil, errors.New(strings.Repeat("x", iii.MaxMessage))
		}},
		{ID: "f::bytes", Handler: func(context.Context, iii.Invocation) (json.RawMessage, error) {
			return json.RawMessage("{\"s\":\"a\xff\xfeb\"}"), nil
		}},
		{ID: "f::errorBytes", Handler: func(context.Context, iii.Invocation) (json.RawMessage, error) {
			return nil, errors.New("a\xffb")
		}},
	}})
	large := json.RawMessage(`"` + strings.Repeat("x", iii.MaxMessage-1000) + `"`)
	if result, err := c.Invoke(ctx, iii.Request{Function: "f::echo", Data: large, Timeout: bound}); err != nil || len(result) != len(large) {
		t.Errorf("got %d bytes, %v", len(result), err)
	}
	if _, err := c.Invoke(ctx, iii.Request{Function: "f::echo", Data: json.RawMessage(`"` + strings.Repeat("x", iii.MaxMessage) + `"`)}); !errors.Is(err, iii.ErrTooLarge) {
		t.Errorf("got %v", err)
	}
	for _, function := range []string{"f::huge", "f::hugeError"} {
		_, err := c.Invoke(ctx, iii.Request{Function: function, Timeout: bound})
		if e := wantError(t, err, iii.CodeInvocationFailed); !strings.Contains(e.Message, "too large") {
			t.Errorf("%s: %.200s", function, e.Message)
		}
	}
	if result, err := c.Invoke(ctx, iii.Request{Function: "f::bytes"}); err != nil || string(result) != "{\"s\":\"a\uFFFDb\"}" {
		t.Errorf("got %q, %v", result, err)
	}
	_, err := c.Invoke(ctx, iii.Request{Function: "f::errorBytes"})
	if e := wantError(t, err, iii.CodeInvocationFailed); e.Message != "a\uFFFDb" {
		t.Errorf("got %q", e.Message)
	}
	if _, err := c.Invoke(ctx, iii.Request{Function: "f::echo", Data: json.RawMessage("{")}); err == nil {
		t.Error("a payload that is not JSON was sent")
	}
}

func TestCallsBeyondTheBoundAreRefused(t *testing.T) {
	t.Parallel()
	ctx := within(t)
	engine := startEngine(t, iiitest.Options{})
	started, release := make(chan struct{}), make(chan struct{})
	open(t, iii.Options{URL: engine.URL(), MaxCalls: 2, Fault: func(err error) error { return fmt.Errorf("S400 in full: %w", err) }, Functions: []iii.Function{
		{ID: "f::hold", Handler: func(context.Context, iii.Invocation) (json.RawMessage, error) {
			started <- struct{}{}
			<-release
			return nil, nil
		}},
	}})
	if err := engine.AwaitFunction(ctx, "f::hold"); err != nil {
		t.Fatal(err)
	}
	held := make(chan error, 2)
	for range 2 {
		go func() {
			_, err := engine.Call(ctx, "f::hold", nil)
			held <- err
		}()
		<-started
	}
	_, err := engine.Call(ctx, "f::hold", nil)
	if e := wantError(t, err, iii.CodeInvocationFailed); !strings.HasPrefix(e.Message, "S400 in full") {
		t.Errorf("got %q", e.Message)
	}
	release <- struct{}{}
	release <- struct{}{}
	for range 2 {
		if err := <-held; err != nil {
			t.Error(err)
		}
	}
	// There is room again, if not at once.
	go func() { <-started; close(release) }()
	for {
		_, err := engine.Call(ctx, "f::hold", nil)
		if err == nil {
			break
		}
		wantError(t, err, iii.CodeInvocationFailed)
	}
}

func TestTimeouts(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var net network
		c := open(t, iii.Options{URL: "ws://engine:1", Dial: net.dial})
		var seen frames

		// Without a connection, and never sent later.
		began := time.Now()
		_, err := c.Invoke(t.Context(), iii.Request{Function: "f::never"})
		if waited := time.Since(began); !errors.Is(err, iii.ErrTimeout) || waited != iii.DefaultTimeout {
			t.Errorf("got %v after %v", err, waited)
		}
		if err := c.Notify(t.Context(), iii.Request{Function: "f::never", Timeout: time.Second}); !errors.Is(err, iii.ErrTimeout) {
			t.Errorf("got %v", err)
		}
		engine := startEngine(t, iiitest.Options{Listener: net.listen(), Observe: seen.observe})
		engine.Handle("f::slow", func(ctx context.Context, _ json.RawMessage) (json.RawMessage, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		})
		if _, err := c.Invoke(t.Context(), iii.Request{Function: "engine::workers::list", Timeout: time.Minute}); err != nil {
			t.Fatal(err)
		}
		for _, m := range seen.of(named(t, engine, "sandbox-libkrun")) {
			if m["function_id"] == "f::never" {
				t.Error("a call that was given up was sent")
			}
		}

		// With one.
		began = time.Now()
		_, err = c.Invoke(t.Context(), iii.Request{Function: "f::slow", Timeout: 5 * time.Second})
		if waited := time.Since(began); !errors.Is(err, iii.ErrTimeout) || waited != 5*time.Second {
			t.Errorf("got %v after %v", err, waited)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := c.Invoke(ctx, iii.Request{Function: "f::slow"}); !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, iii.ErrTimeout) {
			t.Errorf("got %v", err)
		}
		ctx, cancel = context.WithCancel(t.Context())
		cancel()
		if _, err := c.Invoke(ctx, iii.Request{Function: "f::slow"}); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
	})
}

// goodbye is an engine that reports with which code its connection is closed.
func goodbye(t *testing.T, codes chan<- websocket.StatusCode) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		socket, err := websocket.Accept(w, r, nil)
		if err != nil {
			t.Error(err)
			return
		}
		for err == nil {
			_, _, err = socket.Read(r.Context())
		}
		codes <- websocket.CloseStatus(err)
		_ = socket.CloseNow()
	})
}

func TestClosesInOrder(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var net network
		codes := make(chan websocket.StatusCode, 1)
		server := &http.Server{Handler: goodbye(t, codes), ReadHeaderTimeout: time.Minute}
		l := net.listen()
		go func() { _ = server.Serve(l) }()
		t.Cleanup(func() { _ = server.Close() })
		c := open(t, iii.Options{URL: "ws://engine:1", Dial: net.dial})
		pending := make(chan error, 1)
		go func() {
			_, err := c.Invoke(t.Context(), iii.Request{Function: "f::unanswered"})
			pending <- err
		}()
		synctest.Wait()
		began := time.Now()
		if err := c.Close(t.Context()); err != nil || time.Since(began) > 0 {
			t.Errorf("closed after %v: %v", time.Since(began), err)
		}
		if code := <-codes; code != websocket.StatusNormalClosure {
			t.Errorf("the close code is %d", code)
		}
		if err := <-pending; !errors.Is(err, iii.ErrClosed) && !errors.Is(err, iii.ErrDisconnected) {
			t.Errorf("a pending call ended with %v", err)
		}
		if err := c.Err(); !errors.Is(err, iii.ErrClosed) {
			t.Errorf("got %v", err)
		}
		if _, err := c.Invoke(t.Context(), iii.Request{Function: "f::late"}); !errors.Is(err, iii.ErrClosed) {
			t.Errorf("got %v", err)
		}
	})
}

func TestCloseWaitsForAnswers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var net network
		engine := startEngine(t, iiitest.Options{Listener: net.listen()})
		functions := []iii.Function{
			{ID: "f::takes3s", Handler: func(context.Context, iii.Invocation) (json.RawMessage, error) {
				<-time.After(3 * time.Second)
				return json.RawMessage(`"done"`), nil
			}},
			{ID: "f::untilCancelled", Handler: func(ctx context.Context, _ iii.Invocation) (json.RawMessage, error) {
				<-ctx.Done()
				return nil, errors.New("cancelled")
			}},
		}
		call := func(function string) <-chan error {
			ended := make(chan error, 1)
			go func() {
				_, err := engine.Call(t.Context(), function, nil)
				ended <- err
			}()
			synctest.Wait()
			return ended
		}
		c := open(t, iii.Options{URL: engine.URL(), Dial: net.dial, Functions: functions})
		synctest.Wait()
		ended := call("f::takes3s")
		closed := make(chan error, 1)
		go func() { closed <- c.Close(t.Context()) }()
		synctest.Wait()
		// A call that comes now is refused at once.
		began := time.Now()
		_, err := engine.Call(t.Context(), "f::takes3s", nil)
		wantError(t, err, iii.CodeInvocationStopped)
		if waited := time.Since(began); waited != 0 {
			t.Errorf("refused after %v", waited)
		}
		if err := <-closed; err != nil {
			t.Error(err)
		}
		if err := <-ended; err != nil {
			t.Errorf("a call that had the time ended with %v", err)
		}

		c = open(t, iii.Options{URL: engine.URL(), Dial: net.dial, Functions: functions})
		synctest.Wait()
		ended = call("f::untilCancelled")
		ctx, cancel := context.WithTimeout(t.Context(), 4*time.Second)
		defer cancel()
		began = time.Now()
		if err := c.Close(ctx); err != nil || time.Since(began) != 4*time.Second {
			t.Errorf("closed after %v: %v", time.Since(began), err)
		}
		wantError(t, <-ended, iii.CodeInvocationFailed)
	})
}

func TestCloseDoesNotWaitForEver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var net network
		engine := startEngine(t, iiitest.Options{Listener: net.listen()})
		release := make(chan struct{})
		c, err := iii.Open(iii.Options{URL: engine.URL(), Name: "w", Dial: net.dial, Log: (&logbook{}).logger(), Functions: []iii.Function{
			{ID: "f::stuck", Handler: func(context.Context, iii.Invocation) (json.RawMessage, error) {
				<-release
				return nil, nil
			}},
		}})
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		ended := make(chan error, 1)
		go func() {
			_, err := engine.Call(t.Context(), "f::stuck", nil)
			ended <- err
		}()
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		began := time.Now()
		if err := c.Close(ctx); err == nil || time.Since(began) > 5*time.Second {
			t.Errorf("closed after %v: %v", time.Since(began), err)
		}
		wantError(t, <-ended, iii.CodeInvocationStopped)
		close(release)
		if err := c.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}
