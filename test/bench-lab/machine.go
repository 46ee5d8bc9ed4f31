package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vmassets"
	"github.com/iii-hq/workers/sandbox-libkrun/test/l1"
)

// The peer's package, as npm has it.
const (
	peerPackage = "@superradcompany/microsandbox-linux-x64-gnu@0.7.2"
	peerFile    = "superradcompany-microsandbox-linux-x64-gnu-0.7.2.tgz"
	peerSHA256  = "7aacbb9ab86a152813d005c6ba12551b104997be9234a010a3473e4b2e9703e0"
)

// authorities are the certificates without which the peer does not start.
const authorities = "/etc/ssl/certs/ca-certificates.crt"

// machineMemory is that of the machine, in MiB: its disks are in it.
const machineMemory = 4096

// runMachine builds what the machine needs and runs this program in it.
func runMachine(ctx context.Context, o options) (int, error) {
	cache, err := filepath.Abs(filepath.Join(".cache", "lab"))
	if err != nil {
		return 0, err
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return 0, err
	}
	roots, err := layout.FromEnvironment(os.Getenv)
	if err != nil {
		return 0, err
	}
	pair, err := vmassets.SetupLibkrun(ctx, vmassets.Options{
		Dir: roots.VMM(), Log: slog.New(slog.DiscardHandler), Progress: os.Stderr, Getenv: os.Getenv,
	})
	if err != nil {
		return 0, err
	}
	programs, err := build(ctx, cache, pair)
	if err != nil {
		return 0, err
	}
	files := map[string]string{
		"opt/adapter": "bin/adapter", "opt/krun-shim": "bin/krun-shim", "opt/guest-agent": "bin/guest-agent",
		"opt/bench-lab": programs.self, "opt/floor": programs.floor,
		"opt/libkrun.so.1": pair.Library, "opt/libkrunfw.so.5": pair.Firmware,
		// The loader finds the library behind the timed one.
		"lib/x86_64-linux-gnu/libkrun.so.1": pair.Library,
		"opt/timed/libkrun.so.1":            programs.timed, "opt/timed/libkrunfw.so.5": pair.Firmware,
	}
	if o.peer {
		peer, err := fetchPeer(ctx, cache)
		if err != nil {
			return 0, err
		}
		files["opt/peer/bin/msb"] = filepath.Join(peer, "bin", "msb")
		files["opt/peer/lib/libkrunfw.so.5.6.1"] = filepath.Join(peer, "lib", "libkrunfw.so.5.6.1")
		files[authorities[1:]] = authorities
	}
	m := &l1.Machine{
		Cache: cache, Files: files, Trees: map[string]string{"opt/images/busybox": filepath.Join(roots.ImageLayouts(), "busybox")},
		Modules: []string{"drivers/block/loop.ko"}, MemoryMiB: machineMemory, Timeout: o.timeout,
		Env: map[string]string{
			"III_SANDBOX_CACHE_DIR": benchDir + "/c", "III_SANDBOX_STATE_DIR": benchDir + "/s", "III_SANDBOX_RUN_DIR": "/run/r",
			"III_SANDBOX_IMAGE_DIR": "/opt/images", "III_LIBKRUN_PATH": "/opt",
			"III_KRUN_SHIM": "/opt/krun-shim", "III_GUEST_AGENT": "/opt/guest-agent",
		},
		Command: fmt.Sprintf("exec bench-lab --inside --runs %d --memory %d --peer=%t", o.runs, o.memory, o.peer),
	}
	return m.Run(ctx, os.Stdout)
}

// programs are what is built for the machine.
type programs struct{ self, floor, timed string }

func build(ctx context.Context, cache string, pair *vmassets.Libkrun) (programs, error) {
	p := programs{
		self: filepath.Join(cache, "bench-lab-static"), floor: filepath.Join(cache, "floor"), timed: filepath.Join(cache, "timed.so"),
	}
	source := filepath.Join("test", "bench-lab", "c")
	for _, argv := range [][]string{
		{"go", "build", "-trimpath", "-tags", "grpcnotrace", "-o", p.self, "./test/bench-lab"},
		{"gcc", "-O2", "-Wall", "-o", p.floor, filepath.Join(source, "floor.c"), "-ldl"},
		{
			"gcc", "-O2", "-Wall", "-shared", "-fPIC", "-o", p.timed, filepath.Join(source, "timed.c"),
			"-Wl,--no-as-needed", "-Wl,--allow-shlib-undefined", pair.Library, "-ldl",
		},
	} {
		cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return programs{}, fmt.Errorf("build %s: %w\n%s", argv[len(argv)-1], err, out)
		}
	}
	return p, nil
}

// fetchPeer downloads and unpacks microsandbox's package once, and returns the
// directory with its bin and lib.
func fetchPeer(ctx context.Context, cache string) (string, error) {
	dir := filepath.Join(cache, "peer")
	unpacked := filepath.Join(dir, "package")
	if _, err := os.Stat(filepath.Join(dir, "complete")); err == nil {
		return unpacked, nil
	}
	if err := errors.Join(os.RemoveAll(dir), os.MkdirAll(dir, 0o755)); err != nil {
		return "", err
	}
	pack := exec.CommandContext(ctx, "npm", "pack", "--silent", peerPackage)
	pack.Dir = dir
	if out, err := pack.CombinedOutput(); err != nil {
		return "", fmt.Errorf("npm pack %s: %w\n%s", peerPackage, err, out)
	}
	if err := checkSum(filepath.Join(dir, peerFile), peerSHA256); err != nil {
		return "", err
	}
	if out, err := exec.CommandContext(ctx, "tar", "-xzf", filepath.Join(dir, peerFile), "-C", dir).CombinedOutput(); err != nil {
		return "", fmt.Errorf("unpack %s: %w\n%s", peerFile, err, out)
	}
	return unpacked, os.WriteFile(filepath.Join(dir, "complete"), nil, 0o600)
}

func checkSum(path, want string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	sum := sha256.New()
	if _, err := io.Copy(sum, file); err != nil {
		return err
	}
	if got := fmt.Sprintf("%x", sum.Sum(nil)); got != want {
		return fmt.Errorf("%s has SHA-256 %s, not %s", path, got, want)
	}
	return nil
}
