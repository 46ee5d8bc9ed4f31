package shimdriver_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/guest"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/proc"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/shimdriver"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/vmtest"
)

// afterDeath is within what time a VM must be gone after one of its processes
// was killed.
const afterDeath = 5 * time.Second

// The test binary plays the adapter that gets killed: see matrix.adapter.
func TestMain(m *testing.M) {
	vmtest.PlayGuest()
	vmtest.PlayClient()
	if os.Getenv("VMTEST_ADAPTER") != "" {
		adapterMain()
	}
	os.Exit(m.Run())
}

// matrix is the VMM whose processes are killed.
type matrix struct {
	vmm  string
	host *vmtest.Host
	open func(t testing.TB) *vmtest.Env
	// process begins the name that the VMM's process has, empty for any.
	process string
	// entered begins the name that it has once it runs the guest.
	entered string
}

// Every process of a VM, killed at every step: the VM is gone with all it had, the
// error tells why, and the next VM works.
func TestKillMatrixOnQEMU(t *testing.T) {
	host := vmtest.QEMU(t)
	open := func(t testing.TB) *vmtest.Env { return qemuEnv(t, host, nil) }
	matrix{vmm: bootspec.QEMU, host: host, open: open, process: "qemu-system", entered: "qemu-system"}.run(t)
}

func TestKillMatrixOnLibkrun(t *testing.T) {
	host := vmtest.Libkrun(t)
	open := func(t testing.TB) *vmtest.Env { return libkrunEnv(t, host) }
	matrix{vmm: bootspec.Libkrun, host: host, open: open, entered: "VM:"}.run(t)
}

func (x matrix) run(t *testing.T) {
	t.Run("WhileItBoots", x.whileItBoots)
	t.Run("WhileItRuns", x.whileItRuns)
	t.Run("DeadGuest", x.deadGuest)
	t.Run("Adapter", x.adapter)
}

// victim is one of the two processes of a VM.
type victim string

const (
	victimShim victim = "shim"
	victimVMM  victim = "VMM"
)

// watched is a driver that shows the processes it starts.
type watched struct {
	vm.Driver
	started chan vm.Process
}

func (w *watched) Start(ctx context.Context, spec *bootspec.Spec, lock *os.File) (vm.Process, error) {
	p, err := w.Driver.Start(ctx, spec, lock)
	if err == nil {
		w.started <- p
	}
	return p, err
}

// family is the processes of one VM.
type family struct{ shim, vmm proc.Identity }

func identify(t testing.TB, pid int) proc.Identity {
	t.Helper()
	id, err := proc.Identify(pid)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// familyOf waits until the shim has a child with the VMM's name.
func (x matrix) familyOf(t testing.TB, shim int) family {
	t.Helper()
	f := family{shim: identify(t, shim)}
	vmtest.Eventually(t, patience, "start of the VMM", func() bool {
		for _, pid := range children(shim) {
			if name, err := comm(pid); err == nil && strings.HasPrefix(name, x.process) {
				f.vmm = identify(t, pid)
				return true
			}
		}
		return false
	})
	return f
}

// comm is the name of a process's main thread.
func comm(pid int) (string, error) {
	name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	return strings.TrimSpace(string(name)), err
}

func children(pid int) []int {
	var found []int
	tasks, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	for _, task := range tasks {
		list, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/children", pid, task.Name()))
		for field := range strings.FieldsSeq(string(list)) {
			if child, err := strconv.Atoi(field); err == nil {
				found = append(found, child)
			}
		}
	}
	return found
}

func (f family) kill(t testing.TB, v victim) {
	t.Helper()
	id := f.shim
	if v == victimVMM {
		id = f.vmm
	}
	if err := id.Kill(); err != nil {
		t.Errorf("kill %s: %v", v, err)
	}
}

// checkGone fails unless in time no process, directory or socket is left.
func (f family) checkGone(t testing.TB, e *vmtest.Env) {
	t.Helper()
	vmtest.Eventually(t, afterDeath, "end of the VM's processes", func() bool { return !f.shim.Alive() && !f.vmm.Alive() })
	vmtest.Eventually(t, afterDeath, "removal of the VM's files", func() bool { return len(e.Leftovers(t)) == 0 })
}

// checkNext fails unless the next launch works.
func checkNext(t testing.TB, e *vmtest.Env) {
	t.Helper()
	m := e.Launch(t, e.Launcher(t), e.Request())
	if got := run(t, e, m, "echo $((6*7))"); got != "42\n" {
		t.Errorf("the next VM says %q", got)
	}
	if err := m.Kill(); err != nil {
		t.Error(err)
	}
	e.CheckEmpty(t)
}

// bootSteps are until when a boot goes on before it is killed.
var bootSteps = []string{"started", "entered", "printed"} //nolint:gochecknoglobals // a table

func (x matrix) whileItBoots(t *testing.T) {
	for _, v := range []victim{victimShim, victimVMM} {
		for _, step := range bootSteps {
			t.Run(fmt.Sprintf("%s/%s", v, step), func(t *testing.T) { x.killedBoot(t, v, step) })
		}
	}
}

func (x matrix) killedBoot(t *testing.T, v victim, step string) {
	e := x.open(t)
	driver := &watched{Driver: e.Driver, started: make(chan vm.Process, 1)}
	during := *e
	during.Driver = driver
	failed := make(chan error, 1)
	req := e.Request()
	req.ID = "victim"
	go func() {
		m, err := during.Launcher(t).Launch(e.Context(t), req)
		if err == nil {
			// It was up before it could be killed.
			<-m.Done()
			err = m.End()
		}
		failed <- err
	}()
	f := x.familyOf(t, (<-driver.started).PID())
	vmtest.Eventually(t, patience, "step "+step, func() bool {
		switch step {
		case "entered":
			name, err := comm(f.vmm.PID)
			return err == nil && strings.HasPrefix(name, x.entered)
		case "printed":
			info, err := os.Stat(e.Roots.Machine(req.ID).Console())
			return err == nil && info.Size() > 0
		}
		return true
	})
	f.kill(t, v)
	err := <-failed
	f.checkGone(t, e)
	var boot *vm.BootError
	var end *vm.EndError
	if !errors.As(err, &boot) && !errors.As(err, &end) || !strings.Contains(err.Error(), "SIGKILL") {
		t.Fatalf("error is %v, want one that names SIGKILL", err)
	}
	if step == "printed" {
		var tails vm.Tails
		if boot != nil {
			tails = boot.Tails
		} else {
			tails = end.Tails
		}
		if console := tails.Console; console == "" || !strings.HasSuffix(err.Error(), lastLine(console)) {
			t.Errorf("the error does not end with the console: %v", err)
		}
	}
	checkNext(t, e)
}

func lastLine(text string) string {
	lines := strings.Split(text, "\n")
	return lines[len(lines)-1]
}

func (x matrix) whileItRuns(t *testing.T) {
	e := x.open(t)
	for _, v := range []victim{victimShim, victimVMM} {
		for _, during := range []string{"exec", "stop"} {
			t.Run(string(v)+"/"+during, func(t *testing.T) {
				m, f := x.launch(t, e)
				call := inFlight(t, e, m, "trap '' TERM; echo ready; while :; do sleep 1; done")
				stopped := make(chan error, 1)
				if during == "stop" {
					go func() { stopped <- m.Stop(e.Context(t), 30*time.Second) }()
					vmtest.Eventually(t, patience, "begin of the shutdown", func() bool {
						_, err := m.Guest().Hello(e.Context(t), "vmtest")
						return err != nil
					})
				}
				f.kill(t, v)
				f.checkGone(t, e)
				err := <-call
				var end *vm.EndError
				if !errors.As(err, &end) || end.End.Class != bootspec.EndKilled || !strings.Contains(err.Error(), "SIGKILL") {
					t.Errorf("the call in flight: %v", err)
				}
				if end != nil && !strings.Contains(end.Tails.Console, "agent") {
					t.Errorf("the console's tail is %q", end.Tails.Console)
				}
				if during == "stop" {
					if err := <-stopped; err != nil {
						t.Errorf("stop: %v", err)
					}
				}
			})
		}
	}
	checkNext(t, e)
}

// launch boots a VM and finds its processes.
func (x matrix) launch(t *testing.T, e *vmtest.Env) (*vm.Machine, family) {
	t.Helper()
	driver := &watched{Driver: e.Driver, started: make(chan vm.Process, 1)}
	during := *e
	during.Driver = driver
	m := e.Launch(t, during.Launcher(t), e.Request())
	return m, x.familyOf(t, (<-driver.started).PID())
}

// inFlight starts a program and returns when it has printed something, which the
// program can wait for by reading a line.
func inFlight(t *testing.T, e *vmtest.Env, m *vm.Machine, script string) <-chan error {
	t.Helper()
	first := &firstByte{seen: make(chan struct{})}
	ended := make(chan error, 1)
	go func() {
		_, err := m.Guest().Exec(e.Context(t), vmtest.Shell(script), guest.IO{Stdin: first, Stdout: first})
		ended <- err
	}()
	e.Await(t, first.seen, "output of the program")
	return ended
}

// firstByte is a writer that tells of the first byte, and a reader that has a line
// from then on.
type firstByte struct {
	seen chan struct{}
	done bool
	told bool
}

func (f *firstByte) Read(p []byte) (int, error) {
	<-f.seen
	if f.told {
		return 0, io.EOF
	}
	f.told = true
	return copy(p, "\n"), nil
}

func (f *firstByte) Write(p []byte) (int, error) {
	if !f.done {
		f.done = true
		close(f.seen)
	}
	return len(p), nil
}

func (x matrix) deadGuest(t *testing.T) {
	for name, tt := range map[string]struct{ script, cause string }{
		"kernel": {"echo c > /proc/sysrq-trigger", "sysrq triggered crash"},
		// The agent's own code is overwritten: PID 1 dies of it.
		"agent": {
			`addr=$(head -n 1 /proc/1/maps | cut -d- -f1); dd if=/dev/zero of=/proc/1/mem bs=4096 seek=$((0x$addr / 4096)) count=2000 conv=notrunc`,
			"Attempted to kill init",
		},
	} {
		t.Run(name, func(t *testing.T) {
			e := x.open(t)
			m, f := x.launch(t, e)
			call := inFlight(t, e, m, "echo ready; read seen; exec 2>&1; "+tt.script+"; sleep 1000")
			f.checkGone(t, e)
			err := <-call
			var end *vm.EndError
			if !errors.As(err, &end) || end.End.Class != bootspec.EndCrashed {
				t.Fatalf("error is %v, want the vm's crash", err)
			}
			// The trace behind the line that tells why may fill the tail.
			if !strings.Contains(end.End.Message, tt.cause) {
				t.Errorf("the error does not tell why: %v", err)
			}
			if end.Tails.Console == "" || !strings.HasSuffix(err.Error(), lastLine(end.Tails.Console)) {
				t.Errorf("the error does not end with the console: %v", err)
			}
			checkNext(t, e)
		})
	}
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
