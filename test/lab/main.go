// Command lab runs libkrun's VMs on a host without hardware virtualization: QEMU
// emulates a machine with AMD's (SVM), in which a Debian kernel has a /dev/kvm
// that works. What is built here runs in that machine, and real guests of the real
// libkrun in it, some ten times slower than on hardware.
//
//	go run ./test/lab [--shell] [--memory 3072] [--timeout 15m] [-- COMMAND ...]
//
// Without a command it runs the VM suite on libkrun, without skips. The programs
// come from bin/ (make build), the image busybox from where the product looks for
// it, kernel and shell from Debian packages, which are unpacked into .cache/lab,
// and libkrun from `adapter vmm setup --libkrun`. The command runs as root with
// PATH and the III_* variables set; its output is printed, and its exit status is
// that of the lab. For Linux on x86-64.
package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vmassets"
)

// suite is what runs without a command: at most two guests at a time are asked
// for, and a skip is a failure.
const suite = "VMTEST_REQUIRE=libkrun exec shimdriver.test -test.run Libkrun -test.v -test.timeout 12m"

// statusMark begins the line in which the machine tells the command's status.
const statusMark = "lab: status "

// exitLab is the status of a lab that did not come to run the command.
const exitLab = 125

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	status, err := command(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintf(os.Stderr, "lab: %v\n", err)
		status = exitLab
	}
	os.Exit(status)
}

// options are what the command line asks for.
type options struct {
	shell   bool
	memory  int
	timeout time.Duration
	command string
}

func parse(args []string) (options, error) {
	o := options{command: suite}
	flags := flag.NewFlagSet("lab", flag.ContinueOnError)
	flags.BoolVar(&o.shell, "shell", false, "an interactive shell instead of a command; Ctrl-A X ends it")
	flags.IntVar(&o.memory, "memory", 3072, "memory of the machine in MiB")
	flags.DurationVar(&o.timeout, "timeout", 15*time.Minute, "how long it may run")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	switch {
	case o.shell && flags.NArg() > 0:
		return o, errors.New("want --shell or a command")
	case o.shell:
		o.command = "setsid cttyhack sh -i"
	case flags.NArg() > 0:
		o.command = strings.Join(flags.Args(), " ")
	}
	return o, nil
}

func command(ctx context.Context, args []string) (int, error) {
	o, err := parse(args)
	if err != nil {
		return 0, err
	}
	roots, err := layout.FromEnvironment(os.Getenv)
	if err != nil {
		return 0, err
	}
	cache, err := filepath.Abs(filepath.Join(".cache", "lab"))
	if err != nil {
		return 0, err
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return 0, err
	}
	pair, err := vmassets.SetupLibkrun(ctx, vmassets.Options{
		Dir: roots.VMM(), Log: slog.New(slog.DiscardHandler), Progress: os.Stderr, Getenv: os.Getenv,
	})
	if err != nil {
		return 0, err
	}
	debian, err := fetchDebian(ctx, cache)
	if err != nil {
		return 0, err
	}
	tests := filepath.Join(cache, "shimdriver.test")
	build := exec.CommandContext(ctx, "go", "test", "-c", "-o", tests, "./internal/vm/shimdriver")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return 0, fmt.Errorf("build the suite: %w\n%s", err, out)
	}
	archive := filepath.Join(cache, "initramfs.cpio")
	if err := writeArchive(archive, debian, pair, tests, filepath.Join(roots.ImageLayouts(), "busybox"), o.command); err != nil {
		return 0, err
	}
	return boot(ctx, o, debian.kernel, archive)
}

// boot runs the machine and returns the command's status.
func boot(ctx context.Context, o options, kernel, archive string) (int, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, o.timeout, fmt.Errorf("it was not done after %v", o.timeout))
	defer cancel()
	qemu, err := vmassets.FindQEMU(os.Getenv, "amd64")
	if err != nil {
		return 0, err
	}
	serial := "stdio"
	if o.shell {
		serial = "mon:stdio"
	}
	cmd := exec.CommandContext(ctx, qemu, "-M", "q35", "-accel", "tcg,thread=multi", "-cpu", "EPYC,+svm,+npt",
		"-smp", "2", "-m", strconv.Itoa(o.memory), "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-serial", serial,
		"-kernel", kernel, "-initrd", archive, "-append", "console=ttyS0 quiet reboot=t panic=-1 mitigations=off")
	if o.shell {
		cmd.Stdin = os.Stdin
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return 0, err
	}
	var said strings.Builder
	cmd.Stderr = &said
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	status, readErr := follow(out, o.shell)
	err = errors.Join(readErr, cmd.Wait())
	switch cause := context.Cause(ctx); {
	case cause != nil:
		return 0, cause
	case status >= 0:
		return status, nil
	default:
		return 0, fmt.Errorf("the machine ended without the command's status (%w)\n%s", err, said.String())
	}
}

// follow prints what the machine prints and finds the status; -1 for none.
func follow(out io.Reader, raw bool) (status int, err error) {
	status = -1
	if raw {
		_, err := io.Copy(os.Stdout, out)
		return 0, err
	}
	lines := bufio.NewReader(out)
	for {
		line, err := lines.ReadString('\n')
		line = strings.TrimRight(line, "\r\n")
		if number, found := strings.CutPrefix(line, statusMark); found {
			if n, err := strconv.Atoi(number); err == nil {
				status = n
			}
		} else if line != "" || err == nil {
			fmt.Println(line)
		}
		if errors.Is(err, io.EOF) {
			return status, nil
		}
		if err != nil {
			return status, err
		}
	}
}
