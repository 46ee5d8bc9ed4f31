// Command bench measures the product against the floor that the host sets, both
// in turn in one run: booting against a bare QEMU, exec against fork and exec
// in the guest, memory against a bare QEMU's, streams against a pipe, the network
// against QEMU's own; and through an iii engine, calls against those of a Node worker, files in channels against
// the agent's streams, the adapter's memory under load against its limit. It
// prints ratios, since a time alone says more about the host than about us.
//
//	go run ./test/bench [--runs 10] [--image python] [--only boot,exec,memory,stream,network,call,file,load] [--json]
//
// The programs come from bin/ (make build), kernel and images from where the
// product looks for them. It exits with 1 when a goal is missed.
package main

import (
	"cmp"
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
	"runtime"
	"slices"
	"strings"
	"syscall"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/cleanup"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/guest"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/imagestore"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/shimdriver"
)

func main() {
	if slices.Equal(os.Args[1:], []string{"__vm-boot"}) {
		os.Exit(fakeShim()) // see load
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := command(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// options are what the command line asks for.
type options struct {
	runs        int
	cpus        int
	memory      int
	image, bin  string
	only        []string
	json, quiet bool
}

func parse(args []string, stderr io.Writer) (options, error) {
	var o options
	var only string
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.IntVar(&o.runs, "runs", 10, "how often each is measured")
	flags.IntVar(&o.cpus, "cpus", 1, "virtual CPUs of every VM, ours and bare")
	flags.IntVar(&o.memory, "memory", 512, "memory of every VM in MiB, ours and bare")
	flags.StringVar(&o.image, "image", "python", "image of our VMs, a layout in the image directory")
	flags.StringVar(&o.bin, "bin", "bin", "directory with adapter, krun-shim and guest-agent")
	flags.StringVar(&only, "only", strings.Join(parts(), ","), "what to measure, of "+strings.Join(parts(), ","))
	flags.BoolVar(&o.json, "json", false, "print the result as JSON")
	flags.BoolVar(&o.quiet, "quiet", false, "print no progress")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	o.only = strings.Split(only, ",")
	for _, p := range o.only {
		if !slices.Contains(parts(), p) {
			return o, fmt.Errorf("there is no part %q: %s", p, strings.Join(parts(), ", "))
		}
	}
	if flags.NArg() > 0 || o.runs < 1 {
		return o, errors.New("usage: bench [flags], with at least one run")
	}
	return o, nil
}

// parts are what can be measured: in VMs of our launcher, and through an engine.
func parts() []string { return append(machineParts(), "network", "call", "file", "load") }

func machineParts() []string { return []string{"boot", "exec", "memory", "stream"} }

func (o options) anyOf(parts ...string) bool {
	return slices.ContainsFunc(parts, func(p string) bool { return slices.Contains(o.only, p) })
}

func command(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	o, err := parse(args, stderr)
	if errors.Is(err, flag.ErrHelp) {
		return 0
	}
	if err != nil {
		_, _ = fmt.Fprintf(stderr, "bench: %v\n", err)
		return 2
	}
	res, err := run(ctx, o, stderr)
	if err == nil && o.json {
		err = res.printJSON(stdout)
	} else if err == nil {
		err = res.print(stdout)
	}
	if err != nil {
		_, _ = fmt.Fprintf(stderr, "bench: %v\n", err)
		return 1
	}
	if res.missed() {
		return 1
	}
	return 0
}

// bench is what the measurements share.
type bench struct {
	runs int
	// launcher resumes VMs from a snapshot, once there is one; cold boots each.
	launcher, cold *vm.Launcher
	// emulated takes QEMU whatever the host has.
	emulated *vm.Launcher
	request  vm.Request
	arch     string
	log      *slog.Logger
	progress io.Writer
}

func (b *bench) note(format string, args ...any) {
	// Progress that nobody can read stops no measurement.
	_, _ = fmt.Fprintf(b.progress, "\r\x1b[K"+format, args...)
}

// run measures what o asks for.
func run(ctx context.Context, o options, stderr io.Writer) (res result, err error) {
	var undo cleanup.Stack
	defer func() { err = errors.Join(err, undo.Run()) }()
	dir, err := os.MkdirTemp("", "iii-bench-")
	if err != nil {
		return res, err
	}
	undo.Add(func() error { return os.RemoveAll(dir) })
	b := &bench{runs: o.runs, progress: stderr, arch: runtime.GOARCH}
	if o.quiet {
		b.progress = io.Discard
	}
	closeImage, err := b.prepare(ctx, o, stderr)
	if err != nil {
		return res, err
	}
	undo.Add(closeImage)
	res = result{Runs: o.runs, Host: fmt.Sprintf("%d cores %s", runtime.NumCPU(), runtime.GOARCH)}
	defer b.note("")
	if o.anyOf(machineParts()...) {
		if res.Rows, err = b.measure(ctx, o, dir); err != nil {
			return res, err
		}
	}
	if o.anyOf("network") {
		rows, err := b.network(ctx, o, dir)
		if err != nil {
			return res, err
		}
		res.Rows = append(res.Rows, rows...)
	}
	rows, err := b.throughEngine(ctx, o, dir)
	res.Rows = append(res.Rows, rows...)
	return res, err
}

// prepare makes the launcher and the request for our VMs. The caller calls the
// function it returns.
func (b *bench) prepare(ctx context.Context, o options, stderr io.Writer) (func() error, error) {
	roots, err := layout.FromEnvironment(os.Getenv)
	if err != nil {
		return nil, err
	}
	log := slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: slog.LevelError}))
	b.log = log
	for _, l := range []struct {
		to        **vm.Launcher
		vmm, snap string
	}{{&b.launcher, "", ""}, {&b.cold, "", "off"}, {&b.emulated, "qemu", ""}} {
		if *l.to, err = b.launcherWith(o, l.vmm, map[string]string{"III_SANDBOX_SNAPSHOT": l.snap}); err != nil {
			return nil, err
		}
	}
	layouts := os.Getenv("III_SANDBOX_IMAGE_DIR")
	if layouts == "" {
		layouts = roots.ImageLayouts()
	}
	store, err := imagestore.Open(roots.Images(), imagestore.Options{Log: log, LayoutDir: layouts})
	if err != nil {
		return nil, err
	}
	image, err := store.Ensure(ctx, "oci:"+filepath.Join(layouts, o.image), imagestore.EnsureOptions{PullMissing: true})
	if err != nil {
		return nil, fmt.Errorf("image %s: %w (make it with go run ./build/images %s)", o.image, err, o.image)
	}
	b.request = vm.Request{CPUs: o.cpus, MemoryMiB: o.memory, Lower: image.Lower, Env: image.Config.Env}
	return image.Close, nil
}

// launcherWith makes a launcher with the programs of the command line and more
// variables where the environment has none.
func (b *bench) launcherWith(o options, vmm string, more map[string]string) (*vm.Launcher, error) {
	roots, err := layout.FromEnvironment(os.Getenv)
	if err != nil {
		return nil, err
	}
	bin, err := filepath.Abs(o.bin)
	if err != nil {
		return nil, err
	}
	more["III_KRUN_SHIM"], more["III_GUEST_AGENT"] = filepath.Join(bin, "krun-shim"), filepath.Join(bin, "guest-agent")
	driver, err := shimdriver.New(shimdriver.Config{VMM: vmm, Roots: roots, Log: b.log, Getenv: withVariables(more)})
	if err != nil {
		return nil, err
	}
	return vm.New(vm.Config{Driver: driver, Roots: roots, Log: b.log}), nil
}

// withVariables is the environment, with more where it has nothing.
func withVariables(more map[string]string) func(string) string {
	return func(key string) string { return cmp.Or(os.Getenv(key), more[key]) }
}

// buildProgram compiles a program that measures in the guest.
func buildProgram(ctx context.Context, dir, name, pkg string) ([]byte, error) {
	file := filepath.Join(dir, name)
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", file,
		"github.com/iii-hq/workers/sandbox-libkrun/"+pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux")
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build %s: %w: %s", pkg, err, out)
	}
	return os.ReadFile(file)
}

// measure runs the parts on one long-lived VM, and the boots on their own.
func (b *bench) measure(ctx context.Context, o options, dir string) (rows []row, err error) {
	probe, err := buildProgram(ctx, dir, "probe", "test/bench/probe")
	if err != nil {
		return nil, err
	}
	b.note("first boot")
	m, err := b.launcher.Launch(ctx, b.request)
	if err != nil {
		return nil, err
	}
	running := true
	stop := func() error {
		if !running {
			return nil
		}
		running = false
		return m.Kill()
	}
	defer func() { err = errors.Join(err, stop()) }()
	status, err := m.Status(ctx)
	if err != nil {
		return nil, err
	}
	argv, err := commandLine(status.VMMPID)
	if err != nil {
		return nil, err
	}
	bare, err := newFloors(argv, dir, runtime.GOARCH)
	if err != nil {
		return nil, err
	}
	rows, err = b.inGuest(ctx, o, m, status.VMMPID, bare, probe)
	if err != nil {
		return nil, err
	}
	if err := stop(); err != nil {
		return nil, err
	}
	if slices.Contains(o.only, "boot") {
		boots, err := b.boots(ctx, bare.ends)
		if err != nil {
			return nil, err
		}
		rows = append(boots, rows...)
	}
	return rows, nil
}

// inGuest measures what a running VM shows: its memory first, before the other
// measurements grow it.
func (b *bench) inGuest(ctx context.Context, o options, m *vm.Machine, qemu int, bare floors, probe []byte) ([]row, error) {
	var rows []row
	if slices.Contains(o.only, "memory") {
		b.note("memory")
		if err := succeed(ctx, m, "/bin/true"); err != nil {
			return nil, err
		}
		list, err := memory(ctx, m, qemu, bare)
		if err != nil {
			return nil, err
		}
		rows = append(rows, list...)
	}
	if err := install(ctx, m, probe); err != nil {
		return nil, err
	}
	if slices.Contains(o.only, "exec") {
		list, err := b.allExecs(ctx, m)
		if err != nil {
			return nil, err
		}
		rows = append(list, rows...)
	}
	if slices.Contains(o.only, "stream") {
		shim, err := parent(qemu)
		if err != nil {
			return nil, err
		}
		list, err := b.streams(ctx, m, shim)
		if err != nil {
			return nil, err
		}
		rows = append(rows, list...)
	}
	return rows, nil
}

// allExecs measures a program that does nothing and, where the image has it,
// one that does a little.
func (b *bench) allExecs(ctx context.Context, m *vm.Machine) ([]row, error) {
	first, err := b.execs(ctx, m, "/bin/true", 20, "/bin/true")
	if err != nil {
		return nil, err
	}
	const python = "/usr/bin/python3"
	found, err := output(ctx, m, guest.IO{}, "/bin/sh", "-c", "if test -x "+python+"; then echo yes; fi")
	if err != nil || found == "" {
		return []row{first}, err
	}
	second, err := b.execs(ctx, m, "python3 -c pass", 4, python, "-c", "pass")
	return []row{first, second}, err
}

// throughEngine runs the parts in which the adapter serves.
func (b *bench) throughEngine(ctx context.Context, o options, dir string) (rows []row, err error) {
	entry, err := configuration(o)
	if err != nil {
		return nil, err
	}
	var undo cleanup.Stack
	defer func() { err = errors.Join(err, undo.Run()) }()
	if o.anyOf("call", "file") {
		s, err := serve(ctx, &undo, o.bin, filepath.Join(dir, "s"), entry)
		if err != nil {
			return nil, err
		}
		if o.anyOf("call") {
			list, err := b.calls(ctx, s, &undo)
			if err != nil {
				return nil, err
			}
			rows = append(rows, list...)
		}
		if o.anyOf("file") {
			list, err := b.files(ctx, o, s)
			if err != nil {
				return nil, err
			}
			rows = append(rows, list...)
		}
	}
	if o.anyOf("load") {
		list, err := b.load(ctx, o, filepath.Join(dir, "l"), entry)
		if err != nil {
			return nil, err
		}
		rows = append(rows, list...)
	}
	return rows, nil
}
