package sandbox_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/sandbox"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/vmtest"
)

// patience bounds every wait for what has to happen.
const patience = 30 * time.Second

// host is a machine with a Manager on it. Its VMs are everything but the machine:
// programs and files are this host's.
type host struct {
	*vmtest.Env
	*sandbox.Manager
	// files is an empty directory for a test's files.
	files string
}

// newHost starts a Manager that is closed, and checked to leave nothing, at the
// end of the test.
func newHost(t *testing.T, fake *vmtest.Fake, change func(*sandbox.Config)) *host {
	t.Helper()
	fake.Log = vmtest.Logger(t)
	env := &vmtest.Env{Driver: fake, Roots: vmtest.Roots(t), Lower: "/etc/passwd", Patience: patience}
	cfg := defaults(t, images(t, filepath.Dir(env.Roots.Run)))
	cfg.Log = vmtest.Logger(t)
	cfg.Launcher = vm.New(vm.Config{Driver: fake, Roots: env.Roots, Log: cfg.Log, MaxBoots: 64, Version: "test"})
	if change != nil {
		change(&cfg)
	}
	files, err := os.MkdirTemp(filepath.Dir(env.Roots.Run), "files")
	if err != nil {
		t.Fatal(err)
	}
	h := &host{Env: env, Manager: sandbox.Start(cfg), files: files}
	t.Cleanup(func() {
		if err := h.Close(context.Background()); err != nil {
			t.Errorf("close: %v", err)
		}
		if list := h.List(); len(list) > 0 {
			t.Errorf("left in the registry: %+v", list)
		}
		h.CheckEmpty(t)
	})
	return h
}

// shell is an exec of a shell script.
func shell(id, script string) sandbox.ExecRequest {
	return sandbox.ExecRequest{SandboxID: id, Argv: []string{"sh", "-c", script}}
}

// one returns the only sandbox's summary.
func (h *host) one(t testing.TB) sandbox.Summary {
	t.Helper()
	list := h.List()
	if len(list) != 1 {
		t.Fatalf("%d sandboxes: %+v", len(list), list)
	}
	return list[0]
}
