package adapter_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/adapter"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/config"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii/iiitest"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/sandbox"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/vmtest"
)

// patience bounds every wait for what has to happen.
const patience = 3 * time.Minute

// allowPython is a configuration in which python boots.
const allowPython = `{"image_allowlist":["python"]}`

// setup is what a test may change about a host.
type setup struct {
	// config is the configuration entry; "" is allowPython.
	config string
	// engine are the engine's options but for the entry.
	engine iiitest.Options
	fake   vmtest.Fake
	// downloads is adapter.Config.MaxDownloads.
	downloads int
	// dial is the adapter's way to the engine, see iii.Options.
	dial func(ctx context.Context, network, address string) (net.Conn, error)
	// start, where set, comes before the core is made.
	start func(context.Context) error
	// extensions are the adapter's.
	extensions bool
}

// host is a machine with an engine and the adapter on it, and a caller. The VMs
// are everything but the machine: programs and files are this host's.
type host struct {
	t      *testing.T
	env    *vmtest.Env
	engine *iiitest.Engine
	caller *iii.Client
	// files is an empty directory for the test's files.
	files string
	// log is what the adapter has logged.
	log *logBuffer

	stop   context.CancelCauseFunc
	served chan struct{}
	err    error // of Serve, valid once served is closed
}

// newHost starts everything. The adapter is stopped, and checked to leave nothing,
// at the end of the test.
func newHost(t *testing.T, s setup) *host {
	t.Helper()
	fake := s.fake
	fake.Log = vmtest.Logger(t)
	roots := vmtest.Roots(t)
	h := &host{
		t: t, files: filepath.Dir(roots.Run) + "/files", log: &logBuffer{}, served: make(chan struct{}),
		env: &vmtest.Env{Driver: &fake, Roots: roots, Lower: "/etc/passwd", Patience: patience},
	}
	if err := os.Mkdir(h.files, 0o755); err != nil {
		t.Fatal(err)
	}
	if s.config == "" {
		s.config = allowPython
	}
	if s.engine.Log == nil {
		s.engine.Log = vmtest.Logger(t)
	}
	if s.engine.Configuration == nil {
		s.engine.Configuration = map[string]json.RawMessage{"sandbox-libkrun": json.RawMessage(s.config)}
	}
	var err error
	if h.engine, err = iiitest.Start(s.engine); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.engine.Close)
	h.serve(s)
	h.caller, err = iii.Open(iii.Options{URL: h.engine.URL(), Name: "caller", Log: vmtest.Logger(t)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := h.caller.Close(h.ctx()); err != nil {
			t.Error(err)
		}
	})
	if err := h.engine.AwaitFunction(h.ctx(), "sandbox-libkrun::adapter::info"); err != nil {
		t.Fatal(err)
	}
	return h
}

// serve runs the adapter until the test's end.
func (h *host) serve(s setup) {
	var ctx context.Context
	ctx, h.stop = context.WithCancelCause(context.Background())
	log := slog.New(slog.NewTextHandler(h.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	store := imageStore(h.t, filepath.Dir(h.env.Roots.Run))
	go func() {
		defer close(h.served)
		h.err = adapter.Serve(ctx, adapter.Config{
			Engine: iii.Options{URL: h.engine.URL(), Name: "sandbox-libkrun", Log: log, Dial: s.dial}, ConfigName: "sandbox-libkrun", Version: "0.2.0", Log: log, MaxDownloads: s.downloads,
			Extensions: s.extensions,
			Start: func(cfg *config.Config) (adapter.Core, error) {
				if s.start != nil {
					if err := s.start(ctx); err != nil {
						return nil, err
					}
				}
				return sandbox.Start(sandbox.Config{
					Launcher: vm.New(vm.Config{Driver: h.env.Driver, Roots: h.env.Roots, Log: log, MaxBoots: 64, Version: "test"}),
					Images:   store, Catalog: cfg.Catalog, Log: log, AutoInstall: cfg.AutoInstall, MaxSandboxes: cfg.MaxSandboxes,
					MaxExecs: cfg.MaxExecs, MaxExecTimeoutMs: cfg.MaxExecTimeoutMs, DefaultIdleTimeoutSecs: cfg.DefaultIdleTimeoutSecs,
					DefaultCPUs: cfg.DefaultCPUs, DefaultMemoryMiB: cfg.DefaultMemoryMiB,
				}), nil
			},
		})
	}()
	h.t.Cleanup(func() {
		if err := h.end(); err != nil {
			h.t.Errorf("serve: %v", err)
		}
		h.env.CheckEmpty(h.t)
		if h.t.Failed() {
			h.t.Logf("the adapter logged:\n%s", h.log.String())
		}
	})
}

// end stops the adapter and returns Serve's error.
func (h *host) end() error {
	h.stop(errors.New("the test is over"))
	return h.wait()
}

// wait returns Serve's error once it has ended.
func (h *host) wait() error {
	select {
	case <-h.served:
		return h.err
	case <-time.After(patience):
		return errors.New("the adapter does not end")
	}
}

func (h *host) ctx() context.Context { return h.env.Context(h.t) }

// invoke calls a function with any payload.
func (h *host) invoke(function string, payload any) (json.RawMessage, error) {
	h.t.Helper()
	data, ok := payload.(json.RawMessage)
	if !ok {
		var err error
		if data, err = json.Marshal(payload); err != nil {
			h.t.Fatal(err)
		}
	}
	return h.caller.Invoke(h.ctx(), iii.Request{Function: "sandbox-libkrun::" + function, Data: data, Timeout: patience})
}

// ok calls a function that must succeed.
func (h *host) ok(t testing.TB, function string, payload any) obj {
	t.Helper()
	reply, err := h.invoke(function, payload)
	if err != nil {
		t.Fatalf("%s: %v", function, err)
	}
	var out obj
	if err := json.Unmarshal(reply, &out); err != nil {
		t.Fatalf("%s: reply %s: %v", function, reply, err)
	}
	return out
}

// fails calls a function that must fail with a code and with words in its message,
// and returns the envelope.
func (h *host) fails(t testing.TB, function string, payload any, code string, words ...string) obj {
	t.Helper()
	reply, err := h.invoke(function, payload)
	if err == nil {
		t.Errorf("%s %v: %.300s, want %s", function, payload, reply, code)
		return obj{}
	}
	e := envelope(t, err)
	if e["code"] != code {
		t.Errorf("%s %v: %v, want %s", function, payload, e, code)
	}
	for _, word := range words {
		if message, _ := e["message"].(string); !strings.Contains(message, word) {
			t.Errorf("%s: message %q does not hold %q", function, message, word)
		}
	}
	return e
}

// create makes a sandbox that the test cannot do without.
func (h *host) create(t testing.TB, more ...obj) string {
	t.Helper()
	req := obj{"image": "python"}
	for _, m := range more {
		maps.Copy(req, m)
	}
	id, _ := h.ok(t, "create", req)["sandbox_id"].(string)
	return id
}

// sh runs a script in a sandbox.
func (h *host) sh(t testing.TB, id, script string, more ...obj) obj {
	t.Helper()
	return h.ok(t, "exec", shell(id, script, more...))
}

func shell(id, script string, more ...obj) obj {
	req := obj{"sandbox_id": id, "argv": []string{"sh", "-c", script}}
	for _, m := range more {
		maps.Copy(req, m)
	}
	return req
}

// at is a request about a path.
func at(id, path string, more ...obj) obj {
	req := obj{"sandbox_id": id, "path": path}
	for _, m := range more {
		maps.Copy(req, m)
	}
	return req
}

// file makes a file of this host and returns its path.
func (h *host) file(t testing.TB, name, content string) string {
	t.Helper()
	path := filepath.Join(h.files, name)
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o644)); err != nil {
		t.Fatal(err)
	}
	return path
}

// dir makes a directory of this host for one test, with files in it.
func (h *host) dir(t testing.TB, files map[string]string) string {
	t.Helper()
	dir, err := os.MkdirTemp(h.files, "d")
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range files {
		h.file(t, strings.TrimPrefix(filepath.Join(dir, name), h.files), content)
	}
	return dir
}

func link(t testing.TB, target, path string) string {
	t.Helper()
	if err := os.Symlink(target, path); err != nil {
		t.Fatal(err)
	}
	return path
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

func content(t testing.TB, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// same fails unless the reply has the fields, as JSON has them.
func same(t testing.TB, what string, got any, want any) {
	t.Helper()
	g, _ := json.Marshal(got)
	w, _ := json.Marshal(want)
	if !bytes.Equal(g, w) {
		t.Errorf("%s: got %.500s, want %.500s", what, g, w)
	}
}

// ref is a channel's end in a reply.
func ref(t testing.TB, v any) iii.ChannelRef {
	t.Helper()
	text, _ := json.Marshal(v)
	var out iii.ChannelRef
	if err := json.Unmarshal(text, &out); err != nil || out.ChannelID == "" {
		t.Fatalf("%s is no channel (%v)", text, err)
	}
	return out
}

// download reads a channel to its end, and returns the text frames too.
func (h *host) download(t testing.TB, content any) (data []byte, texts []string) {
	t.Helper()
	reader, err := h.caller.OpenReader(h.ctx(), ref(t, content), iii.ChannelOptions{
		Idle: patience, Text: func(text []byte) { texts = append(texts, string(text)) },
	})
	if err != nil {
		t.Fatal(err)
	}
	data, err = io.ReadAll(reader)
	if err := errors.Join(err, reader.Close()); err != nil {
		t.Fatal(err)
	}
	return data, texts
}

// upload makes a channel, whose reader it returns for a request, and a function
// that writes to it and ends it.
func (h *host) upload(t testing.TB) (reader iii.ChannelRef, send func(data []byte)) {
	t.Helper()
	writer, reader, err := h.caller.CreateChannel(h.ctx(), 0)
	if err != nil {
		t.Fatal(err)
	}
	return reader, func(data []byte) {
		out, err := h.caller.OpenWriter(h.ctx(), writer, iii.ChannelOptions{Idle: patience})
		if err != nil {
			t.Error(err)
			return
		}
		_, err = out.Write(data)
		if err := errors.Join(err, out.Close()); err != nil {
			t.Error(err)
		}
	}
}

// eventually waits for what no event tells.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	vmtest.Eventually(t, patience, what, ok)
}
