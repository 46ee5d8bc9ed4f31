package shimdriver_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/guest"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/proc"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/vmtest"
)

// afterDeath is within what time a VM must be gone after one of its processes
// was killed.
const afterDeath = 5 * time.Second

// matrix is the VMM whose processes are killed.
type matrix struct {
	vmm  string
	host *vmtest.Host
	open func(t testing.TB) *vmtest.Env
	// process begins the name that the VMM's process has, empty for any.
	process string
	// entered begins the name that one of its threads has once it runs the guest.
	entered string
	// noAgent is what a guest ends with whose agent was killed.
	noAgent deadGuest
}

// deadGuest is how a guest's end is reported.
type deadGuest struct {
	class bootspec.EndClass
	cause string
}

// Every process of a VM, killed at every step: the VM is gone with all it had, the
// error tells why, and the next VM works.
func TestKillMatrixOnQEMU(t *testing.T) {
	host := vmtest.QEMU(t)
	open := func(t testing.TB) *vmtest.Env { return qemuEnv(t, host, nil) }
	matrix{
		vmm: bootspec.QEMU, host: host, open: open, process: "qemu-system", entered: "qemu-system",
		noAgent: deadGuest{bootspec.EndCrashed, "Attempted to kill init"},
	}.run(t)
}

func TestKillMatrixOnLibkrun(t *testing.T) {
	host := vmtest.Libkrun(t)
	open := func(t testing.TB) *vmtest.Env { return libkrunEnv(t, host) }
	matrix{
		vmm: bootspec.Libkrun, host: host, open: open, entered: "fc_vcpu",
		// The kernel of libkrunfw restarts when PID 1 dies and says nothing, where
		// others panic.
		noAgent: deadGuest{bootspec.EndCrashed, "ended without its agent"},
	}.run(t)
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
		select {
		case <-w.started: // of a boot that is repeated
		default:
		}
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

// familyOf waits until the shim has a child with the VMM's name. A child with the
// shim's own command line is none yet, or a probe of Go's.
func (x matrix) familyOf(t testing.TB, shim int) family {
	t.Helper()
	f := family{shim: identify(t, shim)}
	vmtest.Eventually(t, patience, "start of the VMM", func() bool {
		for _, pid := range children(shim) {
			names := threads(pid)
			if len(names) == 0 || !strings.HasPrefix(names[0], x.process) || bytes.Equal(commandLine(pid), commandLine(shim)) {
				continue
			}
			var err error
			f.vmm, err = proc.Identify(pid)
			return err == nil
		}
		return false
	})
	return f
}

// commandLine is a process's; empty when it is gone.
func commandLine(pid int) []byte {
	line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return line
}

// threads are the names of a process's threads, the main one first; none when the
// process is gone.
func threads(pid int) []string {
	var names []string
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/comm", pid))
	main := fmt.Sprintf("/proc/%d/comm", pid)
	for _, file := range append([]string{main}, files...) {
		if name, err := os.ReadFile(file); err == nil {
			names = append(names, strings.TrimSpace(string(name)))
		}
	}
	return names
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
	var early error
	vmtest.Eventually(t, patience, "step "+step, func() bool {
		select {
		case early = <-failed:
			return true
		default:
		}
		switch step {
		case "entered":
			return slices.ContainsFunc(threads(f.vmm.PID), func(name string) bool { return strings.HasPrefix(name, x.entered) })
		case "printed":
			info, err := os.Stat(e.Roots.Machine(req.ID).Console())
			return err == nil && info.Size() > 0
		}
		return true
	})
	if early != nil {
		t.Fatalf("the boot ended before it was killed: %v", early)
	}
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
	for name, tt := range map[string]struct {
		script string
		deadGuest
	}{
		"kernel": {"echo c > /proc/sysrq-trigger", deadGuest{bootspec.EndCrashed, "sysrq triggered crash"}},
		// The agent's own code is overwritten: PID 1 dies of it.
		"agent": {
			`addr=$(head -n 1 /proc/1/maps | cut -d- -f1); dd if=/dev/zero of=/proc/1/mem bs=4096 seek=$((0x$addr / 4096)) count=2000 conv=notrunc`,
			x.noAgent,
		},
	} {
		t.Run(name, func(t *testing.T) {
			e := x.open(t)
			m, f := x.launch(t, e)
			if name == "kernel" && run(t, e, m, "test -e /proc/sysrq-trigger || echo none") != "" {
				t.Skip("SKIPPED: this guest's kernel has no sysrq to crash it with")
			}
			call := inFlight(t, e, m, "echo ready; read seen; exec 2>&1; "+tt.script+"; sleep 1000")
			f.checkGone(t, e)
			err := <-call
			var end *vm.EndError
			if !errors.As(err, &end) || end.End.Class != tt.class {
				t.Fatalf("error is %v, want an end of class %s", err, tt.class)
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
