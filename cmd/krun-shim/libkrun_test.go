//go:build cgo && linux

package main

import (
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/shim"
)

// The VMM of libkrun reaches its files and no others. Its library is one that
// tries, in the real child.
func TestLibkrunIsConfined(t *testing.T) {
	t.Parallel()
	if confinementIsOff() {
		t.Skip("SKIP: this kernel has no Landlock, or none for TCP")
	}
	dir := t.TempDir()
	library := filepath.Join(dir, "lib", "libkrun.so.1")
	spec := &bootspec.Spec{
		ID: "peek", Dir: filepath.Join(dir, "machine"), CPUs: 2, MemoryMiB: 512,
		Lower:   bootspec.Disk{Path: filepath.Join(dir, "lower"), ReadOnly: true},
		Upper:   bootspec.Disk{Path: filepath.Join(dir, "machine", "upper.ext4")},
		Libkrun: &bootspec.LibkrunSpec{Library: library, Firmware: library, Root: filepath.Join(dir, "root")},
	}
	for _, path := range []string{spec.Lower.Path, spec.Upper.Path, filepath.Join(spec.Dir, "spec.json"), filepath.Join(spec.Libkrun.Root, "agent"), library} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, nil, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	cc := exec.CommandContext(t.Context(), "cc", "-shared", "-fPIC", "-o", library, "../../internal/shim/libkrun/testdata/fakekrun.c")
	if out, err := cc.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	console, dev := devices(t)
	end := newLibkrun(slog.New(slog.DiscardHandler)).Run(t.Context(), spec, dev)
	got, err := io.ReadAll(console)
	if err != nil || end.Class != bootspec.EndGuest {
		t.Fatalf("end is %+v, console %q, %v", end, got, err)
	}
	const want = "peek;write the upper: ok;read the spec: no;make a file in the root: no;read the agent: ok;" +
		"read the system: ok;write the system: no;reopen a file of its own: ok;read another process: no;bind a TCP port: no"
	if string(got) != want {
		t.Errorf("the VMM says\n%s\nwant\n%s", got, want)
	}
}

func TestDescribeLibkrun(t *testing.T) {
	t.Parallel()
	library := filepath.Join(t.TempDir(), "libkrun.so.1")
	cc := exec.CommandContext(t.Context(), "cc", "-shared", "-fPIC", "-o", library, "../../internal/shim/libkrun/testdata/fakekrun.c")
	if out, err := cc.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	var out strings.Builder
	if err := describeLibkrun([]string{library, ""}, &out, slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
	if got := out.String(); got != "built with disks and with network devices, lacks krun_set_nested_virt\n" {
		t.Errorf("it is %q", got)
	}
	for name, args := range map[string][]string{
		"load libkrun: /no/libkrun": {"/no/libkrun", ""}, "load libkrunfw: /no/fw": {library, "/no/fw"}, "want LIBRARY": {library},
		"libc.so.6 has no krun_init_log": {"libc.so.6", ""},
	} {
		if err := describeLibkrun(args, io.Discard, slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%q: error is %v", args, err)
		}
	}
}

// A library that hangs while it is loaded ends with who wanted to know of it.
func TestDescribeLeavesNoChild(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	source, library := filepath.Join(dir, "hang.c"), filepath.Join(dir, "libkrun.so.1")
	const hangs = `#include <stdio.h>
#include <unistd.h>
__attribute__((constructor)) static void hang(void) {
	FILE *f = fopen("new", "w");
	fprintf(f, "%d", getpid());
	fclose(f);
	rename("new", "pid");
	for (;;)
		pause();
}`
	if err := os.WriteFile(source, []byte(hangs), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), "cc", "-shared", "-fPIC", "-o", library, source).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	shim := exec.CommandContext(t.Context(), os.Args[0], commandDescribe, library, "")
	shim.Dir, shim.Env = dir, []string{playShim + "=1"}
	if err := shim.Start(); err != nil {
		t.Fatal(err)
	}
	var child int
	waitFor(t, "the library is loaded", func() bool {
		text, err := os.ReadFile(filepath.Join(dir, "pid"))
		if err == nil {
			child, err = strconv.Atoi(string(text))
		}
		return err == nil
	})
	_ = shim.Process.Kill()
	_ = shim.Wait() // killed
	waitFor(t, "the child is gone", func() bool { return errors.Is(syscall.Kill(child, 0), syscall.ESRCH) })
}

// waitFor fails unless done reports true within the patience.
func waitFor(t *testing.T, what string, done func() bool) {
	t.Helper()
	for deadline := time.After(patience); !done(); {
		select {
		case <-time.After(10 * time.Millisecond):
		case <-deadline:
			t.Fatalf("waited in vain until %s", what)
		}
	}
}

// devices are those of a shim whose guest only prints.
func devices(t *testing.T) (console *os.File, dev shim.Devices) {
	t.Helper()
	console, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = console.Close() })
	null := func() *os.File {
		file, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		return file
	}
	return console, shim.Devices{
		Console: write, Env: null(), Link: null(), Log: null(),
		Started: func(int) {}, Offer: func(c net.Conn) { _ = c.Close() },
	}
}
