package sandbox_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/sandbox"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/vmtest"
)

// TestOnQEMU_HostilePrograms lets programs, root in their guest, do what harms
// most; the sandbox has to go on, and to say what is wrong.
func TestOnQEMU_HostilePrograms(t *testing.T) {
	h := newQEMUHost(t)
	made, err := h.Create(h.Context(t), sandbox.CreateRequest{Image: busybox, MemoryMiB: new(uint32(192))})
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name string
		run  func(*testing.T, *host, string)
	}{
		{"signals to process 1", hostileSignals},
		{"processes that outlive their program", hostileDaemons},
		{"every file system in memory full", hostileMemory},
		{"readers that stand still", hostileReaders},
		{"no /proc", hostileNoProc}, // the last one: it leaves the guest without
	} {
		if !t.Run(test.name, func(t *testing.T) { test.run(t, h, made.SandboxID) }) {
			return
		}
	}
	if _, err := h.Stop(h.Context(t), made.SandboxID, true); err != nil {
		t.Error(err)
	}
}

// output is what a shell in the sandbox prints.
func output(t *testing.T, h *host, id, script string) string {
	t.Helper()
	got, err := h.Exec(h.Context(t), shell(id, script))
	if err != nil {
		t.Fatalf("%s: %v", script, err)
	}
	return got.Stdout
}

func hostileSignals(t *testing.T, h *host, id string) {
	output(t, h, id, "for n in $(seq 64); do kill -$n 1; done")
	output(t, h, id, "kill -9 -1")
	if got := output(t, h, id, "echo here"); got != "here\n" {
		t.Errorf("%q", got)
	}
}

func hostileDaemons(t *testing.T, h *host, id string) {
	group := func(script string) string {
		return strings.TrimSpace(output(t, h, id, script+"cat /proc/self/cgroup"))
	}
	daemon := group("setsid sh -c 'while :; do :; done' >/dev/null 2>&1 & ")
	if !strings.HasPrefix(daemon, "0::/programs/") {
		t.Fatalf("programs run in %q", daemon)
	}
	if next := group(""); next == daemon {
		t.Errorf("a program shares the control group of one that is busy: %s", next)
	}
	output(t, h, id, "kill -9 -1")
	vmtest.Eventually(t, h.Patience, "the use of the group again", func() bool { return group("") == daemon })
	output(t, h, id, "for i in 0 1 2; do sh -c 'sleep 1000' >/dev/null 2>&1 & done; rmdir /sys/fs/cgroup/programs/*; kill -9 -1")
	if got := group(""); !strings.HasPrefix(got, "0::/programs/") {
		t.Errorf("%q once groups were removed", got)
	}
	var threads, limit int
	text := output(t, h, id, "cat /proc/sys/kernel/threads-max /sys/fs/cgroup/programs/pids.max")
	if n, err := fmt.Sscan(text, &threads, &limit); n != 2 || limit >= threads {
		t.Errorf("programs may have %d threads of %d (%v)", limit, threads, err)
	}
}

func hostileMemory(t *testing.T, h *host, id string) {
	output(t, h, id, "for d in dev dev/shm run; do dd if=/dev/zero of=/$d/full bs=1M; done 2>/dev/null; df")
	_, err := h.WriteFile(h.Context(t), sandbox.WriteRequest{
		SandboxID: id, Path: "/dev/shm/more", Mode: "0644", Content: new(strings.Repeat("x", 1<<20)),
	})
	wantCode(t, err, fault.S216, "no space left")
	if got := output(t, h, id, "echo here"); got != "here\n" {
		t.Errorf("%q", got)
	}
	for _, dir := range []string{"/dev", "/dev/shm", "/run"} {
		if err := h.Remove(h.Context(t), sandbox.RemoveRequest{SandboxID: id, Path: dir + "/full"}); err != nil {
			t.Error(err)
		}
	}
}

func hostileReaders(t *testing.T, h *host, id string) {
	output(t, h, id, "dd if=/dev/zero of=/big bs=1M count=8 2>/dev/null")
	for range 64 {
		f, err := h.OpenFile(h.Context(t), id, "/big")
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close() //nolint:errcheck // always nil
	}
	if got, err := h.Stat(h.Context(t), id, "/big"); err != nil || got.Size != 8<<20 {
		t.Errorf("%+v, %v", got, err)
	}
	write := sandbox.WriteRequest{SandboxID: id, Path: "/small", Mode: "0644", Content: new("text")}
	if _, err := h.WriteFile(h.Context(t), write); err != nil {
		t.Error(err)
	}
	if got := output(t, h, id, "cat /small"); got != "text" {
		t.Errorf("%q", got)
	}
}

func hostileNoProc(t *testing.T, h *host, id string) {
	if got := output(t, h, id, "umount -l /proc; ls /proc"); got != "" {
		t.Fatalf("/proc has %s", got)
	}
	_, err := h.OpenFile(h.Context(t), id, "/small")
	wantCode(t, err, fault.S216, "/proc is not mounted")
	_, err = h.MakeDir(h.Context(t), sandbox.MakeDirRequest{SandboxID: id, Path: "/made", Mode: "0755"})
	wantCode(t, err, fault.S216, "/proc is not mounted")
	_, err = h.Stat(h.Context(t), id, "/made")
	wantCode(t, err, fault.S211)
	write := sandbox.WriteRequest{SandboxID: id, Path: "/small", Mode: "0644", Content: new("new")}
	if _, err := h.WriteFile(h.Context(t), write); err != nil {
		t.Error(err)
	}
	if got := output(t, h, id, "cat /small"); got != "new" {
		t.Errorf("%q", got)
	}
}
