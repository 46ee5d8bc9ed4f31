// Package l1 boots a machine with hardware virtualization on hosts that have none:
// QEMU emulates AMD's (SVM), and a Debian kernel in it has a /dev/kvm that works, in
// which real guests of libkrun run some ten times slower than on hardware. For
// Linux on x86-64.
package l1

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/vmassets"
)

// statusMark begins the line in which the machine tells the command's status.
const statusMark = "l1: status "

// kvm are the kernel's modules that give the machine its /dev/kvm.
func kvm() []string {
	return []string{"virt/lib/irqbypass.ko", "arch/x86/kvm/kvm.ko", "arch/x86/kvm/kvm-amd.ko"}
}

// Machine is what runs. Its fields are set before Run.
type Machine struct {
	// Cache keeps Debian's packages and the machine's files.
	Cache string
	// Files are in the machine by the name that is the key, without a slash at the
	// front, with the libraries that they need; Trees are directories likewise.
	Files, Trees map[string]string
	// Modules are kernel modules besides kvm's, named from the kernel's directory.
	Modules []string
	// Env is the command's environment, besides PATH (/opt:/bin) and HOME; no value
	// has a quote.
	Env map[string]string
	// Command is a shell script. It runs as root in /tmp, a tmpfs.
	Command string
	// MemoryMiB is the machine's memory.
	MemoryMiB int
	// Timeout bounds the whole.
	Timeout time.Duration
	// Terminal connects the command to this process's terminal; its status is not
	// told then.
	Terminal bool
}

// KernelLog is the file in Cache with what the kernel of the machine that ended
// last printed.
const KernelLog = "kernel.log"

// Run boots the machine, prints on out what its command prints, and returns the
// command's status. QEMU is III_QEMU or what is on PATH. An error has the end of
// the kernel's log.
func (m *Machine) Run(ctx context.Context, out io.Writer) (int, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, m.Timeout, fmt.Errorf("it was not done after %v", m.Timeout))
	defer cancel()
	debian, err := fetchDebian(ctx, m.Cache, append(kvm(), m.Modules...))
	if err != nil {
		return 0, err
	}
	anchor, err := m.build(ctx)
	if err != nil {
		return 0, err
	}
	// QEMU has it open as file 3; a name would be left behind by a kill.
	archive, err := os.CreateTemp(m.Cache, "l1-*")
	if err != nil {
		return 0, err
	}
	defer func() { _ = archive.Close() }()
	if err := errors.Join(os.Remove(archive.Name()), m.writeArchive(archive, debian, anchor)); err != nil {
		return 0, err
	}
	running, ended := archive.Name()+".log", filepath.Join(m.Cache, KernelLog)
	status, err := m.boot(ctx, out, debian.kernel, archive, running)
	_ = os.Rename(running, ended) // there is none if QEMU did not start
	if err != nil {
		log, _ := os.ReadFile(ended) // as above
		return 0, fmt.Errorf("%w\n--- end of %s:\n%s", err, ended, lastLines(log))
	}
	return status, nil
}

// build makes the program that keeps a VM. Without one KVM's first VM, and the end
// of the last, have the machine's kernel rewrite code of its scheduler. QEMU before
// 8.1 may translate such code while another emulated CPU writes to it, and go on
// with what it was before: the breakpoint that guards the change, for ever, or code
// that tells KVM no more when a guest has to leave the CPU.
func (m *Machine) build(ctx context.Context) (string, error) {
	path := filepath.Join(m.Cache, "anchor")
	build := exec.CommandContext(ctx, "go", "build", "-o", path, "github.com/iii-hq/workers/sandbox-libkrun/test/l1/anchor")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the program that keeps a VM: %w\n%s", err, out)
	}
	return path, nil
}

// boot runs QEMU. The command's terminal is the first serial port, the kernel's
// console the second.
func (m *Machine) boot(ctx context.Context, out io.Writer, kernel string, archive *os.File, kernelLog string) (int, error) {
	qemu, err := vmassets.FindQEMU(os.Getenv, "amd64")
	if err != nil {
		return 0, err
	}
	serial := "stdio"
	if m.Terminal {
		serial = "mon:stdio"
	}
	cmd := exec.CommandContext(ctx, qemu, "-M", "q35", "-accel", "tcg,thread=multi", "-cpu", "EPYC,+svm,+npt",
		"-smp", "2", "-m", strconv.Itoa(m.MemoryMiB), "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none",
		"-serial", serial, "-serial", "file:"+kernelLog,
		"-kernel", kernel, "-initrd", "/dev/fd/3", "-append", "console=ttyS1 no_timer_check oops=panic reboot=t panic=-1 mitigations=off")
	cmd.ExtraFiles = []*os.File{archive}
	if m.Terminal {
		cmd.Stdin = os.Stdin
	}
	printed, err := cmd.StdoutPipe()
	if err != nil {
		return 0, err
	}
	var said strings.Builder
	cmd.Stderr = &said
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	if err := mend(cmd.Process.Pid); err != nil {
		_, _ = fmt.Fprintf(out, "l1: %s is left as it is (%v): guests may die or hang for no reason, see docs/verify-libkrun.md\n", qemu, err)
	}
	status, readErr := m.follow(printed, out)
	err = errors.Join(readErr, cmd.Wait())
	switch cause := context.Cause(ctx); {
	case cause != nil:
		return 0, cause
	case status >= 0:
		return status, nil
	default:
		return 0, errors.Join(errors.New("the machine ended without the command's status"), err, reason(said.String()))
	}
}

// reason makes an error of what QEMU said, but for what it says always: features
// of the CPU that it does not emulate.
func reason(said string) error {
	var errs []error
	for line := range strings.Lines(said) {
		if !strings.Contains(line, "TCG doesn't support requested feature") {
			errs = append(errs, errors.New(strings.TrimSpace(line)))
		}
	}
	return errors.Join(errs...)
}

// lastLines is the end of a text.
func lastLines(text []byte) []byte {
	const lines = 40
	at := len(text)
	for range lines {
		if at = bytes.LastIndexByte(text[:max(at-1, 0)], '\n') + 1; at == 0 {
			break
		}
	}
	return text[at:]
}

// follow passes on what the machine prints and finds the status; -1 for none.
func (m *Machine) follow(printed io.Reader, out io.Writer) (status int, err error) {
	if m.Terminal {
		_, err := io.Copy(out, printed)
		return 0, err
	}
	status = -1
	for lines := bufio.NewReader(printed); ; {
		line, err := lines.ReadString('\n')
		line = strings.TrimRight(line, "\r\n")
		if number, found := strings.CutPrefix(line, statusMark); found {
			if n, err := strconv.Atoi(number); err == nil {
				status = n
			}
		} else if line != "" || err == nil {
			_, _ = fmt.Fprintln(out, line)
		}
		if errors.Is(err, io.EOF) {
			return status, nil
		}
		if err != nil {
			return status, err
		}
	}
}
