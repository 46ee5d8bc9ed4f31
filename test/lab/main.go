// Command lab runs libkrun's VMs on a host without hardware virtualization, in an
// emulated machine (test/l1) that has it. What is built here runs in that machine,
// and real guests of the real libkrun in it.
//
//	go run ./test/lab [--shell] [--memory 3072] [--timeout 55m] [-- COMMAND ...]
//
// Without a command it runs the VM suite on libkrun, without skips. The programs
// come from bin/ (make build), the image busybox from where the product looks for
// it, kernel and shell from Debian packages, which are unpacked into .cache/lab,
// and libkrun from `adapter vmm setup --libkrun`. The command runs as root with
// PATH and the III_* variables set; its output is printed, and its exit status is
// that of the lab. For Linux on x86-64.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vmassets"
	"github.com/iii-hq/workers/sandbox-libkrun/test/l1"
)

// suite is what runs without a command: at most two guests at a time are asked
// for, a skip is a failure, and the loads are light (build/soak.sh has others).
const suite = "VMTEST_REQUIRE=libkrun VMTEST_LIGHT=1 exec shimdriver.test -test.run Libkrun -test.v -test.timeout 50m"

// exitLab is the status of a lab that did not come to run the command.
const exitLab = 125

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
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
	flags.DurationVar(&o.timeout, "timeout", 55*time.Minute, "how long it may run")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	switch {
	case o.shell && flags.NArg() > 0:
		return o, errors.New("want --shell or a command")
	case o.shell:
		o.command = "setsid -c sh -i"
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
	tests := filepath.Join(cache, "shimdriver.test")
	build := exec.CommandContext(ctx, "go", "test", "-c", "-o", tests, "./internal/vm/shimdriver")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return 0, fmt.Errorf("build the suite: %w\n%s", err, out)
	}
	probe := filepath.Join(cache, "netprobe")
	build = exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", probe, "./test/netprobe")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return 0, fmt.Errorf("build netprobe: %w\n%s", err, out)
	}
	m := &l1.Machine{
		Cache: cache,
		Files: map[string]string{
			"opt/adapter": "bin/adapter", "opt/krun-shim": "bin/krun-shim", "opt/guest-agent": "bin/guest-agent", "opt/shimdriver.test": tests, "opt/netprobe": probe,
			"opt/" + filepath.Base(pair.Library): pair.Library, "opt/" + filepath.Base(pair.Firmware): pair.Firmware,
		},
		Trees: map[string]string{"opt/images/busybox": filepath.Join(roots.ImageLayouts(), "busybox")},
		Env: map[string]string{
			"III_SANDBOX_CACHE_DIR": "/run/c", "III_SANDBOX_STATE_DIR": "/run/s", "III_SANDBOX_RUN_DIR": "/run/r",
			"III_SANDBOX_IMAGE_DIR": "/opt/images", "III_LIBKRUN_PATH": "/opt",
			"III_KRUN_SHIM": "/opt/krun-shim", "III_GUEST_AGENT": "/opt/guest-agent", "VMTEST_PROBE": "/opt/netprobe",
		},
		Command: o.command, MemoryMiB: o.memory, Timeout: o.timeout, Terminal: o.shell,
	}
	status, err := m.Run(ctx, os.Stdout)
	if status != 0 {
		fmt.Fprintf(os.Stderr, "lab: the log of the machine's kernel is %s\n", filepath.Join(cache, l1.KernelLog))
	}
	return status, err
}
