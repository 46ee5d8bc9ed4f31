package nodesdk_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii/iiitest"
	"github.com/iii-hq/workers/sandbox-libkrun/test/nodesdk"
)

// bound is how long all of a test may take.
const bound = 2 * time.Minute

// sizes are those of streams that are easy to get wrong.
var sizes = []int{0, 1, 1<<20 - 1, 1 << 20, 50 << 20}

type setup struct {
	engine *iiitest.Engine
	client *iii.Client
}

// start starts an engine with a Node worker called node and a Go worker called go.
func start(t *testing.T, functions func(*setup) []iii.Function) (context.Context, *setup) {
	t.Helper()
	nodesdk.Install(t)
	ctx, cancel := context.WithTimeout(t.Context(), bound)
	t.Cleanup(cancel)
	engine, err := iiitest.Start(iiitest.Options{Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(engine.Close)
	s := &setup{engine: engine}
	client, err := iii.Open(iii.Options{URL: engine.URL(), Name: "go", Functions: functions(s), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	s.client = client
	t.Cleanup(func() {
		// What still runs is cancelled.
		ended, cancel := context.WithCancel(context.Background())
		cancel()
		if err := client.Close(ended); err != nil {
			t.Error(err)
		}
	})
	nodesdk.StartWorker(t, engine.URL(), "node")
	if err := engine.AwaitFunction(ctx, "node::pull"); err != nil {
		t.Fatal(err)
	}
	return ctx, s
}

// ask calls a function and reads its result into reply.
func (s *setup) ask(ctx context.Context, t *testing.T, function, data string, reply any) {
	t.Helper()
	raw, err := s.client.Invoke(ctx, iii.Request{Function: function, Data: json.RawMessage(data), Timeout: bound})
	if err != nil {
		t.Fatalf("%s: %v", function, err)
	}
	if err := json.Unmarshal(raw, reply); err != nil {
		t.Fatalf("%s: %v in %s", function, err, raw)
	}
}

// A stream is what was seen of one.
type stream struct {
	Bytes  int      `json:"bytes"`
	SHA256 string   `json:"sha256"`
	Texts  []string `json:"texts"`
}

// pattern is what a stream of n bytes should be.
func pattern(n int) ([]byte, stream) {
	p := make([]byte, n)
	for i := range p {
		p[i] = byte(7 * i)
	}
	sum := sha256.Sum256(p)
	return p, stream{Bytes: n, SHA256: hex.EncodeToString(sum[:])}
}

func (s stream) same(other stream) bool { return s.Bytes == other.Bytes && s.SHA256 == other.SHA256 }

// readStream reads the channel of a reference.
func readStream(ctx context.Context, c *iii.Client, ref iii.ChannelRef, idle time.Duration) (stream, error) {
	var seen stream
	reader, err := c.OpenReader(ctx, ref, iii.ChannelOptions{Idle: idle, Text: func(text []byte) { seen.Texts = append(seen.Texts, string(text)) }})
	if err != nil {
		return seen, err
	}
	defer func() { _ = reader.Close() }()
	hash := sha256.New()
	n, err := io.Copy(hash, reader)
	seen.Bytes, seen.SHA256 = int(n), hex.EncodeToString(hash.Sum(nil))
	return seen, err
}

func TestCallsBothWays(t *testing.T) {
	t.Parallel()
	seen := make(chan iii.Invocation, 8)
	ctx, s := start(t, func(*setup) []iii.Function {
		record := func(_ context.Context, call iii.Invocation) (json.RawMessage, error) {
			seen <- call
			return call.Data, nil
		}
		return []iii.Function{
			{ID: "go::echo", Description: "d", RequestFormat: json.RawMessage(`{"type":"object"}`), Handler: record},
			{ID: "go::fail", Handler: func(context.Context, iii.Invocation) (json.RawMessage, error) {
				return nil, errors.New(`{"type":"validation","code":"S002","message":"no such <sandbox>"}`)
			}},
			{ID: "go::nothing", Handler: func(context.Context, iii.Invocation) (json.RawMessage, error) { return nil, nil }},
			{ID: "go::slow", Handler: func(ctx context.Context, _ iii.Invocation) (json.RawMessage, error) {
				<-ctx.Done()
				return nil, ctx.Err()
			}},
		}
	})

	t.Run("go calls node", func(t *testing.T) {
		var got map[string]any
		s.ask(ctx, t, "node::echo", `{"a":[1,{"b":null}],"s":"ü\u0000<"}`, &got)
		if fmt.Sprint(got["a"]) != "[1 map[b:<nil>]]" || got["s"] != "ü\x00<" {
			t.Errorf("got %v", got)
		}
		raw, err := s.client.Invoke(ctx, iii.Request{Function: "node::metadata", Metadata: json.RawMessage(`{"m":1}`)})
		if err != nil || string(raw) != `{"m":1}` {
			t.Errorf("metadata: %s, %v", raw, err)
		}
		if raw, err := s.client.Invoke(ctx, iii.Request{Function: "node::nothing"}); err != nil || string(raw) != "null" {
			t.Errorf("nothing: %s, %v", raw, err)
		}
		_, err = s.client.Invoke(ctx, iii.Request{Function: "node::fail", Data: json.RawMessage(`{"message":"it is {\"so\":1}"}`)})
		var e *iii.Error
		if !errors.As(err, &e) || e.Code != iii.CodeInvocationFailed || e.Message != `it is {"so":1}` || e.Stacktrace == "" {
			t.Errorf("fail: %#v", err)
		}
	})

	t.Run("node calls go", func(t *testing.T) {
		var got struct{ Result map[string]any }
		s.ask(ctx, t, "node::call", `{"function_id":"go::echo","payload":{"x":[true,null]},"metadata":{"m":2}}`, &got)
		if fmt.Sprint(got.Result["x"]) != "[true <nil>]" {
			t.Errorf("got %v", got)
		}
		if call := <-seen; string(call.Metadata) != `{"m":2}` {
			t.Errorf("metadata %s", call.Metadata)
		}
		var failed struct {
			Error struct{ Name, Code, Message string }
		}
		s.ask(ctx, t, "node::call", `{"function_id":"go::fail","payload":{}}`, &failed)
		text := failed.Error.Message
		if failed.Error.Code != iii.CodeInvocationFailed || text[strings.Index(text, "{"):] != `{"type":"validation","code":"S002","message":"no such <sandbox>"}` {
			t.Errorf("node sees %+v", failed.Error)
		}
		s.ask(ctx, t, "node::call", `{"function_id":"go::missing","payload":{}}`, &failed)
		if failed.Error.Code != iii.CodeFunctionNotFound {
			t.Errorf("node sees %+v", failed.Error)
		}
		s.ask(ctx, t, "node::call", `{"function_id":"go::slow","payload":{},"timeout_ms":200}`, &failed)
		if failed.Error.Code != "TIMEOUT" {
			t.Errorf("node sees %+v", failed.Error)
		}
		var nothing map[string]any
		s.ask(ctx, t, "node::call", `{"function_id":"go::nothing","payload":{}}`, &nothing)
		if len(nothing) != 0 {
			t.Errorf("node sees %v", nothing)
		}
		if _, err := s.client.Invoke(ctx, iii.Request{Function: "node::notify", Data: json.RawMessage(`{"function_id":"go::echo","payload":{"void":1}}`)}); err != nil {
			t.Error(err)
		}
		if call := <-seen; !strings.Contains(string(call.Data), `"void":1`) {
			t.Errorf("the void call carried %s", call.Data)
		}
		// Node leaves the payload out where it is undefined.
		s.ask(ctx, t, "node::call", `{"function_id":"go::echo"}`, &nothing)
		if call := <-seen; string(call.Data) != "null" {
			t.Errorf("no payload arrives as %s", call.Data)
		}
	})
}

func TestRegistrationsOfNode(t *testing.T) {
	t.Parallel()
	ctx, s := start(t, func(*setup) []iii.Function { return nil })
	var info struct {
		Worker  string `json:"worker_name"`
		Request struct {
			Type string `json:"type"`
		} `json:"request_schema"`
	}
	s.ask(ctx, t, "engine::functions::info", `{"function_id":"node::echo"}`, &info)
	if info.Worker != "node" || info.Request.Type != "object" {
		t.Errorf("got %+v", info)
	}
	var list struct {
		Workers []struct {
			Name, Runtime string
			PID           int
		}
	}
	s.ask(ctx, t, "engine::workers::list", `{"search":"node"}`, &list)
	if len(list.Workers) != 1 || list.Workers[0].Runtime != "node" || list.Workers[0].PID == 0 {
		t.Errorf("got %+v", list)
	}
	// A lost connection: Node registers anew.
	workers := s.engine.Workers()
	for _, w := range workers {
		if w.Name == "node" && !s.engine.Disconnect(w.ID) {
			t.Error("node is gone already")
		}
	}
	if err := s.engine.Await(ctx, func() bool { return !s.engine.HasFunction("node::echo") }); err != nil {
		t.Fatal(err)
	}
	if err := s.engine.AwaitFunction(ctx, "node::echo"); err != nil {
		t.Fatal(err)
	}
	var echoed map[string]any
	s.ask(ctx, t, "node::echo", `{"again":1}`, &echoed)
}

func TestGoUploadsToNode(t *testing.T) {
	t.Parallel()
	ctx, s := start(t, func(*setup) []iii.Function { return nil })
	for _, size := range sizes {
		data, want := pattern(size)
		w, r, err := s.client.CreateChannel(ctx, 0)
		if err != nil {
			t.Fatal(err)
		}
		wrote := make(chan error, 1)
		go func() {
			wrote <- func() error {
				writer, err := s.client.OpenWriter(ctx, w, iii.ChannelOptions{})
				if err != nil {
					return err
				}
				defer func() { _ = writer.Close() }()
				if err := writer.WriteText([]byte("begin")); err != nil {
					return err
				}
				_, err = writer.Write(data)
				return err
			}()
		}()
		ref, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		var got stream
		s.ask(ctx, t, "node::upload", fmt.Sprintf(`{"reader":%s}`, ref), &got)
		if err := <-wrote; err != nil {
			t.Errorf("%d bytes: %v", size, err)
		}
		if !got.same(want) || len(got.Texts) != 1 || got.Texts[0] != "begin" {
			t.Errorf("%d bytes: node got %+v", size, got)
		}
	}
}

func TestGoDownloadsFromNode(t *testing.T) {
	t.Parallel()
	ctx, s := start(t, func(*setup) []iii.Function { return nil })
	for _, size := range sizes {
		_, want := pattern(size)
		w, r, err := s.client.CreateChannel(ctx, 0)
		if err != nil {
			t.Fatal(err)
		}
		ref, err := json.Marshal(w)
		if err != nil {
			t.Fatal(err)
		}
		asked := make(chan error, 1)
		go func() {
			_, err := s.client.Invoke(ctx, iii.Request{Function: "node::download", Data: fmt.Appendf(nil, `{"writer":%s,"size":%d,"text":"begin"}`, ref, size), Timeout: bound})
			asked <- err
		}()
		got, err := readStream(ctx, s.client, r, 10*time.Second)
		if err != nil || !got.same(want) || len(got.Texts) != 1 {
			t.Errorf("%d bytes: got %+v, %v", size, got, err)
		}
		if err := <-asked; err != nil {
			t.Errorf("%d bytes: %v", size, err)
		}
	}
}

func TestNodeUploadsToGo(t *testing.T) {
	t.Parallel()
	ctx, s := start(t, func(s *setup) []iii.Function {
		return []iii.Function{{ID: "go::upload", Handler: func(ctx context.Context, call iii.Invocation) (json.RawMessage, error) {
			var request struct{ Content iii.ChannelRef }
			if err := json.Unmarshal(call.Data, &request); err != nil {
				return nil, err
			}
			seen, err := readStream(ctx, s.client, request.Content, 2*time.Second)
			if err != nil {
				return nil, err
			}
			return json.Marshal(seen)
		}}}
	})
	for _, size := range sizes {
		_, want := pattern(size)
		var got struct {
			Result stream
			Error  struct{ Message string }
		}
		s.ask(ctx, t, "node::push", fmt.Sprintf(`{"function_id":"go::upload","field":"content","size":%d}`, size), &got)
		if size == 0 {
			// Node's writer never connects when there is nothing to write.
			if !strings.Contains(got.Error.Message, iii.ErrStalled.Error()) {
				t.Errorf("an empty upload: %+v", got)
			}
			continue
		}
		if !got.Result.same(want) {
			t.Errorf("%d bytes: go got %+v", size, got)
		}
	}
}

func TestNodeDownloadsFromGo(t *testing.T) {
	t.Parallel()
	ctx, s := start(t, func(s *setup) []iii.Function {
		return []iii.Function{{ID: "go::download", Handler: func(ctx context.Context, call iii.Invocation) (json.RawMessage, error) {
			var request struct{ Size int }
			if err := json.Unmarshal(call.Data, &request); err != nil {
				return nil, err
			}
			w, r, err := s.client.CreateChannel(ctx, 0)
			if err != nil {
				return nil, err
			}
			writer, err := s.client.OpenWriter(ctx, w, iii.ChannelOptions{Idle: 20 * time.Second})
			if err != nil {
				return nil, err
			}
			data, _ := pattern(request.Size)
			go func() {
				_, _ = writer.Write(data)
				_ = writer.Close()
			}()
			return json.Marshal(map[string]any{"content": r, "size": request.Size})
		}}}
	})
	for _, size := range sizes {
		_, want := pattern(size)
		var got struct {
			Got   stream
			Error struct{ Message string }
		}
		s.ask(ctx, t, "node::pull", fmt.Sprintf(`{"function_id":"go::download","payload":{"size":%d},"field":"content"}`, size), &got)
		if !got.Got.same(want) {
			t.Errorf("%d bytes: node got %+v", size, got)
		}
	}
}
