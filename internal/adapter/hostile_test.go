package adapter_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/adapter"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/config"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii/iiitest"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/sandbox"
)

// idle is a core without sandboxes.
type idle struct{ sandbox.Functions }

func (idle) Close(context.Context) error { return nil }

func (idle) List() []sandbox.Summary { return nil }

// faulty is a core with a defect, and one that has too much to tell.
type faulty struct{ idle }

func (faulty) List() []sandbox.Summary {
	name := strings.Repeat("\x00", 4<<20)
	return []sandbox.Summary{{SandboxID: "i", Name: &name}}
}

func (faulty) Stat(_ context.Context, _, path string) (sandbox.FileInfo, error) { panic(path) }

// What goes wrong on the way of a reply is an envelope too.
func TestServe_DefectsHaveACode(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		network, log := newPipes(), &logBuffer{}
		e, err := iiitest.Start(iiitest.Options{Listener: network, Log: slog.New(slog.DiscardHandler), Configuration: entries(`{}`)})
		if err != nil {
			t.Fatal(err)
		}
		defer e.Close()
		stop, ended := serveOn(t, network, log, faulty{})
		if err := e.AwaitFunction(t.Context(), "sandbox-libkrun::adapter::info"); err != nil {
			t.Fatal(err)
		}
		_, err = e.Call(t.Context(), "sandbox-libkrun::fs::stat", json.RawMessage(`{"sandbox_id":"i","path":"s3cr3t"}`))
		if got := envelope(t, err); got["code"] != "S300" || len(got) != 7 || strings.Contains(fmt.Sprint(got), "s3cr3t") {
			t.Errorf("a panic: %v", got)
		}
		_, err = e.Call(t.Context(), "sandbox-libkrun::list", nil)
		if got := envelope(t, err); got["code"] != "S400" || len(got) != 7 {
			t.Errorf("a reply that is too large: %v", got)
		}
		if text := log.String(); strings.Contains(text, "s3cr3t") || !strings.Contains(text, "panicked") {
			t.Errorf("the log is %s", text)
		}
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// serveOn runs an adapter with a core.
func serveOn(t *testing.T, network *pipes, to io.Writer, core adapter.Core) (stop context.CancelFunc, ended <-chan error) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	log := slog.New(slog.NewTextHandler(to, nil))
	go func() {
		done <- adapter.Serve(ctx, adapter.Config{
			Engine:     iii.Options{URL: "ws://engine:1", Name: "sandbox-libkrun", Dial: network.dial, Log: log},
			ConfigName: "my-entry", Version: "0.2.0", Log: log,
			Start: func(*config.Config) (adapter.Core, error) { return core, nil },
		})
	}()
	return stop, done
}

// An adapter that is told to end does so in time at whatever step of a connection
// it is, whatever is at the other end. Its configuration is the only other reason
// to end.
func TestServe_EndsAtAnyStep(t *testing.T) {
	t.Parallel()
	for name, hostile := range iiitest.Hostile() {
		for _, after := range []time.Duration{0, time.Millisecond, 500 * time.Millisecond, 5 * time.Second, 12 * time.Second, 70 * time.Second} {
			t.Run(fmt.Sprint(name, " after ", after), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					network := newPipes()
					defer iiitest.ServeHostile(network, hostile)()
					stop, ended := serveOn(t, network, io.Discard, idle{})
					<-time.After(after)
					began := time.Now()
					stop()
					err := <-ended
					if took := time.Since(began); took > 5*time.Second {
						t.Errorf("it took %v", took)
					}
					var unusable *adapter.ConfigError
					if err != nil && !errors.As(err, &unusable) {
						t.Errorf("it ended with %v", err)
					}
				})
			})
		}
	}
}
