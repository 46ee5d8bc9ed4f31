package shimdriver_test

import (
	"strings"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/shimdriver"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/vmtest"
)

// libkrunCrowd is how many VMs the suite asks for at once: the hosts of these
// tests may be emulated themselves.
const libkrunCrowd = 2

func libkrunEnv(t testing.TB, host *vmtest.Host) *vmtest.Env {
	t.Helper()
	roots := host.Roots(t)
	d, err := shimdriver.New(shimdriver.Config{
		VMM: "libkrun", Roots: roots, Log: vmtest.Logger(t), Version: "vmtest", Getenv: host.Getenv,
	})
	if err != nil {
		t.Fatal(err)
	}
	return &vmtest.Env{
		Driver: d, Roots: roots, Lower: host.Lower, Probe: host.Probe,
		Patience: patience, Crowd: libkrunCrowd, RealDisk: true, Load: vmtest.WholeLoad(),
	}
}

// Every test of the suite on libkrun's VMs, where there is hardware
// virtualization, or something that acts as if.
func TestSuiteOnLibkrun(t *testing.T) {
	host := vmtest.Libkrun(t)
	vmtest.RunSuite(t, func(t *testing.T) *vmtest.Env {
		t.Helper()
		return libkrunEnv(t, host)
	})
}

// Nothing of a VM is on its kernel's command line, which any program of the guest
// can read, and the agent is the first process.
func TestLibkrunGuestKnowsItsEnvironmentFromThePortAlone(t *testing.T) {
	host := vmtest.Libkrun(t)
	e := libkrunEnv(t, host)
	req := e.Request()
	req.CPUs = 2
	m := e.Launch(t, e.Launcher(t), req)
	got := run(t, e, m, "nproc; cat /proc/cmdline; tr '\\0' ' ' </proc/1/cmdline; tr '\\0' '\\n' </proc/1/environ; env")
	if !strings.HasPrefix(got, "2\n") {
		t.Errorf("the guest has %q CPUs", got)
	}
	if !strings.Contains(got, "/agent") || strings.Count(got, "GREETING") != 1 {
		t.Errorf("the guest says %q", got)
	}
}
