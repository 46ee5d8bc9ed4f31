package libkrun

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"syscall"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/agentlink"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/shim"
)

// Hypervisor runs libkrun in a child process. Command is required.
type Hypervisor struct {
	// Command is the path and the arguments of the program that calls Enter.
	Command []string
	// Device is KVM's; empty for the usual one.
	Device string
}

var _ shim.Hypervisor = Hypervisor{}

// File descriptors of the child, in the order of exec.Cmd.ExtraFiles.
const (
	fdConsole = 3 + iota
	fdEnv
	fdNetwork // where there is one
)

// StatusRefused is the child's exit status when there was no VM; it has then
// printed why.
const StatusRefused = 125

// Run implements shim.Hypervisor. The child dies with this process, and with the
// context.
func (h Hypervisor) Run(ctx context.Context, spec *bootspec.Spec, dev shim.Devices) bootspec.End {
	_ = dev.Link.Close() // the guest dials instead
	defer closeAll(dev)
	listener, err := listenLink(spec.Dir, func(c net.Conn) { dev.Offer(c) })
	if err != nil {
		return refused(err)
	}
	defer listener.close()
	document, err := json.Marshal(spec.Redacted())
	if err != nil {
		return refused(err)
	}
	// The child reads its spec from here, and ends when it is closed: where the
	// kernel does not end it with its parent, that does.
	input, lifeline, err := os.Pipe()
	if err != nil {
		return refused(err)
	}
	defer func() { _ = lifeline.Close() }()
	defer func() { _ = input.Close() }() // the second time on the way out

	cmd := exec.CommandContext(ctx, h.Command[0], h.Command[1:]...)
	// libkrun names its thread by HOSTNAME, for ps.
	cmd.Env = []string{"HOSTNAME=" + spec.ID, "RUST_BACKTRACE=0"}
	cmd.Dir = spec.Dir
	cmd.Stdin, cmd.Stdout, cmd.Stderr = input, dev.Log, dev.Log
	cmd.ExtraFiles = []*os.File{fdConsole - 3: dev.Console, fdEnv - 3: dev.Env}
	if spec.Guest.Interface != nil {
		cmd.ExtraFiles = append(cmd.ExtraFiles, dev.Network)
	}
	cmd.SysProcAttr = childAttributes()

	// The kernel kills the child when the thread that forked it ends, so this
	// goroutine keeps its thread until the child is gone.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := cmd.Start(); err != nil {
		if ctx.Err() != nil {
			return bootspec.End{Class: bootspec.EndKilled, Message: "libkrun was not started any more", ExitCode: -1}
		}
		return refused(err)
	}
	dev.Started(cmd.Process.Pid)
	// The child has its own now; ours would hide its end.
	closeAll(dev)
	_ = input.Close() // so that a child that does not read breaks the pipe
	// A document is longer than a pipe only by a strange spec; the child reads.
	_, _ = lifeline.Write(append(document, '\n')) // one that is gone has said why
	_ = cmd.Wait()                                // the outcome is in ProcessState
	end := ended(cmd.ProcessState)
	if ctx.Err() != nil && end.Signal == int(syscall.SIGKILL) {
		end.Class, end.Message = bootspec.EndKilled, "libkrun was killed"
	}
	return end
}

func refused(err error) bootspec.End {
	return bootspec.End{Class: bootspec.EndRefused, Message: "libkrun was not started: " + err.Error(), ExitCode: -1}
}

func closeAll(dev shim.Devices) {
	for _, f := range []*os.File{dev.Console, dev.Env, dev.Log, dev.Network} {
		_ = f.Close() // the second time on the way out; a network is not always there
	}
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
	case StatusRefused:
		end.Class, end.Message = bootspec.EndRefused, "libkrun did not start the VM"
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
