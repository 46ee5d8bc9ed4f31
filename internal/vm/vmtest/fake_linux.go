package vmtest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/shim"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
)

// Step is a point in the life of a fake machine.
type Step string

// The steps, in their order.
const (
	// StepStart: the machine is powered on, nothing has happened yet.
	StepStart Step = "start"
	// StepEnv: the agent has read its environment.
	StepEnv Step = "env"
	// StepLink: the link is there and not yet greeted on.
	StepLink Step = "link"
	// StepServe: the greeting was accepted, the agent is about to serve.
	StepServe Step = "serve"
)

// Steps lists all steps.
func Steps() []Step { return []Step{StepStart, StepEnv, StepLink, StepServe} }

// Fake is a vm.Driver in which only the machine is missing: the real shim runs
// in this process, and the real agent behind the shim's end of the wires, with
// environment frame, resync and greeting. Programs run on this host, as this
// user. The fields are set before its use.
type Fake struct {
	// Log is required.
	Log *slog.Logger
	// PrepareHook, where set, may refuse a request.
	PrepareHook func(*bootspec.Spec) error
	// StepHook, where set, is called at each step. It may return an end, which
	// the machine then comes to, or wait for the context's end, as a guest that
	// hangs does.
	StepHook func(context.Context, Step) *bootspec.End
	// Token, where set, is what the agent greets with instead of its own.
	Token string
	// Old makes the agent one of an older build, which knew no files.
	Old bool
}

// Fake is a driver.
var _ vm.Driver = (*Fake)(nil)

// Hypervisor is the machine of a Fake alone, for a shim in another process.
func (f *Fake) Hypervisor() shim.Hypervisor { return &fakeMachine{fake: f} }

// Prepare makes a file for the upper that is none.
func (f *Fake) Prepare(_ context.Context, spec *bootspec.Spec) error {
	switch spec.VMM {
	case "", bootspec.Libkrun:
		spec.VMM = bootspec.Libkrun
	default:
		return fmt.Errorf("vmm %q: the fake is none", spec.VMM)
	}
	if _, err := os.Stat(spec.Lower.Path); err != nil {
		return err
	}
	if f.PrepareHook != nil {
		if err := f.PrepareHook(spec); err != nil {
			return err
		}
	}
	return os.WriteFile(spec.Upper.Path, make([]byte, 4096), 0o600)
}

// Start runs a shim in this process.
func (f *Fake) Start(ctx context.Context, spec *bootspec.Spec, lock *os.File) (vm.Process, error) {
	fd, err := unix.FcntlInt(lock.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	lifelineR, lifelineW, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	log, err := os.OpenFile(spec.Dir+"/shim.log", os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return nil, errors.Join(err, unix.Close(fd), lifelineR.Close(), lifelineW.Close())
	}
	life, kill := context.WithCancelCause(context.WithoutCancel(ctx))
	p := &fakeProcess{kill: kill, lifeline: lifelineW, done: make(chan struct{})}
	ready := &signal{c: make(chan struct{})}
	go func() {
		defer close(p.done)
		p.end = shim.Run(life, spec, shim.Options{
			Hypervisor: &fakeMachine{fake: f}, Version: "vmtest",
			Log:      slog.New(slog.NewTextHandler(io.MultiWriter(log, logWriter{f.Log}), nil)),
			VMMLog:   log,
			Lifeline: lifelineR, Ready: ready, Lock: os.NewFile(uintptr(fd), lock.Name()),
		})
		kill(nil)
		p.mu.Lock()
		defer p.mu.Unlock()
		_ = lifelineW.Close()
		_ = log.Close()
	}()
	select {
	case <-ready.c:
		return p, nil
	case <-p.done:
		return nil, p.end
	case <-ctx.Done():
		err := p.Kill()
		<-p.done
		return nil, errors.Join(context.Cause(ctx), err)
	}
}

// logWriter repeats the shim's log in the test's.
type logWriter struct{ log *slog.Logger }

func (w logWriter) Write(p []byte) (int, error) {
	w.log.Debug("shim", "output", string(p))
	return len(p), nil
}

// signal closes c at the first byte.
type signal struct {
	once sync.Once
	c    chan struct{}
}

func (s *signal) Write(p []byte) (int, error) {
	s.once.Do(func() { close(s.c) })
	return len(p), nil
}

func (s *signal) Close() error { return nil }

// fakeProcess is the vm.Process of a shim in this process.
type fakeProcess struct {
	kill context.CancelCauseFunc
	done chan struct{}
	end  bootspec.End // valid once done is closed

	mu       sync.Mutex
	lifeline *os.File
}

func (p *fakeProcess) PID() int              { return 0 }
func (p *fakeProcess) Done() <-chan struct{} { return p.done }
func (p *fakeProcess) End() bootspec.End     { return p.end }

func (p *fakeProcess) Kill() error {
	p.kill(bootspec.End{Class: bootspec.EndKilled, Message: "it was killed by its launcher", ExitCode: -1})
	return nil
}

func (p *fakeProcess) Release() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, err := p.lifeline.Write([]byte{'D'})
	return err
}
