package iii_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii/iiitest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// bound is how long anything here may take.
const bound = 20 * time.Second

// A logbook collects what is logged.
type logbook struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logbook) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logbook) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

func (l *logbook) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// within returns a context for one test.
func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), bound)
	t.Cleanup(cancel)
	return ctx
}

func startEngine(t *testing.T, o iiitest.Options) *iiitest.Engine {
	t.Helper()
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	e, err := iiitest.Start(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return e
}

func open(t *testing.T, o iii.Options) *iii.Client {
	t.Helper()
	if o.Name == "" {
		o.Name = "sandbox-libkrun"
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	c, err := iii.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), bound)
		defer cancel()
		if err := c.Close(ctx); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return c
}

// echo answers with its payload.
func echo(_ context.Context, call iii.Invocation) (json.RawMessage, error) { return call.Data, nil }

func wantError(t *testing.T, err error, code string) *iii.Error {
	t.Helper()
	var e *iii.Error
	if !errors.As(err, &e) || e.Code != code {
		t.Fatalf("got error %v, want code %s", err, code)
	}
	return e
}
