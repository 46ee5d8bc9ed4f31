// Package iiitest is an iii engine in memory, for tests and for developers who
// have none: a real WebSocket server that registers workers and their functions,
// routes calls and results, carries channels and serves configuration entries as
// the engine of iii 0.23 does. Clients cannot tell the difference; triggers,
// queues, access control and telemetry are accepted and ignored.
//
// Two limits are simplified: every message, not only every frame, may have 16 MiB
// at most, as no client sends a message in several frames; and of a
// configuration's schema only the type at the top is checked.
package iiitest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/coder/websocket"
)

const (
	// messageLimit is the largest WebSocket frame that the engine takes.
	messageLimit = 16 << 20
	// handshakeTimeout is how long a connection may take to send its request.
	handshakeTimeout = 10 * time.Second
	// sweepInterval is how often channels are looked through for unused ends.
	sweepInterval = time.Minute
)

// Options say which engine to be.
type Options struct {
	// Listener takes the connections and is closed by the engine; nil listens on
	// Address.
	Listener net.Listener
	// Address is host:port on TCP; "" is a free port of the loopback.
	Address string
	// Configuration are the entries of the configuration worker by their id; nil
	// is DefaultConfiguration. An entry with the value null is there, and null.
	Configuration map[string]json.RawMessage
	// NoConfiguration leaves the configuration worker out, as stripped engines do.
	NoConfiguration bool
	// Getenv answers what configuration entries ask for with ${NAME}; nil knows
	// nothing.
	Getenv func(name string) string
	// Observe, when not nil, is called with every text that a worker sends, in
	// order per worker, before the engine acts on it. It must not keep the text.
	Observe func(workerID string, text []byte)
	// Log gets connections and refusals, never what is in a call; required.
	Log *slog.Logger
}

// DefaultConfiguration is the entry of sandbox-libkrun as its registry ships it.
func DefaultConfiguration() map[string]json.RawMessage {
	return map[string]json.RawMessage{"sandbox-libkrun": json.RawMessage(`{
		"auto_install": true,
		"image_allowlist": ["python", "node"],
		"default_idle_timeout_secs": 300,
		"max_concurrent_sandboxes": 32,
		"default_cpus": 1,
		"default_memory_mb": 512
	}`)}
}

// A Function answers calls inside the engine. Its context ends with the engine or
// with the caller's connection. An *iii.Error goes to the caller as it is.
type Function func(ctx context.Context, data json.RawMessage) (json.RawMessage, error)

// Engine is a running engine. Its methods may be called concurrently. The caller
// closes it.
type Engine struct {
	// Immutable after Start.
	options Options
	address net.Addr
	server  *http.Server
	log     *slog.Logger
	stop    context.CancelFunc
	done    chan struct{} // closed when closing begins

	// group are all goroutines of the engine, those of the server too.
	group sync.WaitGroup

	mu sync.Mutex
	// closed keeps goroutines from being added to group.
	closed bool
	// changed is closed and replaced whenever workers, functions or channels change.
	changed   chan struct{}
	conns     map[net.Conn]struct{}
	workers   map[string]*worker // by id
	functions map[name]*function
	builtins  map[string]Function // in the default namespace
	pending   map[string]*call    // by the id that the executor sees
	channels  map[string]*channel
	entries   map[string]*entry
	pings     int // on reading ends of channels
}

// connKey is the key of a request's network connection in its context.
type connKey struct{}

// Start starts an engine.
func Start(o Options) (*Engine, error) {
	if o.Log == nil {
		return nil, errors.New("no logger")
	}
	if o.Configuration == nil {
		o.Configuration = DefaultConfiguration()
	}
	if o.Getenv == nil {
		o.Getenv = func(string) string { return "" }
	}
	if o.Listener == nil {
		if o.Address == "" {
			o.Address = "127.0.0.1:0"
		}
		listener, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", o.Address)
		if err != nil {
			return nil, fmt.Errorf("listen for workers: %w", err)
		}
		o.Listener = listener
	}
	life, stop := context.WithCancel(context.Background())
	e := &Engine{
		options: o, address: o.Listener.Addr(), log: o.Log, stop: stop, done: make(chan struct{}),
		changed: make(chan struct{}), conns: map[net.Conn]struct{}{}, workers: map[string]*worker{},
		functions: map[name]*function{}, pending: map[string]*call{}, channels: map[string]*channel{}, entries: map[string]*entry{},
	}
	e.builtins = e.builtinFunctions()
	for id, value := range o.Configuration {
		e.entries[id] = &entry{id: id, value: value}
	}
	e.server = &http.Server{
		Handler:           http.HandlerFunc(e.serve),
		ReadHeaderTimeout: handshakeTimeout,
		BaseContext:       func(net.Listener) context.Context { return life },
		ConnContext:       func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, connKey{}, c) },
		ErrorLog:          slog.NewLogLogger(o.Log.Handler(), slog.LevelDebug),
	}
	e.group.Go(func() { _ = e.server.Serve(o.Listener) })
	e.group.Go(e.sweepChannels)
	return e, nil
}

// URL is where workers connect.
func (e *Engine) URL() string { return "ws://" + e.address.String() }

// Address is host:port of URL; an engine started there later takes its place.
func (e *Engine) Address() string { return e.address.String() }

// Close ends the engine as kill -9 would: every connection is cut without a word.
// It waits until all is gone. It may be called more than once.
func (e *Engine) Close() {
	e.mu.Lock()
	first := !e.closed
	e.closed = true
	if first {
		close(e.done)
	}
	for conn := range e.conns {
		_ = conn.Close()
	}
	e.mu.Unlock()
	e.stop()
	_ = e.server.Close()
	e.group.Wait()
}

// closing reports whether Close has begun: then nobody is told anything more, as
// by a process that is gone.
func (e *Engine) closing() bool {
	select {
	case <-e.done:
		return true
	default:
		return false
	}
}

// spawn runs f in a goroutine that Close waits for, unless the engine is closed.
func (e *Engine) spawn(f func()) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return false
	}
	e.group.Go(f)
	return true
}

// serve answers a request to connect.
func (e *Engine) serve(w http.ResponseWriter, r *http.Request) {
	conn, ok := r.Context().Value(connKey{}).(net.Conn)
	if !ok || !e.enter(conn) {
		return
	}
	defer e.exit(conn)
	path := strings.Trim(r.URL.Path, "/")
	id, isChannel := strings.CutPrefix(path, "ws/channels/")
	switch {
	case path == "":
		e.serveWorker(w, r, conn)
	case path == "otel":
		e.serveTelemetry(w, r)
	case isChannel:
		e.serveChannel(w, r, conn, id)
	default:
		http.NotFound(w, r)
	}
}

// enter counts a connection among those that Close cuts and waits for.
func (e *Engine) enter(conn net.Conn) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return false
	}
	e.group.Add(1)
	e.conns[conn] = struct{}{}
	return true
}

func (e *Engine) exit(conn net.Conn) {
	e.mu.Lock()
	delete(e.conns, conn)
	e.mu.Unlock()
	e.group.Done()
}

// serveTelemetry takes what clients report about themselves and drops it.
func (e *Engine) serveTelemetry(w http.ResponseWriter, r *http.Request) {
	socket, err := websocket.Accept(w, r, nil)
	if err != nil {
		return
	}
	defer func() { _ = socket.CloseNow() }()
	socket.SetReadLimit(4 * messageLimit)
	for err == nil {
		_, _, err = socket.Read(r.Context())
	}
}

// change wakes those that wait for workers, functions and channels. The caller
// holds mu.
func (e *Engine) change() {
	close(e.changed)
	e.changed = make(chan struct{})
}
