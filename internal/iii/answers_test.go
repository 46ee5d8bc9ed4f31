package iii_test

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/coder/websocket"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii/iiitest"
)

// A result whose connection is gone is dropped, since the engine has told its
// caller: it is not sent over the next one, and does not keep the client from
// closing while there is no engine.
func TestResultsEndWithTheirConnection(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var net network
		var seen frames
		engine := startEngine(t, iiitest.Options{Listener: net.listen(), Observe: seen.observe})
		release := make(chan struct{})
		c := open(t, iii.Options{URL: engine.URL(), Dial: net.dial, Functions: []iii.Function{
			{ID: "f::slow", Handler: func(ctx context.Context, _ iii.Invocation) (json.RawMessage, error) {
				<-release
				return json.RawMessage("1"), ctx.Err()
			}},
		}})
		synctest.Wait()
		call := func() {
			_, err := engine.Call(t.Context(), "f::slow", nil)
			var e *iii.Error
			if !errors.Is(err, iii.ErrClosed) && (!errors.As(err, &e) || e.Code != iii.CodeInvocationStopped) {
				t.Errorf("the caller got %v", err)
			}
		}
		go call()
		synctest.Wait()
		engine.Disconnect(named(t, engine, "sandbox-libkrun"))
		<-time.After(5 * time.Second)
		close(release)
		synctest.Wait()
		for _, m := range seen.of(named(t, engine, "sandbox-libkrun")) {
			if m["type"] == "invocationresult" {
				t.Errorf("sent %v", m)
			}
		}

		release = make(chan struct{})
		go call()
		synctest.Wait()
		engine.Close()
		<-time.After(5 * time.Second)
		close(release)
		began := time.Now()
		if err := c.Close(t.Context()); err != nil || time.Since(began) > time.Second {
			t.Errorf("closed after %v: %v", time.Since(began), err)
		}
	})
}

// A burst of calls is answered, each of them: those beyond the bound at once.
func TestBurstIsAnswered(t *testing.T) {
	t.Parallel()
	ctx := within(t)
	engine := startEngine(t, iiitest.Options{})
	release := make(chan struct{})
	open(t, iii.Options{URL: engine.URL(), MaxCalls: 100, Fault: func(err error) error { return &iii.Error{Code: "BUSY", Message: err.Error()} }, Functions: []iii.Function{
		{ID: "f::hold", Handler: func(context.Context, iii.Invocation) (json.RawMessage, error) {
			<-release
			return nil, nil
		}},
	}})
	if err := engine.AwaitFunction(ctx, "f::hold"); err != nil {
		t.Fatal(err)
	}
	const calls, admitted = 10_000, 100
	ended := make(chan error, calls)
	for range calls {
		go func() {
			_, err := engine.Call(ctx, "f::hold", nil)
			ended <- err
		}()
	}
	for range calls - admitted {
		wantError(t, <-ended, "BUSY")
	}
	close(release)
	for range admitted {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

// Answers that the engine does not take count as well: one that reads slowly does
// not fill the memory.
func TestAnswersThatWaitCount(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var net network
		l := net.listen()
		var made atomic.Int32
		server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			socket, err := websocket.Accept(w, r, nil)
			if err != nil {
				t.Error(err)
				return
			}
			defer func() { _ = socket.CloseNow() }()
			for range 100 {
				call := `{"type":"invokefunction","invocation_id":"` + uuidText + `","function_id":"f::large","data":{}}`
				if err := socket.Write(r.Context(), websocket.MessageText, []byte(call)); err != nil {
					t.Error(err)
				}
				synctest.Wait()
			}
		})}
		go func() { _ = server.Serve(l) }()
		t.Cleanup(func() { _ = server.Close() })
		large := json.RawMessage(`"` + strings.Repeat("x", 64<<10) + `"`)
		open(t, iii.Options{URL: "ws://engine:1", Dial: net.dial, MaxCallBytes: 2 << 20, Functions: []iii.Function{
			{ID: "f::large", Handler: func(context.Context, iii.Invocation) (json.RawMessage, error) {
				made.Add(1)
				return large, nil
			}},
		}})
		<-time.After(100 * time.Millisecond)
		if n := made.Load(); n < 30 || n > 34 {
			t.Errorf("%d answers of 64 KiB were made", n)
		}
	})
}
