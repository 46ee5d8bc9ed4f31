package libkrun

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/agentlink"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/cleanup"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/krun"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/shim"
)

// Hypervisor runs libkrun in a child process. Command is required.
type Hypervisor struct {
	// Command is the path of a program with krun's child; krun.ChildCommand is its
	// argument.
	Command string
	// Confine makes the ruleset that the child takes on; nil, and a nil ruleset,
	// for none.
	Confine func(*bootspec.Spec) (*Ruleset, error)
	// Device is KVM's; empty for the usual one.
	Device string
}

// Ruleset is one of Landlock. Run closes the file.
type Ruleset struct {
	File  *os.File
	Flags uint32
}

var _ shim.Hypervisor = Hypervisor{}

// Run implements shim.Hypervisor. The child dies with this process, and with the
// context.
func (h Hypervisor) Run(ctx context.Context, spec *bootspec.Spec, dev shim.Devices) bootspec.End {
	var undo cleanup.Stack
	defer func() { _ = undo.Run() }() // there is nothing to lose
	for _, f := range []*os.File{dev.Console, dev.Env, dev.Log, dev.Network} {
		if f != nil {
			undo.Add(f.Close)
		}
	}
	_ = dev.Link.Close() // the guest dials instead
	listener, err := listenLink(spec.Dir, func(c net.Conn) { dev.Offer(c) })
	if err != nil {
		return refused(err)
	}
	defer listener.close()
	child, err := h.newChild(ctx, spec, dev, &undo)
	if err != nil {
		return refused(err)
	}
	defer child.close()

	// The kernel kills the child when the thread that forked it ends, so this
	// goroutine keeps its thread until the child is gone.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := child.cmd.Start(); err != nil {
		if ctx.Err() != nil {
			return bootspec.End{Class: bootspec.EndKilled, Message: "libkrun was not started any more", ExitCode: -1}
		}
		return refused(err)
	}
	dev.Started(child.cmd.Process.Pid)
	// The child has its own now; ours would hide its end.
	_ = undo.Run()
	_, _ = child.list.WriteTo(child.lifeline) // one that is gone has said why
	if err := child.calls.Refusal(child.wait()); err != nil {
		return bootspec.End{Class: bootspec.EndRefused, Message: "libkrun did not start the VM: " + err.Error(), ExitCode: child.cmd.ProcessState.ExitCode()}
	}
	end := ended(child.cmd.ProcessState)
	if ctx.Err() != nil && end.Signal == int(syscall.SIGKILL) {
		end.Class, end.Message = bootspec.EndKilled, "libkrun was killed"
	}
	return end
}

// child is the process of a VM, before its start.
type child struct {
	cmd   *exec.Cmd
	calls *krun.Sequence
	list  bytes.Buffer // of the calls, as the child reads it
	// lifeline carries the list to the child, which ends when it is closed: where
	// the kernel does not end it with its parent, that does. report comes back.
	lifeline, report *os.File
}

// reportWait bounds the wait for the end of a child's report that somebody else
// holds open: a VMM that its guest has taken over may leave a process behind.
const reportWait = time.Second

// wait returns when the child is gone, with its report.
func (c *child) wait() []byte {
	report := make(chan []byte, 1)
	go func() {
		said, _ := io.ReadAll(io.LimitReader(c.report, krun.MaxReport))
		report <- said
	}()
	_ = c.cmd.Wait() // the outcome is in ProcessState
	_ = c.report.SetReadDeadline(time.Now().Add(reportWait))
	return <-report
}

func (c *child) close() {
	_ = errors.Join(c.lifeline.Close(), c.report.Close()) // there is nothing to lose
}

// newChild adds the files to undo that are closed once the child has them.
func (h Hypervisor) newChild(ctx context.Context, spec *bootspec.Spec, dev shim.Devices, undo *cleanup.Stack) (*child, error) {
	var c child
	var ruleset *Ruleset
	var confinement *os.File
	if h.Confine != nil {
		var err error
		if ruleset, err = h.Confine(spec); err != nil {
			return nil, err
		}
	}
	if ruleset != nil {
		confinement = ruleset.File
		undo.Add(confinement.Close)
	}
	c.calls = Calls(spec, ruleset)
	if _, err := c.calls.WriteTo(&c.list); err != nil {
		return nil, err
	}
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		return nil, err
	}
	undo.Add(null.Close)
	input, lifeline, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	undo.Add(input.Close)
	report, said, err := os.Pipe()
	if err != nil {
		_ = lifeline.Close() // nothing was written
		return nil, err
	}
	undo.Add(said.Close)
	c.lifeline, c.report = lifeline, report

	c.cmd = exec.CommandContext(ctx, h.Command, krun.ChildCommand)
	// libkrun names its thread by HOSTNAME, for ps.
	c.cmd.Env = []string{"HOSTNAME=" + spec.ID, "RUST_BACKTRACE=0"}
	c.cmd.Dir = spec.Dir
	c.cmd.Stdin, c.cmd.Stdout, c.cmd.Stderr = input, dev.Log, dev.Log
	c.cmd.ExtraFiles = []*os.File{
		fdConsole - 3: dev.Console, fdEnv - 3: dev.Env, fdReport - 3: said, fdNull - 3: null,
		fdRuleset - 3: confinement, fdNetwork - 3: dev.Network,
	}
	c.cmd.SysProcAttr = childAttributes()
	return &c, nil
}

func refused(err error) bootspec.End {
	return bootspec.End{Class: bootspec.EndRefused, Message: "libkrun was not started: " + err.Error(), ExitCode: -1}
}

// ended classifies the exit of the VMM. libkrun exits with what the guest told
// it, or with 0, however the guest ended. Only the agent tells it something; a
// program of the guest that does so too lies about its own VM alone.
func ended(state *os.ProcessState) bootspec.End {
	status, ok := state.Sys().(syscall.WaitStatus)
	if !ok {
		return bootspec.End{Class: bootspec.EndCrashed, Message: "libkrun ended: " + state.String(), ExitCode: -1}
	}
	if status.Signaled() {
		return signalled(status.Signal())
	}
	end := bootspec.End{ExitCode: status.ExitStatus()}
	switch end.ExitCode {
	case 0, agentlink.StatusNoAgent:
		end.Class, end.Message = bootspec.EndGuest, "libkrun ended"
	default:
		end.Class, end.Message = bootspec.EndCrashed, fmt.Sprintf("libkrun ended with status %d", end.ExitCode)
	}
	return end
}

func signalled(sig syscall.Signal) bootspec.End {
	end := bootspec.End{Class: bootspec.EndCrashed, ExitCode: -1, Signal: int(sig)}
	switch sig {
	case syscall.SIGKILL:
		end.Class = bootspec.EndKilled
		end.Message = "libkrun was killed by SIGKILL: by somebody, or by the kernel when memory ran out (see dmesg)"
	case syscall.SIGABRT:
		end.Message = "libkrun gave up (SIGABRT)"
	default:
		end.Message = fmt.Sprintf("libkrun crashed: signal %d (%v)", int(sig), sig)
	}
	return end
}
