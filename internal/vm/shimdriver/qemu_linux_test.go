package shimdriver_test

import (
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/shimdriver"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/vmtest"
)

// patience is that of a test with emulated VMs on a busy host.
const patience = 2 * time.Minute

func qemuDriver(t testing.TB, host *vmtest.Host, roots layout.Roots, env map[string]string) *shimdriver.Driver {
	t.Helper()
	d, err := shimdriver.New(shimdriver.Config{
		VMM: "qemu", Roots: roots, Log: vmtest.Logger(t), Version: "vmtest",
		Getenv: func(key string) string {
			if value, ok := env[key]; ok {
				return value
			}
			return host.Getenv(key)
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func qemuEnv(t testing.TB, host *vmtest.Host, env map[string]string) *vmtest.Env {
	t.Helper()
	roots := host.Roots(t)
	return &vmtest.Env{
		Driver: qemuDriver(t, host, roots, env), Roots: roots, Lower: host.Lower, Probe: host.Probe,
		Patience: patience, Crowd: 6, RealDisk: true,
	}
}

// Every test of the suite on real VMs, with the machine type that the driver
// chooses here.
func TestSuiteOnQEMU(t *testing.T) {
	host := vmtest.QEMU(t)
	vmtest.RunSuite(t, func(t *testing.T) *vmtest.Env {
		t.Helper()
		return qemuEnv(t, host, nil)
	})
}

func TestBothMachineTypesBoot(t *testing.T) {
	host := vmtest.QEMU(t)
	for _, machine := range []string{"q35", "microvm"} {
		t.Run(machine, func(t *testing.T) {
			e := qemuEnv(t, host, map[string]string{"III_SANDBOX_QEMU_MACHINE": machine})
			req := e.Request()
			req.CPUs = 2
			m := e.Launch(t, e.Launcher(t), req)
			got := run(t, e, m, "nproc; cat /proc/cmdline")
			if !strings.HasPrefix(got, "2\n") {
				t.Errorf("the guest has %q CPUs", got)
			}
			if strings.Contains(got, "GREETING") {
				t.Error("the environment is on the kernel's command line")
			}
			t.Logf("kernel %v, agent %v", m.Info().KernelTime, m.Info().AgentTime)
			checkClockRate(t, e, m)
		})
	}
}

// run is a shell command's output; it has to succeed.
func run(t testing.TB, e *vmtest.Env, m *vm.Machine, script string) string {
	t.Helper()
	out, err := vmtest.Output(e.Context(t), m, script)
	if err != nil {
		t.Fatalf("%s: %v", script, err)
	}
	return out
}

func TestEnvironmentIsChecked(t *testing.T) {
	host := vmtest.QEMU(t)
	for variable, value := range map[string]string{"III_SANDBOX_QEMU_MACHINE": "pc", "III_SANDBOX_SNAPSHOT": "no"} {
		e := qemuEnv(t, host, map[string]string{variable: value})
		_, err := e.Launcher(t).Launch(e.Context(t), e.Request())
		if err == nil || !strings.Contains(err.Error(), variable+"=\""+value+"\": it can be ") {
			t.Errorf("error is %v", err)
		}
		e.CheckEmpty(t)
	}
}

// checkClockRate fails when the guest's clock runs at another speed than the
// host's, as one does that was told a wrong TSC rate.
func checkClockRate(t *testing.T, e *vmtest.Env, m *vm.Machine) {
	t.Helper()
	// How long the call took is how wrong the clock that it set may be.
	set := func() (behind, took time.Duration) {
		begin := time.Now()
		behind, err := m.Guest().SetTime(e.Context(t), begin)
		if err != nil {
			t.Fatal(err)
		}
		return behind, time.Since(begin)
	}
	_, first := set()
	begin := time.Now()
	run(t, e, m, "sleep 2")
	elapsed := time.Since(begin)
	if behind, second := set(); behind.Abs() > elapsed/10+first+second {
		t.Errorf("in %v the guest's clock came to be %v behind", elapsed, behind)
	}
}

// The contract's least size is less than this kernel needs.
func TestLeastMemoryBoots(t *testing.T) {
	host := vmtest.QEMU(t)
	e := qemuEnv(t, host, nil)
	req := e.Request()
	req.MemoryMiB = bootspec.MinMemoryMiB
	m := e.Launch(t, e.Launcher(t), req)
	if got := run(t, e, m, "echo enough"); got != "enough\n" {
		t.Errorf("stdout is %q", got)
	}
}

func TestGuestClockIsTheHosts(t *testing.T) {
	host := vmtest.QEMU(t)
	e := qemuEnv(t, host, nil)
	checkClock(t, e, e.Launch(t, e.Launcher(t), e.Request()))
}

func TestKilledShimOfKeptVMLeavesNothing(t *testing.T) {
	host := vmtest.QEMU(t)
	e := qemuEnv(t, host, nil)
	l := e.Launcher(t)
	req := e.Request()
	req.Lifetime = vm.Detached
	m := e.Launch(t, l, req)
	if err := m.Release(vm.Label{}); err != nil {
		t.Fatal(err)
	}
	kept, err := l.List(e.Context(t))
	if err != nil || len(kept) != 1 {
		t.Fatalf("kept are %+v, %v", kept, err)
	}
	other, err := l.Attach(e.Context(t), m.ID())
	if err != nil {
		t.Fatal(err)
	}
	if err := kept[0].Shim.Kill(); err != nil {
		t.Fatal(err)
	}
	e.Await(t, other.Done(), "the end of the attached handle")
	if err := other.End(); !strings.Contains(err.Error(), "killed") {
		t.Errorf("end is %v", err)
	}
	// Both handles remove the directory; the one that comes second does not wait.
	e.Await(t, m.Done(), "the end of the launcher's handle")
	if _, err := os.Stat(e.Roots.Machine(m.ID()).Dir); err == nil {
		t.Error("the directory is left")
	}
	if kept, err := l.List(e.Context(t)); err != nil || len(kept) != 0 {
		t.Errorf("still listed: %+v, %v", kept, err)
	}
}

func TestKeptVMWhoseShimHangsIsStopped(t *testing.T) {
	host := vmtest.QEMU(t)
	e := qemuEnv(t, host, nil)
	l := e.Launcher(t)
	req := e.Request()
	req.Lifetime = vm.Detached
	m := e.Launch(t, l, req)
	if err := m.Release(vm.Label{}); err != nil {
		t.Fatal(err)
	}
	kept, err := l.List(e.Context(t))
	if err != nil || len(kept) != 1 {
		t.Fatalf("kept are %+v, %v", kept, err)
	}
	if err := unix.Kill(kept[0].Shim.PID, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if err := l.Stop(e.Context(t), m.ID(), 0); err != nil {
		t.Error(err)
	}
	e.Await(t, m.Done(), "the end of the launcher's handle")
	e.CheckEmpty(t)
	if err := l.Stop(e.Context(t), m.ID(), 0); !errors.Is(err, vm.ErrNotKept) {
		t.Errorf("stop after the end: %v", err)
	}
}
