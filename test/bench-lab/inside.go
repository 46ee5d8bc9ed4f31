package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	ocilayout "github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/cleanup"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/imagestore"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vmassets"
)

const (
	// benchDir is where the disks of all VMs are, on an ext4.
	benchDir = "/bench"
	library  = "/opt"
	// warmUps are rounds that do not count: the emulator translates what runs for the
	// first time, which takes it longer the more there is, in each of the programs.
	warmUps = 3
	// once bounds one boot of anything.
	once = 3 * time.Minute
)

// bench is what the measurements in the machine share.
type bench struct {
	options
	log      io.Writer
	roots    layout.Roots
	ours     *launches
	request  vm.Request
	floor    string // the floor's root directory
	calls    []string
	peerHome string
}

// measure runs everything in turn and prints the result; 1 when a goal is missed.
func measure(ctx context.Context, o options, out io.Writer) (status int, err error) {
	var undo cleanup.Stack
	defer func() { err = errors.Join(err, undo.Run()) }()
	b := &bench{options: o, log: out, floor: benchDir + "/floor"}
	if err := b.prepare(ctx, &undo); err != nil {
		return 0, err
	}
	var r results
	for i := range warmUps + o.runs {
		one, err := b.round(ctx)
		if err != nil {
			return 0, err
		}
		_, _ = fmt.Fprintf(out, "round %d: %s\n", i, one)
		if i >= warmUps {
			r.rounds = append(r.rounds, one)
		}
	}
	for range o.runs {
		parts, err := b.ours.timed(ctx, b.request)
		if err != nil {
			return 0, err
		}
		base, err := b.bareCalls(ctx)
		if err != nil {
			return 0, err
		}
		r.parts, r.bareCalls = append(r.parts, parts), append(r.bareCalls, base)
		for times, argv := range map[*[]time.Duration][]string{
			&r.shimStart: {"/opt/krun-shim", "--version"}, &r.floorStart: {"/opt/floor", "nothing"},
		} {
			begin := time.Now()
			if err := succeed(ctx, []string{}, argv...); err != nil {
				return 0, err
			}
			*times = append(*times, time.Since(begin))
		}
		_, _ = fmt.Fprintf(out, "parts: spawn to krun_start_enter %.1f ms, bare %.1f ms\n", ms(parts.enter), ms(base))
	}
	if r.memory, err = b.ours.memory(ctx, b.request); err != nil {
		return 0, err
	}
	return r.print(out, o)
}

// prepare mounts the ext4 and puts the image where each wants it.
func (b *bench) prepare(ctx context.Context, undo *cleanup.Stack) error {
	if err := errors.Join(vmassets.CreateUpper("/run/bench.ext4", vmassets.Ephemeral), os.MkdirAll(benchDir, 0o755)); err != nil {
		return err
	}
	if err := succeed(ctx, nil, "mount", "-o", "loop", "/run/bench.ext4", benchDir); err != nil {
		return err
	}
	var err error
	if b.roots, err = layout.FromEnvironment(os.Getenv); err != nil {
		return err
	}
	layouts := os.Getenv("III_SANDBOX_IMAGE_DIR")
	store, err := imagestore.Open(b.roots.Images(), imagestore.Options{Log: slog.New(slog.DiscardHandler), LayoutDir: layouts})
	if err != nil {
		return err
	}
	image, err := store.Ensure(ctx, "busybox", imagestore.EnsureOptions{Name: "busybox"})
	if err != nil {
		return err
	}
	undo.Add(image.Close)
	b.request = vm.Request{CPUs: 1, MemoryMiB: b.memory, Lower: image.Lower, Env: image.Config.Env}
	if b.ours, err = newLaunches(b.roots, os.Getenv); err != nil {
		return err
	}
	if err := unpack(ctx, filepath.Join(layouts, "busybox"), b.floor); err != nil {
		return err
	}
	upper, root := benchDir+"/calls.ext4", benchDir+"/calls-root"
	if err := errors.Join(vmassets.CreateUpper(upper, vmassets.Ephemeral), vmassets.MakeRoot(root, os.Getenv("III_GUEST_AGENT"))); err != nil {
		return err
	}
	b.calls = []string{"floor", "calls", library, strconv.Itoa(b.memory), root, image.Lower, upper}
	if !b.peer {
		return nil
	}
	b.peerHome = benchDir + "/home"
	if err := os.MkdirAll(b.peerHome, 0o700); err != nil {
		return err
	}
	archive := benchDir + "/busybox.tar"
	if err := succeed(ctx, nil, "tar", "-cf", archive, "-C", filepath.Join(layouts, "busybox"), "."); err != nil {
		return err
	}
	return succeed(ctx, b.peerEnv(), "/opt/peer/bin/msb", "load", "--quiet", "--tag", "busybox:latest", "--input", archive)
}

// unpack makes a directory of the image in an OCI layout.
func unpack(ctx context.Context, layoutDir, dir string) error {
	index, err := ocilayout.ImageIndexFromPath(layoutDir)
	if err != nil {
		return err
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		return err
	}
	if len(manifest.Manifests) != 1 {
		return fmt.Errorf("%s has %d images instead of one", layoutDir, len(manifest.Manifests))
	}
	image, err := index.Image(manifest.Manifests[0].Digest)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	files := mutate.Extract(image)
	defer func() { _ = files.Close() }()
	tar := exec.CommandContext(ctx, "tar", "-xf", "-", "-C", dir)
	tar.Stdin = files
	if out, err := tar.CombinedOutput(); err != nil {
		return fmt.Errorf("unpack %s: %w\n%s", layoutDir, err, out)
	}
	return nil
}

// succeed runs a program that must exit with 0.
func succeed(ctx context.Context, env []string, argv ...string) error {
	ctx, cancel := context.WithTimeout(ctx, once)
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env = env
	if env == nil {
		cmd.Env = os.Environ()
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", strings.Join(argv, " "), err, out)
	}
	return nil
}

// untilReady runs a program that has a VM print "ready", and returns how long
// after its spawn that came, and how long it took in all.
func untilReady(ctx context.Context, env []string, argv ...string) (ready, end time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, once)
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env = env
	var said strings.Builder
	cmd.Stderr = &said
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return 0, 0, err
	}
	begin := time.Now()
	if err := cmd.Start(); err != nil {
		return 0, 0, err
	}
	for lines := bufio.NewScanner(stdout); lines.Scan(); {
		if strings.Contains(lines.Text(), "ready") && ready == 0 {
			ready = time.Since(begin)
		}
	}
	err = cmd.Wait()
	end = time.Since(begin)
	if err == nil && ready == 0 {
		err = errors.New("it never said ready")
	}
	if err != nil {
		err = fmt.Errorf("%s: %w\n%s", strings.Join(argv, " "), err, said.String())
	}
	return ready, end, err
}

// bootFloor boots a shell with what libkrun does by itself.
func (b *bench) bootFloor(ctx context.Context) (ready, end time.Duration, err error) {
	return untilReady(ctx, []string{}, "/opt/floor", "shell", library, strconv.Itoa(b.memory), b.floor)
}

func (b *bench) peerEnv() []string {
	return []string{"HOME=" + b.peerHome, "TMPDIR=" + b.peerHome, "PATH=/opt:/bin", "TERM=linux"}
}

// bootPeer has microsandbox create a VM and run a program in it.
func (b *bench) bootPeer(ctx context.Context) (ready, end time.Duration, err error) {
	return untilReady(ctx, b.peerEnv(), "/opt/peer/bin/msb", "run", "--quiet", "--no-tty", "--no-net", "--pull", "never",
		"--cpus", "1", "--memory", fmt.Sprintf("%dM", b.memory), "busybox:latest", "--", "/bin/sh", "-c", "echo ready")
}

// bareCalls is how long after its spawn a C program comes to where it would start
// the VM, with the calls and the files of ours.
func (b *bench) bareCalls(ctx context.Context) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, once)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/opt/"+b.calls[0], b.calls[1:]...)
	cmd.Dir = benchDir
	begin := time.Now()
	out, err := cmd.CombinedOutput()
	var enter int64
	if err == nil {
		_, err = fmt.Sscanf(string(out), "enter %d", &enter)
	}
	if err != nil {
		return 0, fmt.Errorf("%s: %w\n%s", strings.Join(b.calls, " "), err, out)
	}
	return time.Unix(0, enter).Sub(begin), nil
}
