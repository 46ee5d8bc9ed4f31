package vmtest

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/guest"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
)

// inFlight starts a program that never ends by itself and returns when it runs.
// The channel gets the call's error.
func (e *Env) inFlight(t *testing.T, m *vm.Machine, script string) <-chan error {
	t.Helper()
	running := newGate()
	close(running.open)
	ended := make(chan error, 1)
	go func() {
		_, err := m.Guest().Exec(e.Context(t), Shell(script), guest.IO{Stdout: running})
		ended <- err
	}()
	e.Await(t, running.arrived, "start of the program")
	return ended
}

// checkEnd fails unless err tells that the VM ended in one of the classes.
func checkEnd(t testing.TB, err error, classes ...bootspec.EndClass) {
	t.Helper()
	var end *vm.EndError
	if !errors.As(err, &end) {
		t.Errorf("error is %v, want the vm's end", err)
		return
	}
	if !slices.Contains(classes, end.End.Class) {
		t.Errorf("the end is %+v, want class %v", end.End, classes)
	}
}

func testStop(t *testing.T, e *Env) {
	m := e.Launch(t, e.Launcher(t), e.Request())
	call := e.inFlight(t, m, "echo ready; sleep 1000")
	if err := m.Stop(e.Context(t), 5*time.Second); err != nil {
		t.Fatal(err)
	}
	if err := <-call; err == nil {
		t.Log("the call in flight got the program's end")
	}
	checkEnd(t, m.End(), bootspec.EndGuest)
	e.CheckGone(t, m.ID())
	if err := m.Stop(e.Context(t), 0); err != nil {
		t.Errorf("second stop: %v", err)
	}
	if _, err := m.Guest().Exec(e.Context(t), Shell("true"), guest.IO{}); err == nil {
		t.Error("a program ran in a stopped vm")
	} else {
		checkEnd(t, err, bootspec.EndGuest)
	}
}

func testStopStubborn(t *testing.T, e *Env) {
	m := e.Launch(t, e.Launcher(t), e.Request())
	e.inFlight(t, m, "trap '' TERM; echo ready; while :; do sleep 1; done")
	if err := m.Stop(e.Context(t), 200*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	checkEnd(t, m.End(), bootspec.EndGuest)
	e.CheckGone(t, m.ID())
}

func testKill(t *testing.T, e *Env) {
	l := e.Launcher(t)
	m := e.Launch(t, l, e.Request())
	call := e.inFlight(t, m, "echo ready; sleep 1000")
	if err := m.Kill(); err != nil {
		t.Fatal(err)
	}
	checkEnd(t, <-call, bootspec.EndKilled)
	checkEnd(t, m.End(), bootspec.EndKilled)
	e.CheckGone(t, m.ID())
	if err := m.Kill(); err != nil {
		t.Errorf("second kill: %v", err)
	}
	next := e.Launch(t, l, e.Request())
	if got := mustExec(e.Context(t), t, next, Shell("echo next"), nil); got.stdout != "next\n" {
		t.Errorf("the next vm: %+v %q", got.Result, got.stdout)
	}
}

func testCloseTied(t *testing.T, e *Env) {
	m := e.Launch(t, e.Launcher(t), e.Request())
	if err := m.Release(vm.Label{}); err == nil {
		t.Error("a tied vm could be kept")
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	e.CheckGone(t, m.ID())
	checkEnd(t, m.End(), bootspec.EndKilled)
}

// starts is a driver that tells when it starts a VM.
type starts struct {
	vm.Driver
	started chan struct{}
}

func (s *starts) Start(ctx context.Context, spec *bootspec.Spec, lock *os.File) (vm.Process, error) {
	close(s.started)
	return s.Driver.Start(ctx, spec, lock)
}

func testCancelledLaunch(t *testing.T, e *Env) {
	cause := errors.New("the user left")
	driver := &starts{Driver: e.Driver, started: make(chan struct{})}
	during := *e
	during.Driver = driver
	ctx, cancel := context.WithCancelCause(e.Context(t))
	go func() {
		<-driver.started
		cancel(cause)
	}()
	m, err := during.Launcher(t).Launch(ctx, e.Request())
	if err == nil {
		// The fake boots faster than the cancel; then the VM must not mind it.
		if got := mustExec(e.Context(t), t, m, Shell("exit 6"), nil); got.ExitCode != 6 {
			t.Errorf("after the launch's context: %+v", got.Result)
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	} else if !errors.Is(err, cause) {
		t.Errorf("error is %v, want the cause", err)
	}
	e.CheckEmpty(t)

	before, cancelBefore := context.WithCancelCause(e.Context(t))
	cancelBefore(cause)
	if _, err := e.Launcher(t).Launch(before, e.Request()); !errors.Is(err, cause) {
		t.Errorf("cancelled before: %v", err)
	}
	e.CheckEmpty(t)
}

func testBootTimeout(t *testing.T, e *Env) {
	l := e.launcher(t, vm.Config{BootTimeout: time.Nanosecond})
	_, err := l.Launch(e.Context(t), e.Request())
	if !errors.Is(err, vm.ErrBootTimeout) {
		t.Fatalf("error is %v", err)
	}
	var boot *vm.BootError
	if errors.As(err, &boot) && boot.SpecFile != "" {
		body, err := os.ReadFile(boot.SpecFile)
		if err != nil {
			t.Fatal(err)
		}
		spec, err := bootspec.Parse(body)
		if err != nil {
			t.Fatal(err)
		}
		if spec.ID != boot.ID || spec.Guest.Token != "" || spec.Guest.Env != nil || strings.Contains(string(body), "hello") {
			t.Errorf("the kept spec is %s", body)
		}
	} else {
		t.Errorf("no spec was kept: %#v", err)
	}
	e.CheckEmpty(t)
}

func testRefusedRequests(t *testing.T, e *Env) {
	l := e.Launcher(t)
	for name, change := range map[string]func(*vm.Request){
		"memory":   func(r *vm.Request) { r.MemoryMiB = 10 },
		"cpus":     func(r *vm.Request) { r.CPUs = -1 },
		"id":       func(r *vm.Request) { r.ID = "../x" },
		"hostname": func(r *vm.Request) { r.Hostname = "no spaces" },
		"env":      func(r *vm.Request) { r.Env = []string{"=x"} },
		"lower":    func(r *vm.Request) { r.Lower = "/no/such/image" },
		"vmm":      func(r *vm.Request) { r.VMM = "no-such-vmm" },
	} {
		req := e.Request()
		change(&req)
		m, err := l.Launch(e.Context(t), req)
		if err == nil {
			t.Errorf("%s: the request was accepted", name)
			_ = m.Close()
			continue
		}
		if !strings.Contains(err.Error(), name) && name != "lower" {
			t.Errorf("%s: the error does not name it: %v", name, err)
		}
	}
	e.CheckEmpty(t)
}

func testSameID(t *testing.T, e *Env) {
	l := e.Launcher(t)
	req := e.Request()
	req.ID = "the-one"
	m := e.Launch(t, l, req)
	if _, err := l.Launch(e.Context(t), req); err == nil || !strings.Contains(err.Error(), "the-one") {
		t.Errorf("a second vm of that id: %v", err)
	}
	if got := mustExec(e.Context(t), t, m, Shell("exit 5"), nil); got.ExitCode != 5 {
		t.Errorf("the first one suffered: %+v", got.Result)
	}
	if err := m.Stop(e.Context(t), 0); err != nil {
		t.Fatal(err)
	}
	again := e.Launch(t, l, req)
	if err := again.Stop(e.Context(t), 0); err != nil {
		t.Error(err)
	}
}

func testKeep(t *testing.T, e *Env) {
	l := e.Launcher(t)
	req := e.Request()
	req.Lifetime, req.IdleTimeout = vm.Detached, time.Hour
	m := e.Launch(t, l, req)
	if kept, err := l.List(e.Context(t)); err != nil || len(kept) != 0 {
		t.Errorf("listed before it is kept: %+v, %v", kept, err)
	}
	if err := m.Release(vm.Label{Name: "n", Image: "i"}); err != nil {
		t.Fatal(err)
	}
	if got := mustExec(e.Context(t), t, m, Shell("exit 8"), nil); got.ExitCode != 8 {
		t.Errorf("after the release: %+v", got.Result)
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	if !errors.Is(m.End(), vm.ErrClosed) {
		t.Errorf("end is %v", m.End())
	}

	other := e.Launcher(t)
	kept, err := other.List(e.Context(t))
	if err != nil || len(kept) != 1 {
		t.Fatalf("kept are %+v, %v", kept, err)
	}
	if k := kept[0]; k.ID != m.ID() || k.Name != "n" || k.Image != "i" || k.MemoryMiB != memoryMiB || k.CPUs != 1 || k.IdleTimeout != time.Hour || k.Created.IsZero() {
		t.Errorf("record is %+v", k)
	}
	first, err := other.Attach(e.Context(t), m.ID())
	if err != nil {
		t.Fatal(err)
	}
	second, err := other.Attach(e.Context(t), m.ID())
	if err != nil {
		t.Fatal(err)
	}
	call := e.inFlight(t, first, "echo ready; sleep 1000")
	if got := mustExec(e.Context(t), t, second, Shell("exit 9"), nil); got.ExitCode != 9 {
		t.Errorf("beside another client: %+v", got.Result)
	}
	if err := second.Stop(e.Context(t), 0); err != nil {
		t.Errorf("stop: %v", err)
	}
	if err := <-call; err == nil {
		t.Error("a program in the stopped guest ended well")
	}
	e.Await(t, first.Done(), "the end of the first handle")
	checkEnd(t, first.End(), bootspec.EndGuest)
	checkEnd(t, second.End(), bootspec.EndGuest)
	e.CheckEmpty(t)
	if _, err := other.Attach(e.Context(t), m.ID()); !errors.Is(err, vm.ErrNotKept) {
		t.Errorf("attach after the end: %v", err)
	}
}

func testIdle(t *testing.T, e *Env) {
	l := e.Launcher(t)
	req := e.Request()
	req.Lifetime, req.IdleTimeout = vm.Detached, time.Second
	m := e.Launch(t, l, req)
	if err := m.Release(vm.Label{}); err != nil {
		t.Fatal(err)
	}
	if got := mustExec(e.Context(t), t, m, Shell("sleep 2"), nil); got.ExitCode != 0 {
		t.Errorf("a call longer than the idle time: %+v", got.Result)
	}
	e.Await(t, m.Done(), "the end by idleness")
	checkEnd(t, m.End(), bootspec.EndKilled, bootspec.EndGuest)
	if kept, err := l.List(e.Context(t)); err != nil || len(kept) != 0 {
		t.Errorf("still listed: %+v, %v", kept, err)
	}
	e.CheckEmpty(t)
}

func testDurableDisk(t *testing.T, e *Env) {
	if !e.RealDisk {
		t.Skip("the guest has no disk of its own here")
	}
	l := e.Launcher(t)
	req := e.Request()
	req.Upper = ShortDir(t) + "/upper.ext4"
	m := e.Launch(t, l, req)
	if got := mustExec(e.Context(t), t, m, Shell("echo remembered > /root-file && rm /bin/cat"), nil); got.ExitCode != 0 {
		t.Fatalf("%+v %q", got.Result, got.stderr)
	}
	if err := m.Stop(e.Context(t), time.Second); err != nil {
		t.Fatal(err)
	}
	again := e.Launch(t, l, req)
	if got := mustExec(e.Context(t), t, again, Shell("read x < /root-file; echo $x; test -e /bin/cat"), nil); got.stdout != "remembered\n" || got.ExitCode != 1 {
		t.Errorf("after a restart: %+v %q %q", got.Result, got.stdout, got.stderr)
	}
	if err := again.Stop(e.Context(t), time.Second); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(req.Upper); err != nil {
		t.Errorf("the durable disk went with the vm: %v", err)
	}
}

func testCrowd(t *testing.T, e *Env) {
	const together = 4
	l := e.launcher(t, vm.Config{MaxBoots: together})
	ctx, cancel := context.WithTimeout(context.Background(), e.Patience*time.Duration(1+e.Crowd/together))
	defer cancel()
	var launches sync.WaitGroup
	for i := range e.Crowd {
		launches.Go(func() {
			m, err := l.Launch(ctx, e.Request())
			if err != nil {
				t.Errorf("vm %d: %v", i, err)
				return
			}
			result, err := m.Guest().Exec(ctx, Shell("exit 17"), guest.IO{})
			if err != nil || result.ExitCode != 17 {
				t.Errorf("vm %d: %+v, %v", i, result, err)
			}
			if err := m.Stop(ctx, 0); err != nil {
				t.Errorf("vm %d: stop: %v", i, err)
			}
		})
	}
	launches.Wait()
	e.CheckEmpty(t)
}
