package iii_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii/iiitest"
)

func TestCallsBothWays(t *testing.T) {
	t.Parallel()
	ctx := within(t)
	engine := startEngine(t, iiitest.Options{})
	seen := make(chan iii.Invocation, 1)
	open(t, iii.Options{URL: engine.URL(), Functions: []iii.Function{
		{ID: "sandbox-libkrun::echo", Handler: func(_ context.Context, call iii.Invocation) (json.RawMessage, error) {
			seen <- call
			return call.Data, nil
		}},
		{ID: "sandbox-libkrun::fail", Handler: func(context.Context, iii.Invocation) (json.RawMessage, error) {
			return nil, errors.New(`{"code":"S002","message":"<no> & more"}`)
		}},
		{ID: "sandbox-libkrun::typed", Handler: func(context.Context, iii.Invocation) (json.RawMessage, error) {
			return nil, fmt.Errorf("inner: %w", &iii.Error{Code: "MINE", Message: "m", Stacktrace: "s"})
		}},
		{ID: "sandbox-libkrun::nothing", Handler: func(context.Context, iii.Invocation) (json.RawMessage, error) { return nil, nil }},
		{ID: "sandbox-libkrun::garbage", Handler: func(context.Context, iii.Invocation) (json.RawMessage, error) { return json.RawMessage(`{`), nil }},
		{ID: "sandbox-libkrun::panic", Handler: func(context.Context, iii.Invocation) (json.RawMessage, error) { panic("secret") }},
	}})
	caller := open(t, iii.Options{URL: engine.URL(), Name: "caller"})
	if err := engine.AwaitFunction(ctx, "sandbox-libkrun::panic"); err != nil {
		t.Fatal(err)
	}

	result, err := caller.Invoke(ctx, iii.Request{
		Function: "sandbox-libkrun::echo", Data: json.RawMessage(`{"a":[1,null]}`), Metadata: json.RawMessage(`{"m":1}`),
		Traceparent: "00-1-2-01", Baggage: "k=v",
	})
	if err != nil {
		t.Fatal(err)
	}
	call := <-seen
	if string(call.Metadata) != `{"m":1}` || call.Traceparent != "00-1-2-01" || call.Baggage != "k=v" || call.Function != "sandbox-libkrun::echo" {
		t.Errorf("the handler saw %+v", call)
	}
	var got map[string]any
	if err := json.Unmarshal(result, &got); err != nil || fmt.Sprint(got["a"]) != "[1 <nil>]" || got["_caller_worker_id"] == nil {
		t.Errorf("got %s", result)
	}

	_, err = caller.Invoke(ctx, iii.Request{Function: "sandbox-libkrun::fail"})
	if e := wantError(t, err, iii.CodeInvocationFailed); e.Message != `{"code":"S002","message":"<no> & more"}` {
		t.Errorf("got message %s", e.Message)
	}
	_, err = caller.Invoke(ctx, iii.Request{Function: "sandbox-libkrun::typed"})
	if e := wantError(t, err, "MINE"); e.Message != "m" || e.Stacktrace != "s" {
		t.Errorf("got %+v", e)
	}
	if result, err := caller.Invoke(ctx, iii.Request{Function: "sandbox-libkrun::nothing"}); err != nil || string(result) != "null" {
		t.Errorf("got %s, %v", result, err)
	}
	_, err = caller.Invoke(ctx, iii.Request{Function: "sandbox-libkrun::garbage"})
	wantError(t, err, iii.CodeInvocationFailed)
	_, err = caller.Invoke(ctx, iii.Request{Function: "sandbox-libkrun::panic"})
	if e := wantError(t, err, iii.CodeInvocationFailed); strings.Contains(e.Message, "secret") {
		t.Errorf("the panic's value is in %q", e.Message)
	}
	_, err = caller.Invoke(ctx, iii.Request{Function: "sandbox-libkrun::none"})
	wantError(t, err, iii.CodeFunctionNotFound)
	if err := caller.Notify(ctx, iii.Request{Function: "sandbox-libkrun::echo", Data: json.RawMessage(`"void"`)}); err != nil {
		t.Fatal(err)
	}
	if call := <-seen; string(call.Data) != `"void"` {
		t.Errorf("the void call carried %s", call.Data)
	}
}

func TestChannelCarriesBytes(t *testing.T) {
	t.Parallel()
	ctx := within(t)
	engine := startEngine(t, iiitest.Options{})
	c := open(t, iii.Options{URL: engine.URL()})
	for _, size := range []int{0, 1, 64<<10 - 1, 64 << 10, 1<<20 + 1} {
		w, r, err := c.CreateChannel(ctx, 4)
		if err != nil {
			t.Fatal(err)
		}
		writer, err := c.OpenWriter(ctx, w, iii.ChannelOptions{})
		if err != nil {
			t.Fatal(err)
		}
		sent := make([]byte, size)
		for i := range sent {
			sent[i] = byte(i * 7)
		}
		wrote := make(chan error, 1)
		go func() {
			_, err := writer.Write(sent)
			if err == nil {
				err = writer.WriteText([]byte("done"))
			}
			_ = writer.Close()
			wrote <- err
		}()
		var texts []string
		reader, err := c.OpenReader(ctx, r, iii.ChannelOptions{Idle: 5 * time.Second, Text: func(text []byte) { texts = append(texts, string(text)) }})
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(reader)
		if err != nil || string(got) != string(sent) {
			t.Errorf("%d bytes: got %d, %v", size, len(got), err)
		}
		if err := <-wrote; err != nil {
			t.Errorf("%d bytes: %v", size, err)
		}
		if len(texts) != 1 || texts[0] != "done" {
			t.Errorf("got texts %q", texts)
		}
		_ = reader.Close()
	}
	if n := engine.ReaderPings(); n != 0 {
		t.Errorf("readers pinged %d times", n)
	}
}
