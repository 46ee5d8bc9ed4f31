package adapter_test

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/adapter"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/config"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii/iiitest"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/sandbox"
)

// pipes is a network with one host on it, whose time is the test's.
type pipes struct {
	conns chan net.Conn
	once  sync.Once
	done  chan struct{}
}

func newPipes() *pipes { return &pipes{conns: make(chan net.Conn), done: make(chan struct{})} }

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error {
	p.once.Do(func() { close(p.done) })
	return nil
}

func (p *pipes) Addr() net.Addr { return &net.UnixAddr{Name: "engine", Net: "pipe"} }

func (p *pipes) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	near, far := net.Pipe()
	select {
	case p.conns <- far:
		return near, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// errStarted is the end of an adapter that got its configuration.
var errStarted = errors.New("started")

// started is what a start in a bubble of time came to.
type started struct {
	config *config.Config
	err    error // of Serve
	after  time.Duration
	log    string
}

// serveFor runs an adapter on an engine until it gets its configuration or fails.
// during, where set, runs beside it; a start is slow until all of hold are closed.
func serveFor(t *testing.T, engine iiitest.Options, during func(*iiitest.Engine), hold ...<-chan struct{}) started {
	t.Helper()
	return serveIn(t, "", engine, during, hold...)
}

// serveIn is serveFor with the adapter in a namespace.
func serveIn(t *testing.T, namespace string, engine iiitest.Options, during func(*iiitest.Engine), hold ...<-chan struct{}) started {
	t.Helper()
	network := newPipes()
	engine.Listener, engine.Log = network, slog.New(slog.DiscardHandler)
	e, err := iiitest.Start(engine)
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	log := &logBuffer{}
	var out started
	began := time.Now()
	done := make(chan struct{})
	go func() {
		defer close(done)
		logger := slog.New(slog.NewTextHandler(log, nil))
		out.err = adapter.Serve(t.Context(), adapter.Config{
			Engine:     iii.Options{URL: "ws://engine:1", Name: "sandbox-libkrun", Namespace: namespace, Dial: network.dial, Log: logger},
			ConfigName: "my-entry", Version: "0.2.0", Log: logger,
			Start: func(cfg *config.Config) (adapter.Core, error) {
				out.config, out.after = cfg, time.Since(began)
				for _, slow := range hold {
					<-slow
				}
				return nil, errStarted
			},
		})
		if out.config == nil {
			out.after = time.Since(began)
		}
	}()
	if during != nil {
		during(e)
	}
	<-done
	out.log = log.String()
	return out
}

func entries(value string) map[string]json.RawMessage {
	return map[string]json.RawMessage{"my-entry": json.RawMessage(value)}
}

func TestServe_ReadsItsEntry(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		got := serveFor(t, iiitest.Options{Configuration: entries(`{"default_cpus":3,"image_allowlist":["python"]}`)}, nil)
		if !errors.Is(got.err, errStarted) || got.config.DefaultCPUs != 3 || strings.Contains(got.log, "level=WARN") {
			t.Errorf("%+v", got)
		}
	})
}

// The configuration worker is in the default namespace, wherever the adapter is.
func TestServe_ReadsItsEntryFromAnotherNamespace(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		got := serveIn(t, "team", iiitest.Options{Configuration: entries(`{"default_cpus":3}`)}, nil)
		if !errors.Is(got.err, errStarted) || got.config.DefaultCPUs != 3 {
			t.Errorf("%+v", got)
		}
	})
}

// DESIGN: both mean that nothing is configured.
func TestServe_TakesTheDefaultsWhereNothingIsConfigured(t *testing.T) {
	t.Parallel()
	for name, engine := range map[string]iiitest.Options{
		"NOT_FOUND": {Configuration: map[string]json.RawMessage{}}, "null": {Configuration: entries(`null`)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				got := serveFor(t, engine, nil)
				if !errors.Is(got.err, errStarted) || got.config.MaxSandboxes != 32 || !strings.Contains(got.log, "level=WARN") || !strings.Contains(got.log, "my-entry") {
					t.Errorf("%+v", got)
				}
				if _, err := got.config.Catalog.Resolve("python"); err == nil {
					t.Error("an image may boot")
				}
			})
		})
	}
}

func TestServe_EndsWithAConfigurationItCannotUse(t *testing.T) {
	t.Parallel()
	for value, words := range map[string]string{
		`"text"`:                                  "must be an object",
		`[]`:                                      "must be an object",
		`{"sandbox":{"auto_install":true}}`:       "legacy wrapped shape",
		`{"custom_images":{"python":"x:1"}}`:      "shadows a built-in preset",
		`{"custom_images":{"":"x:1"}}`:            "must not be empty",
		`{"per_image_caps":{"python":null}}`:      "per_image_caps",
		`{"max_concurrent_sandboxes":-1}`:         "max_concurrent_sandboxes",
		`{"default_memory_mb":"512"}`:             "default_memory_mb",
		`{"image_allowlist":["${NOT_SET_HERE}"]}`: "EXPAND_FAILED",
	} {
		t.Run(value, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				got := serveFor(t, iiitest.Options{Configuration: entries(value)}, nil)
				var bad *adapter.ConfigError
				if !errors.As(got.err, &bad) || bad.Name != "my-entry" || !strings.Contains(got.err.Error(), words) || got.config != nil {
					t.Errorf("%v, want %q", got.err, words)
				}
			})
		})
	}
}

func TestServe_EndsWhenTheReadFails(t *testing.T) {
	t.Parallel()
	fail := func(code string) iiitest.Function {
		return func(context.Context, json.RawMessage) (json.RawMessage, error) {
			return nil, &iii.Error{Code: code, Message: "m"}
		}
	}
	for name, answer := range map[string]iiitest.Function{
		"ADAPTER_ERROR": fail("ADAPTER_ERROR"), "invocation_stopped": fail("invocation_stopped"),
		"no object": func(context.Context, json.RawMessage) (json.RawMessage, error) { return json.RawMessage(`[]`), nil },
		"no answer": func(ctx context.Context, _ json.RawMessage) (json.RawMessage, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				got := serveFor(t, iiitest.Options{NoConfiguration: true}, func(e *iiitest.Engine) { e.Handle("configuration::get", answer) })
				var bad *adapter.ConfigError
				if !errors.As(got.err, &bad) || got.config != nil || got.after > 20*time.Second {
					t.Errorf("%v after %v", got.err, got.after)
				}
			})
		})
	}
}

// DESIGN: the configuration worker may be starting still.
func TestServe_WaitsTenSecondsForTheConfigurationWorker(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		got := serveFor(t, iiitest.Options{NoConfiguration: true}, nil)
		var bad *adapter.ConfigError
		if !errors.As(got.err, &bad) || !strings.Contains(got.err.Error(), "function_not_found") || got.after < 10*time.Second || got.after > 11*time.Second {
			t.Errorf("%v after %v", got.err, got.after)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		got := serveFor(t, iiitest.Options{NoConfiguration: true}, func(e *iiitest.Engine) {
			time.Sleep(9 * time.Second) //nolint:forbidigo // of the bubble's time
			e.Handle("configuration::get", func(context.Context, json.RawMessage) (json.RawMessage, error) {
				return json.RawMessage(`{"id":"my-entry","value":{"default_cpus":2}}`), nil
			})
		})
		if !errors.Is(got.err, errStarted) || got.config.DefaultCPUs != 2 || got.after < 9*time.Second || got.after > 10*time.Second {
			t.Errorf("%+v", got)
		}
	})
}

// A call that comes too early waits, but not for ever.
func TestServe_EarlyCallsWaitFifteenSeconds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		slow := make(chan struct{})
		serveFor(t, iiitest.Options{Configuration: entries(`{}`)}, func(e *iiitest.Engine) {
			if err := e.AwaitFunction(t.Context(), "sandbox-libkrun::adapter::info"); err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			if _, err := e.Call(t.Context(), "sandbox-libkrun::adapter::info", nil); err != nil || time.Since(began) != 0 {
				t.Errorf("adapter::info needs no configuration: %v after %v", err, time.Since(began))
			}
			_, err := e.Call(t.Context(), "sandbox-libkrun::stop", json.RawMessage(`{}`))
			if got := envelope(t, err); got["code"] != "S001" || time.Since(began) != 0 {
				t.Errorf("what does not decode need not wait: %v after %v", got, time.Since(began))
			}
			_, err = e.Call(t.Context(), "sandbox-libkrun::list", nil)
			if got := envelope(t, err); got["code"] != "S300" || time.Since(began) != 15*time.Second {
				t.Errorf("%v after %v", got, time.Since(began))
			}
			close(slow)
		}, slow)
	})
}

// stuck is a core whose calls and whose end take as long as they may.
type stuck struct {
	sandbox.Functions // for what is not called
	called            chan struct{}
	release           <-chan struct{}
}

func (s *stuck) List() []sandbox.Summary {
	close(s.called)
	<-s.release
	return nil
}

// Close is as slow as sandbox.Manager's is at most.
func (s *stuck) Close(ctx context.Context) error {
	<-ctx.Done()
	<-time.After(3 * time.Second)
	return errors.New("some sandboxes did not end")
}

// Whatever is stuck, Compose's 10 s are enough.
func TestServe_EndsWithinTenSeconds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		network := newPipes()
		e, err := iiitest.Start(iiitest.Options{Listener: network, Log: slog.New(slog.DiscardHandler), Configuration: entries(`{}`)})
		if err != nil {
			t.Fatal(err)
		}
		defer e.Close()
		release := make(chan struct{})
		core := &stuck{called: make(chan struct{}), release: release}
		ctx, stop := context.WithCancel(t.Context())
		served := make(chan error, 1)
		go func() {
			log := slog.New(slog.DiscardHandler)
			served <- adapter.Serve(ctx, adapter.Config{
				Engine:     iii.Options{URL: "ws://engine:1", Name: "sandbox-libkrun", Dial: network.dial, Log: log},
				ConfigName: "my-entry", Version: "0.2.0", Log: log,
				Start: func(*config.Config) (adapter.Core, error) { return core, nil },
			})
		}()
		if err := e.AwaitFunction(t.Context(), "sandbox-libkrun::adapter::info"); err != nil {
			t.Fatal(err)
		}
		go func() { _, _ = e.Call(t.Context(), "sandbox-libkrun::list", nil) }()
		<-core.called
		began := time.Now()
		stop()
		if err := <-served; err == nil || time.Since(began) >= 10*time.Second {
			t.Errorf("%v after %v", err, time.Since(began))
		}
		close(release)
	})
}

func TestEntryName(t *testing.T) {
	t.Parallel()
	for value, want := range map[string]string{"": "sandbox-libkrun", "mine": "mine"} {
		if got := adapter.EntryName(func(string) string { return value }); got != want {
			t.Errorf("III_CONFIG_NAME=%q: %q", value, got)
		}
	}
}
