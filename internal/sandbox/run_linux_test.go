package sandbox_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/proc"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/sandbox"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/vmtest"
)

// program puts an executable of that name on the host, which is the guest as well,
// and returns an environment in which it is found.
func (h *host) program(t testing.TB, name, script string) sandbox.Env {
	t.Helper()
	if err := proc.WriteProgram(filepath.Join(h.files, name), []byte("#!/bin/sh\n"+script)); err != nil {
		t.Fatal(err)
	}
	return sandbox.Env{List: []string{"PATH=" + h.files + ":/bin:/usr/bin", "A=b"}}
}

// Semantics 5.7. The fakes share this host's /tmp/run.js: the only test of it.
func TestRun(t *testing.T) {
	t.Parallel()
	h := newHost(t, &vmtest.Fake{}, func(c *sandbox.Config) { c.MaxSandboxes = 1 })
	beside := filepath.Join(h.files, "deep", "beside")
	env := h.program(t, "node", `cat - `+beside+` "$1"; printf %s "|$1|$#|$A|$FROM_IMAGE|$PWD"; exit 3`)
	req := sandbox.RunRequest{
		Image: "python", Lang: "js", Code: "code", Env: env, StdinB64: new("aW4s"),
		Files: []sandbox.RunFile{{Path: beside, Content: "first,"}, {Path: beside, Content: "second,"}},
	}
	for range 3 { // the slot is free each time
		got, err := h.Run(t.Context(), req)
		want := "in,second,code|/tmp/run.js|1|b|yes|/"
		if err != nil || got.Stdout != want || got.ExitCode != 3 || got.Success || got.SandboxID != nil {
			t.Errorf("%+v, %v; want %q", got, err, want)
		}
		h.CheckEmpty(t)
	}
	req.KeepSandbox = true
	kept, err := h.Run(t.Context(), req)
	if err != nil || kept.SandboxID == nil || kept.ExitCode != 3 {
		t.Fatalf("%+v, %v", kept, err)
	}
	if s := h.one(t); s.SandboxID != *kept.SandboxID || s.ExecInFlight != 0 {
		t.Errorf("%+v", s)
	}
	if err := os.Remove("/tmp/run.js"); err != nil {
		t.Error(err)
	}
}

// Semantics 12 #38: an unknown language is a program's name.
func TestRun_UnknownLanguage(t *testing.T) {
	t.Parallel()
	h := newHost(t, &vmtest.Fake{}, nil)
	got, err := h.Run(t.Context(), sandbox.RunRequest{Image: "python", Lang: "Python", Code: "x"})
	if err != nil || got.ExitCode != 127 || got.Stderr != "exec: Python: not found\n" {
		t.Errorf("%+v, %v", got, err)
	}
}

// wantStep fails unless err is a run's at step; the sandbox's id is returned.
func wantStep(t *testing.T, err error, step string, code fault.Code) string {
	t.Helper()
	context := "during sandbox::run step `" + step + "`"
	wantCode(t, err, code, context)
	fix := fault.Of(err).Fix
	id, ok := fix["sandbox_id"].(string)
	if !ok || fix["context"] != context || fix["inner_code"] != string(code) || len(fix) != 3 {
		t.Errorf("fix %v", fix)
	}
	return id
}

// Semantics 12 #39: each step's error, before and after the boot.
func TestRun_NamesTheStepThatFailed(t *testing.T) {
	t.Parallel()
	file := "/etc/passwd/below-a-file"
	req := sandbox.RunRequest{Image: "python", Lang: "./no", Code: "x"}
	for _, tt := range []struct {
		name, step string
		change     func(*sandbox.RunRequest)
		code       fault.Code
		booted     bool
	}{
		{"image", "create", func(r *sandbox.RunRequest) { r.Image, r.Lang = "ghost", "" }, fault.S100, false},
		{"env", "create", func(r *sandbox.RunRequest) { r.Env.Map = map[string]string{"-": ""} }, fault.S001, false},
		{"pull", "create", func(r *sandbox.RunRequest) { r.Image = "node" }, fault.S101, false},
		{"no lang", "exec", func(r *sandbox.RunRequest) { r.Lang = "" }, fault.S001, false},
		{"lang with a flag", "exec", func(r *sandbox.RunRequest) { r.Lang = "python3 -u" }, fault.S001, false},
		{"stdin", "exec", func(r *sandbox.RunRequest) { r.StdinB64 = new("?") }, fault.S001, false},
		{"sibling", "fs::write (sibling file)", func(r *sandbox.RunRequest) { r.Files = []sandbox.RunFile{{Path: file}} }, fault.S213, true},
		{"time", "exec", func(r *sandbox.RunRequest) { r.TimeoutMs = new(uint64(0)) }, fault.S200, true},
	} {
		for _, keep := range []bool{false, true} {
			t.Run(fmt.Sprint(tt.name, " ", keep), func(t *testing.T) {
				t.Parallel()
				h := newHost(t, &vmtest.Fake{}, func(c *sandbox.Config) { c.AutoInstall, c.MaxSandboxes = false, 1 })
				req := req
				req.KeepSandbox = keep
				tt.change(&req)
				_, err := h.Run(t.Context(), req)
				id := wantStep(t, err, tt.step, tt.code)
				if (id != "") != tt.booted {
					t.Errorf("sandbox_id %q", id)
				}
				if tt.booted && keep {
					if s := h.one(t); s.SandboxID != id {
						t.Errorf("%+v", s)
					}
					return
				}
				create(t, h.Manager) // its slot is free
			})
		}
	}
}

func TestRun_EndsItsSandboxWhenTheCallerLeaves(t *testing.T) {
	t.Parallel()
	for _, at := range []string{"boot", "exec"} {
		t.Run(at, func(t *testing.T) {
			t.Parallel()
			reached := make(chan struct{})
			h := newHost(t, &vmtest.Fake{StepHook: func(life context.Context, step vmtest.Step) *bootspec.End {
				if at == "boot" && step == vmtest.StepLink {
					close(reached)
					<-life.Done()
				}
				return nil
			}}, nil)
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			ended := make(chan error, 1)
			file := filepath.Join(h.files, "started")
			env := h.program(t, "stay", `echo >`+file+`; exec sleep 1000`)
			go func() {
				_, err := h.Run(ctx, sandbox.RunRequest{Image: "python", Lang: "stay", Code: "x", Env: env})
				ended <- err
			}()
			if at == "boot" {
				h.Await(t, reached, "the boot")
			} else {
				vmtest.Eventually(t, patience, "the program's start", func() bool {
					_, err := os.Stat(file)
					return err == nil
				})
			}
			leave()
			wantCode(t, <-ended, fault.S300)
			h.CheckEmpty(t)
		})
	}
}

func TestRun_WhoseVMEnds(t *testing.T) {
	t.Parallel()
	h := newHost(t, &vmtest.Fake{}, func(c *sandbox.Config) { c.MaxSandboxes = 1 })
	for _, keep := range []bool{true, false} {
		file := filepath.Join(h.files, fmt.Sprint("started ", keep))
		env := h.program(t, "stay", `echo >"`+file+`"; exec sleep 1000`)
		ended := make(chan error, 1)
		go func() {
			_, err := h.Run(context.Background(), sandbox.RunRequest{Image: "python", Lang: "stay", Env: env, KeepSandbox: keep})
			ended <- err
		}()
		vmtest.Eventually(t, patience, "the program's start", func() bool {
			_, err := os.Stat(file)
			return err == nil
		})
		id := h.one(t).SandboxID
		h.kill(t, id)
		err := <-ended
		if got := wantStep(t, err, "exec", fault.S300); got != id {
			t.Errorf("sandbox_id %q", got)
		}
		wantCode(t, err, fault.S300, "killed")
		vmtest.Eventually(t, patience, "the end of the sandbox", func() bool { return len(h.List()) == 0 })
	}
}
