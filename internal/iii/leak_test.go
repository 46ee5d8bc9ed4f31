package iii_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii/iiitest"
)

// Not parallel: it counts the files of the process.
func TestNoFileIsLeftOpen(t *testing.T) {
	count := func() int {
		files, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Skipf("SKIPPED: %v", err)
		}
		return len(files)
	}
	count()
	ctx := within(t)
	round := func() {
		engine := startEngine(t, iiitest.Options{})
		defer engine.Close()
		c, err := iii.Open(iii.Options{URL: engine.URL(), Name: "w", Log: (&logbook{}).logger()})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.OpenReader(ctx, iii.ChannelRef{ChannelID: "none", AccessKey: "k"}, iii.ChannelOptions{}); !errors.Is(err, iii.ErrNoChannel) {
			t.Error(err)
		}
		w, r, err := c.CreateChannel(ctx, 1)
		if err != nil {
			t.Fatal(err)
		}
		writer, err := c.OpenWriter(ctx, w, iii.ChannelOptions{})
		if err != nil {
			t.Fatal(err)
		}
		reader, err := c.OpenReader(ctx, r, iii.ChannelOptions{})
		if err != nil {
			t.Fatal(err)
		}
		_ = writer.Close()
		// Read to its end, a reader is closed even if nobody does.
		if _, err := io.ReadAll(reader); err != nil {
			t.Error(err)
		}
		if err := c.Close(ctx); err != nil {
			t.Error(err)
		}
		refused, err := iii.Open(iii.Options{URL: "ws://127.0.0.1:1", Name: "w", Log: (&logbook{}).logger()})
		if err != nil {
			t.Fatal(err)
		}
		if err := refused.Close(ctx); err != nil {
			t.Error(err)
		}
	}
	round()
	before := count()
	for range 30 {
		round()
	}
	if after := count(); after > before+5 {
		t.Errorf("%d files became %d", before, after)
	}
}

// What callers send, what handlers answer and what channels carry stays out of the
// log, at every level.
func TestNothingThatTravelsIsLogged(t *testing.T) {
	t.Parallel()
	const secret = "S3CRET"
	ctx := within(t)
	var log, engineLog logbook
	engine := startEngine(t, iiitest.Options{Log: engineLog.logger()})
	c := open(t, iii.Options{URL: engine.URL() + "/?token=" + secret, Log: log.logger(), Functions: []iii.Function{
		{ID: "f::echo", Handler: echo},
		{ID: "f::fail", Handler: func(_ context.Context, call iii.Invocation) (json.RawMessage, error) {
			return nil, errors.New(string(call.Data))
		}},
		{ID: "f::garbage", Handler: func(_ context.Context, call iii.Invocation) (json.RawMessage, error) {
			return json.RawMessage(secret), nil
		}},
		{ID: "f::panic", Handler: func(_ context.Context, call iii.Invocation) (json.RawMessage, error) {
			panic(string(call.Data))
		}},
	}})
	payload := json.RawMessage(`{"env":"` + secret + `"}`)
	for _, function := range []string{"f::echo", "f::fail", "f::garbage", "f::panic", "f::none" + secret} {
		_, _ = c.Invoke(ctx, iii.Request{Function: function, Data: payload, Metadata: payload, Baggage: secret})
	}
	w, r, err := c.CreateChannel(ctx, 1)
	if err != nil {
		t.Fatal(err)
	}
	writer, err := c.OpenWriter(ctx, w, iii.ChannelOptions{})
	if err != nil {
		t.Fatal(err)
	}
	_, _ = writer.Write([]byte(secret))
	_ = writer.WriteText([]byte(secret))
	_ = writer.Close()
	reader, err := c.OpenReader(ctx, r, iii.ChannelOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(reader); err != nil || string(got) != secret {
		t.Errorf("got %q, %v", got, err)
	}
	for name, text := range map[string]string{"client": log.String(), "engine": engineLog.String()} {
		if strings.Contains(text, secret) || strings.Contains(text, w.AccessKey) || text == "" {
			t.Errorf("the log of the %s is %s", name, text)
		}
	}
}

func BenchmarkInvoke(b *testing.B) {
	engine, err := iiitest.Start(iiitest.Options{Log: (&logbook{}).logger()})
	if err != nil {
		b.Fatal(err)
	}
	defer engine.Close()
	c, err := iii.Open(iii.Options{URL: engine.URL(), Name: "w", Log: (&logbook{}).logger(), Functions: []iii.Function{{ID: "f::echo", Handler: echo}}})
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = c.Close(context.Background()) }()
	if err := engine.AwaitFunction(context.Background(), "f::echo"); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := c.Invoke(context.Background(), iii.Request{Function: "f::echo"}); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkChannel(b *testing.B) {
	engine, err := iiitest.Start(iiitest.Options{Log: (&logbook{}).logger()})
	if err != nil {
		b.Fatal(err)
	}
	defer engine.Close()
	c, err := iii.Open(iii.Options{URL: engine.URL(), Name: "w", Log: (&logbook{}).logger()})
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = c.Close(context.Background()) }()
	w, r, err := c.CreateChannel(context.Background(), 0)
	if err != nil {
		b.Fatal(err)
	}
	writer, err := c.OpenWriter(context.Background(), w, iii.ChannelOptions{})
	if err != nil {
		b.Fatal(err)
	}
	reader, err := c.OpenReader(context.Background(), r, iii.ChannelOptions{})
	if err != nil {
		b.Fatal(err)
	}
	read := make(chan error, 1)
	go func() {
		_, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{reader}, make([]byte, 64<<10))
		read <- err
	}()
	block := make([]byte, 1<<20)
	b.SetBytes(int64(len(block)))
	for b.Loop() {
		if _, err := writer.Write(block); err != nil {
			b.Fatal(err)
		}
	}
	_ = writer.Close()
	if err := <-read; err != nil {
		b.Fatal(err)
	}
}
