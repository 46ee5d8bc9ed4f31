package qemu

import (
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/shim"
)

// Hypervisor runs QEMU. The zero value is ready.
type Hypervisor struct {
	// Wrap, where set, returns what is put before QEMU's command line: path and
	// arguments of a program that confines itself and then executes the rest in
	// its own place, so that the process stays the shim's child.
	Wrap func(*bootspec.Spec) []string
}

var _ shim.Hypervisor = Hypervisor{}

// Check implements shim.Hypervisor.
func (Hypervisor) Check(spec *bootspec.Spec) error {
	q := spec.QEMU
	var errs []error
	if _, err := Args(spec); err != nil {
		errs = append(errs, err)
	}
	for _, f := range []struct{ name, path, fix string }{
		{"qemu.kernel", q.Kernel, "run `adapter vmm setup`, or name a kernel with III_VM_KERNEL"},
		{"qemu.initramfs", q.Initramfs, "run `adapter vmm setup`"},
	} {
		if err := checkReadable(f.path); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w: %s", f.name, err, f.fix))
		}
	}
	if len(errs) == 0 && q.Machine != machineVirt {
		if err := checkVMLinux(q.Kernel); err != nil {
			errs = append(errs, fmt.Errorf("qemu.kernel: %w", err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return bootspec.End{Class: bootspec.EndBadSpec, Message: strings.ReplaceAll(err.Error(), "\n", "; ")}
	}
	info, err := os.Stat(q.Binary)
	if err == nil && (!info.Mode().IsRegular() || info.Mode().Perm()&0o111 == 0) {
		err = fmt.Errorf("%s is not an executable file", q.Binary)
	}
	if err != nil {
		return fmt.Errorf("qemu.binary: %w: install qemu-system (Debian: qemu-system-x86 or qemu-system-arm), or name it with III_QEMU", err)
	}
	return nil
}

func checkReadable(path string) error {
	file, err := openRegular(path)
	if err != nil {
		return err
	}
	return file.Close()
}

// openRegular opens a file to read it.
func openRegular(path string) (*os.File, error) {
	// O_NONBLOCK: a fifo must be refused, not waited for.
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	info, err := file.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file", path)
	}
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

// checkVMLinux refuses what QEMU would boot slowly or not at all: it enters an
// ELF image directly only where it has the note of the PVH protocol.
func checkVMLinux(path string) error {
	image, err := elf.Open(path)
	if err != nil {
		return fmt.Errorf("%s is not an uncompressed kernel (vmlinux): %w", path, err)
	}
	defer func() { _ = image.Close() }()
	if image.Machine != elf.EM_X86_64 {
		return fmt.Errorf("%s is a kernel for %v, not for x86-64", path, image.Machine)
	}
	return nil
}

// Run implements shim.Hypervisor. QEMU dies with this process, and with the
// context. A snapshot that is not there or does not fit is no error: the VM
// boots without it.
func (h Hypervisor) Run(ctx context.Context, spec *bootspec.Spec, dev shim.Devices) bootspec.End {
	defer closeAll(dev)
	if spec.QEMU.Snapshot != "" {
		if end, resumed := h.resume(ctx, spec, dev); resumed {
			return end
		}
		cold, q := *spec, *spec.QEMU
		q.Snapshot = ""
		cold.QEMU = &q
		spec = &cold
	}
	cmd, failed := h.command(ctx, spec, dev)
	if failed != nil {
		return *failed
	}
	// QEMU has its own once it runs; ours would hide its end.
	return run(ctx, cmd, dev, func() { closeAll(dev) })
}

// command is QEMU with its files, not started.
func (h Hypervisor) command(ctx context.Context, spec *bootspec.Spec, dev shim.Devices) (*exec.Cmd, *bootspec.End) {
	args, err := Args(spec)
	if err != nil {
		return nil, &bootspec.End{Class: bootspec.EndBadSpec, Message: err.Error(), ExitCode: -1}
	}
	argv := append([]string{spec.QEMU.Binary}, args...)
	if h.Wrap != nil {
		argv = append(h.Wrap(spec), argv...)
	}
	// Its kill goes to a process handle (pidfd) where the kernel has one; a child
	// that is not reaped keeps its number anyway.
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env = []string{} // nothing of ours is QEMU's business
	cmd.Stdout, cmd.Stderr = dev.Log, dev.Log
	cmd.ExtraFiles = []*os.File{fdConsole - 3: dev.Console, fdLink - 3: dev.Link, fdEnv - 3: dev.Env}
	if spec.Guest.Interface != nil {
		cmd.ExtraFiles = append(cmd.ExtraFiles, dev.Network)
	}
	cmd.SysProcAttr = dieWithParent()
	return cmd, nil
}

// run runs QEMU to its end; started is called when it runs.
func run(ctx context.Context, cmd *exec.Cmd, dev shim.Devices, started func()) bootspec.End {
	// The kernel kills the child when the thread that forked it ends, so this
	// goroutine keeps its thread until the child is gone. The lock is undone
	// last, and the thread lives on.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := cmd.Start(); err != nil {
		if ctx.Err() != nil {
			return bootspec.End{Class: bootspec.EndKilled, Message: "QEMU was not started any more", ExitCode: -1}
		}
		return bootspec.End{Class: bootspec.EndRefused, Message: "QEMU did not start: " + err.Error(), ExitCode: -1}
	}
	dev.Started(cmd.Process.Pid)
	started()
	_ = cmd.Wait() // the outcome is in ProcessState
	end := ended(cmd.ProcessState)
	if ctx.Err() != nil && end.Signal == int(syscall.SIGKILL) {
		end.Class, end.Message = bootspec.EndKilled, "QEMU was killed"
	}
	return end
}

func closeAll(dev shim.Devices) {
	for _, f := range []*os.File{dev.Console, dev.Link, dev.Env, dev.Log, dev.Network} {
		_ = f.Close() // the second time on the way out; a network is not always there
	}
}

// ended classifies QEMU's exit. Told to end by SIGTERM, SIGINT or SIGHUP, QEMU
// exits with 0 as after an orderly end.
func ended(state *os.ProcessState) bootspec.End {
	status, ok := state.Sys().(syscall.WaitStatus)
	switch {
	case !ok:
		return bootspec.End{Class: bootspec.EndCrashed, Message: "QEMU ended: " + state.String(), ExitCode: -1}
	case status.Signaled():
		return signalled(status.Signal())
	case status.ExitStatus() == 0:
		return bootspec.End{Class: bootspec.EndGuest, Message: "QEMU ended"}
	default:
		return bootspec.End{
			Class: bootspec.EndCrashed, ExitCode: status.ExitStatus(),
			Message: fmt.Sprintf("QEMU ended with status %d", status.ExitStatus()),
		}
	}
}

func signalled(sig syscall.Signal) bootspec.End {
	end := bootspec.End{Class: bootspec.EndCrashed, ExitCode: -1, Signal: int(sig)}
	switch sig {
	case syscall.SIGKILL:
		end.Class = bootspec.EndKilled
		end.Message = "QEMU was killed by SIGKILL: by somebody, or by the kernel when memory ran out (see dmesg)"
	case syscall.SIGSYS:
		end.Message = "QEMU's seccomp sandbox stopped it (SIGSYS): report it with the VMM's version"
	default:
		end.Message = fmt.Sprintf("QEMU crashed: signal %d (%v)", int(sig), sig)
	}
	return end
}
