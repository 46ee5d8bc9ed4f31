package cli_test

import (
	"context"
	"encoding/json"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/cli"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii/iiitest"
	roots "github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/vmtest"
)

// asAdapter makes the test's program an adapter, with fakes for VMs: what gets
// signals has to be a process.
const asAdapter = "CLI_TEST_AS_ADAPTER"

func TestMain(m *testing.M) {
	if os.Getenv(asAdapter) == "" {
		os.Exit(m.Run())
	}
	app := &cli.App{
		Version: "0.2.0", Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr,
		Terminal: func(any) bool { return false }, Getenv: os.Getenv,
		NewDriver: func(_ string, _ roots.Roots, log *slog.Logger) (vm.Driver, error) { return &vmtest.Fake{Log: log}, nil },
	}
	os.Exit(app.Execute(context.Background(), os.Args[1:]))
}

// patience bounds every wait here.
const patience = 3 * time.Minute

// engine is an engine with a log.
type engine struct {
	*iiitest.Engine
	log buffer
}

func startEngine(t *testing.T, o iiitest.Options) *engine {
	t.Helper()
	e := &engine{}
	o.Log = slog.New(slog.NewTextHandler(&e.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	var err error
	if e.Engine, err = iiitest.Start(o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return e
}

// process is an adapter that runs.
type process struct {
	cmd            *exec.Cmd
	stdout, stderr buffer
	done           chan struct{}
}

// start starts the adapter on the engine, with more of an environment.
func (h *host) start(e *engine, env []string, args ...string) *process {
	h.t.Helper()
	p := &process{done: make(chan struct{})}
	p.cmd = exec.CommandContext(h.t.Context(), os.Args[0], args...)
	p.cmd.Env = append(os.Environ(), asAdapter+"=1", "III_URL="+e.URL())
	for key, value := range h.env {
		p.cmd.Env = append(p.cmd.Env, key+"="+value)
	}
	p.cmd.Env = append(p.cmd.Env, env...)
	p.cmd.Stdout, p.cmd.Stderr = &p.stdout, &p.stderr
	if err := p.cmd.Start(); err != nil {
		h.t.Fatal(err)
	}
	go func() {
		_ = p.cmd.Wait()
		close(p.done)
	}()
	h.t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		<-p.done
	})
	return p
}

// exit waits for the end and returns the exit status.
func (p *process) exit(t *testing.T) int {
	t.Helper()
	select {
	case <-p.done:
		return p.cmd.ProcessState.ExitCode()
	case <-time.After(patience):
		t.Fatalf("the adapter does not end: %s", p.stderr.String())
		return -1
	}
}

func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

func TestServe_UntilSIGTERM(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"serve"}, nil} { // nil is how Compose starts it
		h, e := newHost(t), startEngine(t, iiitest.Options{})
		p := h.start(e, []string{"III_ISOLATION=none", "III_DISABLE_TRACE_PAYLOADS=1"}, args...)
		if err := e.AwaitFunction(within(t), "sandbox-libkrun::adapter::info"); err != nil {
			t.Fatalf("%v: %s", err, p.stderr.String())
		}
		if w := e.Workers(); len(w) != 1 || w[0].Name != "sandbox-libkrun" || !w[0].Listed || w[0].Isolation != "none" {
			t.Errorf("workers %+v", w)
		}
		created, err := e.Call(within(t), "sandbox-libkrun::create", json.RawMessage(`{"image":"python"}`))
		if err != nil {
			t.Fatalf("%v: %s", err, p.stderr.String())
		}
		var box struct {
			SandboxID string `json:"sandbox_id"`
		}
		if err := json.Unmarshal(created, &box); err != nil {
			t.Fatal(err)
		}
		out, err := e.Call(within(t), "sandbox-libkrun::exec", json.RawMessage(`{"sandbox_id":"`+box.SandboxID+`","cmd":"echo hi"}`))
		if err != nil || !strings.Contains(string(out), `"stdout":"hi\n"`) {
			t.Errorf("%s, %v", out, err)
		}
		if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if code := p.exit(t); code != 0 {
			t.Errorf("exit %d: %s", code, p.stderr.String())
		}
		if err := e.Await(within(t), func() bool { return len(e.Workers()) == 0 }); err != nil {
			t.Error(err)
		}
		if !strings.Contains(e.log.String(), "close_code=1000") {
			t.Errorf("the engine saw no close with 1000: %s", e.log.String())
		}
		if p.stdout.String() != "" {
			t.Errorf("stdout %q", p.stdout.String())
		}
		h.empty()
	}
}

func TestServe_ExitCodes(t *testing.T) {
	t.Parallel()
	with := func(value string) iiitest.Options {
		return iiitest.Options{Configuration: map[string]json.RawMessage{"mine": json.RawMessage(value)}}
	}
	for name, tt := range map[string]struct {
		engine iiitest.Options
		code   int
		stderr []string
	}{
		"unparsable":       {with(`{"default_cpus":"1"}`), 2, []string{`"mine"`, "default_cpus"}},
		"old shape":        {with(`{"sandbox":{}}`), 2, []string{"legacy wrapped shape", "top level"}},
		"shadowed preset":  {with(`{"custom_images":{"node":"x/y:1"}}`), 2, []string{"shadows a built-in preset"}},
		"null cap":         {with(`{"per_image_caps":{"python":{"max_cpus":null}}}`), 2, []string{"max_cpus"}},
		"failed expansion": {with(`{"image_allowlist":["${CLI_TEST_NOT_SET}"]}`), 2, []string{"EXPAND_FAILED"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h, e := newHost(t), startEngine(t, tt.engine)
			p := h.start(e, []string{"III_CONFIG_NAME=mine"}, "serve")
			if code := p.exit(t); code != tt.code {
				t.Errorf("exit %d: %s", code, p.stderr.String())
			}
			for _, word := range tt.stderr {
				if !strings.Contains(p.stderr.String(), word) {
					t.Errorf("stderr has no %q: %s", word, p.stderr.String())
				}
			}
		})
	}
	t.Run("name taken", func(t *testing.T) {
		t.Parallel()
		h, e := newHost(t), startEngine(t, iiitest.Options{})
		first, err := iii.Open(iii.Options{URL: e.URL(), Name: "taken", Log: vmtest.Discard()})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = first.Close(within(t)) }()
		named := func() bool { w := e.Workers(); return len(w) == 1 && w[0].Name == "taken" }
		if err := e.Await(within(t), named); err != nil {
			t.Fatal(err)
		}
		p := h.start(e, []string{"III_WORKER_NAME=taken"}, "serve")
		if code := p.exit(t); code != 1 || !strings.Contains(p.stderr.String(), "III_WORKER_NAME") {
			t.Errorf("exit %d: %s", code, p.stderr.String())
		}
	})
	t.Run("bad address", func(t *testing.T) {
		t.Parallel()
		newHost(t).adapter("", "serve", "x").want(t, 2, "", "takes no arguments")
		h := newHost(t)
		h.env["III_URL"] = "http://127.0.0.1"
		h.adapter("", "serve").want(t, 1, "", "III_URL")
	})
}

// Nothing that is slow keeps the worker from being registered, in its namespace.
func TestServe_RegistersBeforeAnythingElse(t *testing.T) {
	t.Parallel()
	h, e := newHost(t), startEngine(t, iiitest.Options{NoConfiguration: true})
	e.Handle("configuration::get", func(ctx context.Context, _ json.RawMessage) (json.RawMessage, error) {
		<-ctx.Done() // for ever
		return nil, ctx.Err()
	})
	p := h.start(e, []string{"III_NAMESPACE=other"})
	err := e.Await(within(t), func() bool {
		functions := e.Functions()
		return len(functions) == 17 && functions[0].Namespace == "other"
	})
	if err != nil {
		t.Errorf("%v: %s", err, p.stderr.String())
	}
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if code := p.exit(t); code != 0 {
		t.Errorf("exit %d: %s", code, p.stderr.String())
	}
}
