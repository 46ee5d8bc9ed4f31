package shimdriver_test

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/guest"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/shimdriver"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/vmtest"
)

// The test binary plays the adapter that gets killed: see matrix.adapter.
func TestMain(m *testing.M) {
	vmtest.PlayGuest()
	vmtest.PlayClient()
	if os.Getenv("VMTEST_ADAPTER") != "" {
		adapterMain()
	}
	os.Exit(m.Run())
}

// adapterSteps are the points at which the played adapter announces itself and
// may be killed.
var adapterSteps = []string{"prepared", "started", "running", "exec"} //nolint:gochecknoglobals // a table

// announced is a driver that prints how far a launch is, and then waits where
// the adapter is to be killed.
type announced struct {
	vm.Driver
	until string
}

func (a *announced) reach(step string, pid int) {
	fmt.Println(step, pid)
	if step == a.until {
		select {}
	}
}

func (a *announced) Prepare(ctx context.Context, spec *bootspec.Spec) error {
	err := a.Driver.Prepare(ctx, spec)
	a.reach("prepared", 0)
	return err
}

func (a *announced) Start(ctx context.Context, spec *bootspec.Spec, lock *os.File) (vm.Process, error) {
	p, err := a.Driver.Start(ctx, spec, lock)
	if err == nil {
		a.reach("started", p.PID())
	}
	return p, err
}

// adapterMain launches a VM, runs a program in it, and waits to be killed.
func adapterMain() {
	roots := rootsIn(os.Getenv("VMTEST_ADAPTER"), os.Getenv("VMTEST_CACHE"))
	inner, err := newAdapterDriver(roots)
	fatal(err)
	d := &announced{Driver: inner, until: os.Getenv("VMTEST_UNTIL")}
	l := vm.New(vm.Config{Driver: d, Roots: roots, Log: vmtest.Discard()})
	ctx := context.Background()
	e := vmtest.Env{Lower: os.Getenv("VMTEST_LOWER")}
	m, err := l.Launch(ctx, e.Request())
	fatal(err)
	d.reach("running", 0)
	first := &firstByte{seen: make(chan struct{})}
	go func() {
		_, err := m.Guest().Exec(ctx, vmtest.Shell("echo ready; sleep 1000"), guest.IO{Stdout: first})
		fatal(err)
	}()
	<-first.seen
	d.reach("exec", 0)
}

func rootsIn(dir, cache string) layout.Roots {
	return layout.Roots{Cache: cache, Data: dir + "/data", State: dir + "/state", Run: dir + "/run"}
}

func newAdapterDriver(roots layout.Roots) (vm.Driver, error) {
	return shimdriver.New(shimdriver.Config{VMM: os.Getenv("VMTEST_VMM"), Roots: roots, Log: vmtest.Discard(), Getenv: os.Getenv})
}

func fatal(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func (x matrix) adapter(t *testing.T) {
	for _, until := range adapterSteps {
		t.Run(until, func(t *testing.T) {
			e := x.open(t)
			exe, err := os.Executable()
			if err != nil {
				t.Fatal(err)
			}
			adapter := exec.Command(exe)
			adapter.Env = append(os.Environ(), "VMTEST_ADAPTER="+strings.TrimSuffix(e.Roots.Run, "/run"), "VMTEST_UNTIL="+until, "VMTEST_VMM="+x.vmm,
				"VMTEST_LOWER="+x.host.Lower, "VMTEST_CACHE="+x.host.Cache, "III_KRUN_SHIM="+x.host.Shim, "III_GUEST_AGENT="+x.host.Agent)
			adapter.Stderr = os.Stderr
			stdout, err := adapter.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := adapter.Start(); err != nil {
				t.Fatal(err)
			}
			killed := false
			kill := func() {
				if !killed {
					killed = true
					_ = adapter.Process.Kill()
					_ = adapter.Wait()
				}
			}
			defer kill()
			var f family
			for lines := bufio.NewScanner(stdout); lines.Scan(); {
				step, pid, _ := strings.Cut(lines.Text(), " ")
				if step == "started" {
					shim, err := strconv.Atoi(pid)
					if err != nil {
						t.Fatal(err)
					}
					f = x.familyOf(t, shim)
				}
				if step == until {
					break
				}
			}
			if until != "prepared" && f.shim.PID == 0 {
				t.Fatal("the adapter did not get that far")
			}
			kill()
			if slices.Index(adapterSteps, until) > 0 {
				f.checkGone(t, e)
			}
			// Before there is a shim, only the next launch can clean up.
			checkNext(t, e)
		})
	}
}
