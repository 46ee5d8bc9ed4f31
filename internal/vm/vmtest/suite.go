// Package vmtest tests virtual machines: a suite that every vm.Driver must
// pass, a driver whose VM is everything but the machine, and what tests on real
// VMs need. For tests only.
package vmtest

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/guest"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
)

// Env is what the suite runs on. A fresh one is made for each part of it, with
// state and run roots of its own.
type Env struct {
	// Driver and Roots make the launchers.
	Driver vm.Driver
	Roots  layout.Roots
	// Lower is an image with a POSIX shell and the usual small programs.
	Lower string
	// Patience bounds every single wait: for a boot, a program, an end.
	Patience time.Duration
	// Crowd is how many VMs are asked for at once.
	Crowd int
	// RealDisk tells that the guest has a file system of its own.
	RealDisk bool
	// Probe is netprobe's file (test/netprobe); empty where the guest has no network
	// of its own to be looked at.
	Probe string
	// Load is how much the long parts do; the zero value is SmallLoad.
	Load Load
}

// guestPath is the PATH of the suite's programs.
const guestPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// memoryMiB is the size of the suite's VMs.
const memoryMiB = 256

// RunSuite runs every test of the suite on the environments that open makes. The
// package's TestMain begins with PlayClient.
func RunSuite(t *testing.T, open func(t *testing.T) *Env) {
	t.Run("Programs", func(t *testing.T) { runPrograms(t, open(t)) })
	for _, test := range []struct {
		name string
		run  func(*testing.T, *Env)
	}{
		{"Stop", testStop},
		{"StopOfStubbornPrograms", testStopStubborn},
		{"Kill", testKill},
		{"CloseOfTied", testCloseTied},
		{"CancelledLaunch", testCancelledLaunch},
		{"BootTimeout", testBootTimeout},
		{"RefusedRequests", testRefusedRequests},
		{"SameIDTwice", testSameID},
		{"Keep", testKeep},
		{"KeptEndsWhenIdle", testIdle},
		{"DurableDisk", testDurableDisk},
		{"Streams", testStreams},
		{"Calls", testCalls},
		{"Reconnect", testReconnect},
		{"Crowd", testCrowd},
		{"Network", testNetwork},
		{"NoNetwork", testNoNetwork},
		{"RestrictedNetwork", testRestricted},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(t, open(t)) })
	}
}

// Launcher returns a launcher on the environment.
func (e *Env) Launcher(t testing.TB) *vm.Launcher {
	return e.launcher(t, vm.Config{})
}

func (e *Env) launcher(t testing.TB, cfg vm.Config) *vm.Launcher {
	// The product's time-out is for hosts that are not emulated, or busy with tests.
	cfg.BootTimeout = cmp.Or(cfg.BootTimeout, e.Patience)
	cfg.Driver, cfg.Roots, cfg.Log, cfg.Version = e.Driver, e.Roots, Logger(t), "vmtest"
	return vm.New(cfg)
}

// Request is for a small VM on the environment's image.
func (e *Env) Request() vm.Request {
	return vm.Request{MemoryMiB: memoryMiB, Lower: e.Lower, Env: []string{guestPath, "GREETING=hello"}}
}

// Context ends after the environment's patience.
func (e *Env) Context(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeoutCause(context.Background(), e.Patience, errors.New("the test's patience is at its end"))
	t.Cleanup(cancel)
	return ctx
}

// Launch boots a VM that is closed, and checked to leave nothing, at the end of
// the test.
func (e *Env) Launch(t testing.TB, l *vm.Launcher, req vm.Request) *vm.Machine {
	t.Helper()
	m, err := l.Launch(e.Context(t), req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return m
}

// CheckGone fails unless nothing of the VM is left on the host.
func (e *Env) CheckGone(t testing.TB, id string) {
	t.Helper()
	files := e.Roots.Machine(id)
	for _, path := range []string{files.Dir, files.Socket} {
		if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is left behind (%v)", path, err)
		}
	}
}

// CheckEmpty fails unless no machine directory and no socket are left.
func (e *Env) CheckEmpty(t testing.TB) {
	t.Helper()
	if left := e.Leftovers(t); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// Leftovers lists the machine directories and sockets that are there.
func (e *Env) Leftovers(t testing.TB) []string {
	t.Helper()
	var left []string
	for _, dir := range []string{e.Roots.Machines(), e.Roots.Run} {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
		for _, entry := range entries {
			if entry.IsDir() || entry.Type()&fs.ModeSocket != 0 {
				left = append(left, entry.Name())
			}
		}
	}
	return left
}

// Await fails unless c is closed within the environment's patience.
func (e *Env) Await(t testing.TB, c <-chan struct{}, what string) {
	t.Helper()
	timer := time.NewTimer(e.Patience)
	defer timer.Stop()
	select {
	case <-c:
	case <-timer.C:
		t.Fatalf("%s did not happen within %v", what, e.Patience)
	}
}

// Eventually fails unless done reports true within the limit. For what gives no
// event: the state of other processes.
func Eventually(t testing.TB, limit time.Duration, what string, done func() bool) {
	t.Helper()
	deadline := time.NewTimer(limit)
	defer deadline.Stop()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !done() {
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatalf("%s did not happen within %v", what, limit)
		}
	}
}

// Shell is a shell command.
func Shell(script string) guest.Command {
	return guest.Command{Argv: []string{"sh", "-c", script}}
}

// ShortDir makes a directory with a path short enough for sockets in it, and
// removes it at the end of the test.
func ShortDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "vmt")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// Roots are private roots below a ShortDir.
func Roots(t testing.TB) layout.Roots {
	dir := ShortDir(t)
	return layout.Roots{Cache: dir + "/cache", Data: dir + "/data", State: dir + "/state", Run: dir + "/run"}
}

// Logger writes to the test's log, as long as the test runs.
func Logger(t testing.TB) *slog.Logger {
	return slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// Discard is a logger for where there is no test.
func Discard() *slog.Logger { return slog.New(slog.DiscardHandler) }
