package iii_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii/iiitest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// bound is how long anything here may take, with the race detector and on a busy
// machine.
const bound = 3 * time.Minute

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

// A network of a test has one host, whose listener may change.
type network struct {
	mu       sync.Mutex
	listener *listener
	dials    int
}

type listener struct {
	conns chan net.Conn
	once  sync.Once
	done  chan struct{}
}

func (l *listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *listener) Close() error {
	l.once.Do(func() { close(l.done) })
	return nil
}

func (l *listener) Addr() net.Addr { return address{} }

type address struct{}

func (address) Network() string { return "pipe" }
func (address) String() string  { return "engine:1" }

// listen makes the host listen anew.
func (n *network) listen() *listener {
	l := &listener{conns: make(chan net.Conn), done: make(chan struct{})}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.listener = l
	return l
}

// count is how often the host was dialled.
func (n *network) count() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.dials
}

var errRefused = errors.New("connection refused")

func (n *network) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	n.mu.Lock()
	l := n.listener
	n.dials++
	n.mu.Unlock()
	if l == nil {
		return nil, errRefused
	}
	near, far := net.Pipe()
	select {
	case l.conns <- far:
		return near, nil
	case <-l.done:
		return nil, errRefused
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}
