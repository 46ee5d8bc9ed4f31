package sandbox_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/catalog"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/imagestore"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/sandbox"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/shimdriver"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/vmtest"
)

// busybox is the catalog name of the image of real VMs.
const busybox = "busybox"

// newQEMUHost is newHost on real VMs.
func newQEMUHost(t *testing.T) *host {
	t.Helper()
	machine := vmtest.QEMU(t)
	roots := machine.Roots(t)
	log := vmtest.Logger(t)
	driver, err := shimdriver.New(shimdriver.Config{VMM: "qemu", Roots: roots, Log: log, Version: "vmtest", Getenv: machine.Getenv})
	if err != nil {
		t.Fatal(err)
	}
	layouts := os.Getenv("III_SANDBOX_IMAGE_DIR")
	if layouts == "" {
		layouts = userLayouts(t)
	}
	store, err := imagestore.Open(roots.Images(), imagestore.Options{Log: log, LayoutDir: layouts})
	if err != nil {
		t.Fatal(err)
	}
	cfg := defaults(t, store)
	cfg.Log, cfg.MaxSandboxes = log, 2
	cfg.Catalog = policy(t, catalog.Config{Custom: map[string]string{busybox: "registry.invalid/busybox:1"}, Allowed: []string{busybox}})
	cfg.Launcher = vm.New(vm.Config{Driver: driver, Roots: roots, Log: log, Version: "vmtest"})
	env := &vmtest.Env{Driver: driver, Roots: roots, Patience: 2 * time.Minute}
	h := &host{Env: env, Manager: sandbox.Start(cfg)}
	t.Cleanup(func() {
		begin := time.Now()
		if err := h.Close(context.Background()); err != nil {
			t.Errorf("close: %v", err)
		}
		t.Logf("closed in %v", time.Since(begin).Round(time.Millisecond))
		h.CheckEmpty(t)
	})
	return h
}

// TestOnQEMU uses the functions together on real VMs.
func TestOnQEMU(t *testing.T) {
	h := newQEMUHost(t)
	ctx := h.Context(t)

	run, err := h.Run(ctx, sandbox.RunRequest{
		Image: busybox, Lang: "shell", Code: `cat /lib/beside; cat; echo "$0 $A $(id -u) $PWD"; exit 3`, StdinB64: new("aW4K"),
		Files: []sandbox.RunFile{{Path: "lib/beside", Content: "beside\n"}}, Env: sandbox.Env{Map: map[string]string{"A": "b"}},
	})
	if want := "beside\nin\n/tmp/run.sh b 0 /\n"; err != nil || run.Stdout != want || run.ExitCode != 3 {
		t.Fatalf("%+v, %v", run, err)
	}
	h.CheckEmpty(t) // the VM was gone when the call returned

	var ids [2]string
	var boots sync.WaitGroup
	for i := range ids {
		boots.Go(func() {
			made, err := h.Create(ctx, sandbox.CreateRequest{Image: busybox, MemoryMiB: new(uint32(256))})
			if err != nil {
				t.Error(err)
			}
			ids[i] = made.SandboxID
		})
	}
	boots.Wait()
	if t.Failed() {
		t.FailNow()
	}
	_, err = h.Create(ctx, sandbox.CreateRequest{Image: busybox})
	wantCode(t, err, fault.S400)

	testOnQEMUFiles(t, h, ids[0])
	req := shell(ids[0], "echo $$; exec sleep 1000")
	req.TimeoutMs = new(uint64(1500))
	_, err = h.Exec(ctx, req)
	wantCode(t, err, fault.S200, " 1500 ms")

	// One sandbox shares nothing with the other.
	if got, err := h.Exec(ctx, sandbox.ExecRequest{SandboxID: ids[1], Cmd: "cat /data/big"}); err != nil || got.ExitCode != 1 {
		t.Errorf("%+v, %v", got, err)
	}
	begin := time.Now()
	if _, err := h.Stop(ctx, ids[0], true); err != nil {
		t.Error(err)
	}
	t.Logf("stopped in %v", time.Since(begin).Round(time.Millisecond))
	h.CheckGone(t, ids[0])

	// A guest that powers off by itself, and who learns of it.
	if _, err = h.Exec(ctx, sandbox.ExecRequest{SandboxID: ids[1], Cmd: "poweroff -f"}); err == nil {
		_, err = h.Exec(ctx, sandbox.ExecRequest{SandboxID: ids[1], Cmd: "sleep 1000"})
	}
	if code := fault.Of(err).Code; err == nil || code != fault.S300 && code != fault.S002 {
		t.Errorf("in a guest that powers off: %v", err)
	}
	vmtest.Eventually(t, h.Patience, "the end of the sandbox", func() bool { return len(h.List()) == 0 })
	_, err = h.Stat(ctx, ids[1], "/")
	wantCode(t, err, fault.S002, "vm "+ids[1]+" ended")
	t.Logf("told later: %v", err)
	h.CheckEmpty(t)

	// Close, at the end of the test, ends this one with a program in it.
	made, err := h.Create(ctx, sandbox.CreateRequest{Image: busybox, MemoryMiB: new(uint32(256))})
	if err != nil {
		t.Fatal(err)
	}
	go func() { _, _ = h.Exec(context.Background(), shell(made.SandboxID, "trap '' TERM; sleep 1000")) }()
	vmtest.Eventually(t, h.Patience, "the program's start", func() bool { return h.one(t).ExecInFlight == 1 })
}

func testOnQEMUFiles(t *testing.T, h *host, id string) {
	ctx := h.Context(t)
	const size = 16 << 20
	sum, back := sha256.New(), sha256.New()
	stream := io.TeeReader(io.LimitReader(rand.NewChaCha8([32]byte{2}), size), sum)
	_, err := h.WriteFile(ctx, sandbox.WriteRequest{
		SandboxID: id, Path: "/data/big", Mode: "0600", Parents: true,
		Stream: func(context.Context) (io.ReadCloser, error) { return io.NopCloser(stream), nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	f, err := h.OpenFile(ctx, id, "/data/big")
	if err != nil {
		t.Fatal(err)
	}
	if n, err := f.WriteTo(back); err != nil || n != size || !bytes.Equal(sum.Sum(nil), back.Sum(nil)) {
		t.Errorf("%d bytes came back, %v", n, err)
	}
	_ = f.Close()
	if got, err := h.Stat(ctx, id, "/data/big"); err != nil || got.Size != size || got.Mode != "0600" {
		t.Errorf("%+v, %v", got, err)
	}
	if err := h.Move(ctx, sandbox.MoveRequest{SandboxID: id, Src: "/data", Dst: "/tmp/data"}); err != nil { // another file system
		t.Error(err)
	}
	if err := h.Move(ctx, sandbox.MoveRequest{SandboxID: id, Src: "/tmp/data", Dst: "/data"}); err != nil {
		t.Error(err)
	}
	text := sandbox.WriteRequest{SandboxID: id, Path: "/data/text", Mode: "0644", Content: new("one\ntwo\n")}
	if _, err := h.WriteFile(ctx, text); err != nil {
		t.Error(err)
	}
	sed := sandbox.SedRequest{SandboxID: id, Path: new("/data/text"), Pattern: `t(\w)o`, Replacement: "$1$1", Regex: true}
	if got, err := h.Sed(ctx, sed); err != nil || got.TotalReplacements != 1 {
		t.Errorf("%+v, %v", got, err)
	}
	grep := sandbox.GrepRequest{SandboxID: id, Path: "/data", Pattern: "^ww$", Recursive: true}
	if got, err := h.Grep(ctx, grep); err != nil || len(got.Matches) != 1 || got.Matches[0] != (sandbox.Match{Path: "/data/text", Line: 2, Content: "ww"}) {
		t.Errorf("%+v, %v", got, err)
	}
	if got, err := h.ListDir(ctx, id, "/data"); err != nil || len(got) != 2 || got[0].Name != "big" || !strings.HasPrefix(got[1].Name, "text") {
		t.Errorf("%+v, %v", got, err)
	}
}

// userLayouts is where the images of this host's user lie.
func userLayouts(t testing.TB) string {
	t.Helper()
	roots, err := layout.FromEnvironment(os.Getenv)
	if err != nil {
		t.Fatal(err)
	}
	return roots.ImageLayouts()
}
