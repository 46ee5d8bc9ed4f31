package shimdriver_test

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/egress"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/proc"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/shimdriver"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/vmtest"
)

// snapshotOf is the snapshot that the VM was given, empty for none.
func snapshotOf(t *testing.T, e *vmtest.Env, m *vm.Machine) string {
	t.Helper()
	raw, err := os.ReadFile(e.Roots.Machine(m.ID()).Spec())
	if err != nil {
		t.Fatal(err)
	}
	spec, err := bootspec.Parse(raw)
	if err != nil {
		t.Fatal(err)
	}
	return spec.QEMU.Snapshot
}

// ownSnapshots is an environment with a cache that is this test's alone, and has
// no snapshots yet: other tests kill what makes theirs.
func ownSnapshots(t *testing.T, env map[string]string) *vmtest.Env {
	t.Helper()
	e := qemuEnv(t, vmtest.QEMU(t), env)
	cache := t.TempDir()
	if err := os.CopyFS(cache, os.DirFS(e.Roots.Cache)); err != nil {
		t.Fatal(err)
	}
	e.Roots.Cache = cache
	if err := os.RemoveAll(filepath.Join(e.Roots.VMM(), "snapshots")); err != nil {
		t.Fatal(err)
	}
	e.Driver = qemuDriver(t, vmtest.QEMU(t), e.Roots, env)
	return e
}

// VMs with a network have a snapshot of their own, which all of them share
// whatever their policies and ports.
func TestSnapshotWithANetwork(t *testing.T) {
	for _, machine := range []string{"q35", "microvm"} {
		t.Run(machine, func(t *testing.T) {
			e := ownSnapshots(t, map[string]string{"III_SANDBOX_QEMU_MACHINE": machine})
			plain := e.Launch(t, e.Launcher(t), e.Request())
			snapshots := map[string]bool{snapshotOf(t, e, plain): true}
			for i := range 3 {
				port := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprint(w, "server ", i) }), nil)
				req := e.Request()
				req.Network = &vm.Network{Policy: egress.Policy{Mode: egress.Open, HostPorts: []uint16{port}}, Publish: []vm.PublishedPort{{Guest: 80}}}
				m := e.Launch(t, e.Launcher(t), req)
				snapshots[snapshotOf(t, e, m)] = true
				if got := run(t, e, m, fmt.Sprintf("wget -q -O - http://%s:%d/; cat /sys/class/net/eth0/mtu", bootspec.HostAlias, port)); got != fmt.Sprintf("server %d%d\n", i, bootspec.MaxMTU) {
					t.Errorf("VM %d got %q", i, got)
				}
			}
			if len(snapshots) != 2 || snapshots[""] {
				t.Errorf("the VMs came from %v, want two snapshots", snapshots)
			}
			if got := run(t, e, plain, "ls /sys/class/net"); got != "lo\n" {
				t.Errorf("the VM without a network has %q", got)
			}
		})
	}
}

// What is random in a guest must not be the same in another one that was resumed
// from the same snapshot.
func TestResumedVMsShareNothingRandom(t *testing.T) {
	for _, machine := range []string{"q35", "microvm"} {
		t.Run(machine, func(t *testing.T) {
			e := ownSnapshots(t, map[string]string{"III_SANDBOX_QEMU_MACHINE": machine})
			seen := map[string]bool{}
			snapshots := map[string]bool{}
			for range 3 {
				m := e.Launch(t, e.Launcher(t), e.Request())
				snapshots[snapshotOf(t, e, m)] = true
				out := run(t, e, m, "cat /proc/sys/kernel/random/boot_id /proc/sys/kernel/random/uuid; head -c 32 /dev/urandom | od -An -tx1 | tr -d '\\n '; cat /proc/self/stat")
				lines := strings.Split(out, "\n")
				// Of stat only the addresses of stack and code (proc(5): startstack).
				stat := strings.Fields(lines[2][64:])
				for _, value := range append(lines[:2], lines[2][:64], stat[27]) {
					if seen[value] {
						t.Errorf("%q was seen in another VM", value)
					}
					seen[value] = true
				}
				checkClock(t, e, m)
			}
			if len(snapshots) != 1 || snapshots[""] {
				t.Errorf("the VMs came from %v, want one snapshot", snapshots)
			}
		})
	}
}

func checkClock(t *testing.T, e *vmtest.Env, m *vm.Machine) {
	t.Helper()
	offset, err := m.Guest().SetTime(e.Context(t), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if offset.Abs() > 2*time.Second {
		t.Errorf("the guest's clock was off by %v", offset)
	}
}

func TestVMWithoutASnapshotBoots(t *testing.T) {
	e := qemuEnv(t, vmtest.QEMU(t), map[string]string{"III_SANDBOX_SNAPSHOT": "off"})
	m := e.Launch(t, e.Launcher(t), e.Request())
	if path := snapshotOf(t, e, m); path != "" {
		t.Errorf("it came from %s", path)
	}
	if got := run(t, e, m, "echo booted; ip addr 2>/dev/null; cat /sys/class/net/lo/operstate"); !strings.HasPrefix(got, "booted\n") {
		t.Errorf("stdout is %q", got)
	}
}

// A snapshot that QEMU cannot use costs time, not the VM, and is replaced.
func TestSpoiledSnapshots(t *testing.T) {
	e := ownSnapshots(t, nil)
	l := e.Launcher(t)
	first := e.Launch(t, l, e.Request())
	path := snapshotOf(t, e, first)
	if path == "" {
		t.Fatal("there is no snapshot")
	}
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	other := slices.Concat([]byte("QEVM\x00\x00\x00\x03"), make([]byte, 1<<16))
	for name, content := range map[string][]byte{
		"nothing": {}, "text": []byte("not a snapshot at all"), "half": whole[:len(whole)/2], "a part": whole[:len(whole)-1<<20], "zeros": other,
	} {
		t.Run(name, func(t *testing.T) {
			// A new file: another VM may be reading the old one.
			if err := errors.Join(os.WriteFile(path+".new", content, 0o600), os.Rename(path+".new", path)); err != nil {
				t.Fatal(err)
			}
			m := e.Launch(t, l, e.Request())
			if got := run(t, e, m, "echo up"); got != "up\n" {
				t.Errorf("stdout is %q", got)
			}
			if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the spoiled snapshot is still there: %v", err)
			}
			status, err := m.Status(e.Context(t))
			if err != nil {
				t.Fatal(err)
			}
			// Status and Stats must tell of the QEMU that runs.
			if _, err := os.Stat(filepath.Join("/proc", strconv.Itoa(status.VMMPID))); err != nil {
				t.Errorf("the VMM that is told of: %v", err)
			}
		})
	}
	m := e.Launch(t, l, e.Request())
	if got := run(t, e, m, "echo up"); got != "up\n" || snapshotOf(t, e, m) != path {
		t.Errorf("stdout is %q, snapshot %s", got, snapshotOf(t, e, m))
	}
	if now, err := os.ReadFile(path); err != nil || len(now) < len(whole)/2 {
		t.Errorf("a new snapshot has %d bytes, %v", len(now), err)
	}
}

// No snapshot can be made: the VM boots all the same.
func TestSnapshotThatCannotBeMade(t *testing.T) {
	for name, save := range map[string]string{
		"it fails":        "echo no saving today >&2; exit 1",
		"it never ends":   "exec sleep 1000",
		"it stops itself": "kill -STOP $$",
	} {
		t.Run(name, func(t *testing.T) {
			host := vmtest.QEMU(t)
			e := ownSnapshots(t, nil)
			script := filepath.Join(t.TempDir(), "krun-shim")
			body := "#!/bin/sh\nif [ \"$1\" = __vm-save ]; then " + save + "; fi\nexec " + host.Shim + " \"$@\"\n"
			if err := proc.WriteProgram(script, []byte(body)); err != nil {
				t.Fatal(err)
			}
			var err error
			e.Driver, err = shimdriver.New(shimdriver.Config{
				VMM: "qemu", Roots: e.Roots, Log: vmtest.Logger(t), Version: "vmtest", SaveTimeout: time.Second,
				Getenv: func(key string) string {
					if key == "III_KRUN_SHIM" {
						return script
					}
					return host.Getenv(key)
				},
			})
			if err != nil {
				t.Fatal(err)
			}
			m := e.Launch(t, e.Launcher(t), e.Request())
			if path := snapshotOf(t, e, m); path != "" {
				t.Errorf("it came from %s", path)
			}
			if got := run(t, e, m, "echo up"); got != "up\n" {
				t.Errorf("stdout is %q", got)
			}
		})
	}
}
