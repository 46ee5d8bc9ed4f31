//go:build cgo && (linux || darwin)

package krun_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/krun"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vmassets"
)

// playCase, set in the environment, makes this program configure and start the
// VM of a case: libkrun ends its process, or aborts it.
const playCase = "KRUN_TEST_PLAYS"

// Statuses of that program where libkrun lets it go on.
const (
	statusReturned = 40 // a call answered with an error, printed
	statusUnready  = 41 // the test itself is wrong
)

func TestMain(m *testing.M) {
	if name := os.Getenv(playCase); name != "" {
		runtime.LockOSThread()
		signal.Ignore(syscall.SIGPIPE)
		os.Exit(play(name))
	}
	os.Exit(m.Run())
}

func play(name string) int {
	lib, err := krun.Open(os.Getenv("KRUN_TEST_LIBRARY"), os.Getenv("KRUN_TEST_FIRMWARE"))
	if err != nil {
		fmt.Println(err)
		return statusReturned
	}
	c, known := cases()[name]
	if !known {
		return statusUnready
	}
	if err := lib.InitLog(2, krun.LogWarn); err != nil {
		fmt.Println(err)
		return statusUnready
	}
	if err := c.play(lib); err != nil {
		fmt.Println(err)
		return statusReturned
	}
	return 0
}

// A refusal is one way not to get a VM.
type refusal struct {
	play func(*krun.Library) error
	// What is seen from outside: a returned error with errno, or a signal.
	errno  syscall.Errno
	signal syscall.Signal
	// words are on its output.
	words []string
}

// start configures the least VM, lets change add to it, and starts it.
func start(change func(*krun.Library, *krun.Context) error) func(*krun.Library) error {
	return func(lib *krun.Library) error {
		ctx, err := lib.NewContext()
		if err != nil {
			return err
		}
		if err := ctx.SetVMConfig(1, 128); err != nil {
			return err
		}
		if err := errors.Join(ctx.DisableImplicitConsole(), ctx.DisableImplicitVsock(), ctx.AddVsock(krun.VsockPlain)); err != nil {
			return err
		}
		if err := errors.Join(ctx.SetRoot("/"), ctx.SetExec("/bin/true", nil, nil)); err != nil {
			return err
		}
		if err := change(lib, ctx); err != nil {
			return err
		}
		return ctx.StartEnter()
	}
}

func cases() map[string]refusal {
	type (
		library = krun.Library
		vm      = krun.Context
	)
	return map[string]refusal{
		"missing disk": {play: start(func(_ *library, c *vm) error {
			return c.AddDisk3("d", "/no/such/disk", krun.Raw, true, false, krun.SyncNone)
		}), errno: syscall.EINVAL},
		"disk is a directory": {play: start(func(_ *library, c *vm) error {
			return c.AddDisk3("d", "/", krun.Raw, false, false, krun.SyncFull)
		}), errno: syscall.EINVAL},
		"console on a closed file": {play: start(func(_ *library, c *vm) error {
			return c.AddVirtioConsoleDefault(krun.NoFile, 999, 999)
		}), signal: syscall.SIGABRT},
		"port on a closed file": {play: start(func(_ *library, c *vm) error {
			n, err := c.AddVirtioConsoleMultiport()
			return errors.Join(err, c.AddConsolePortInOut(n, "iii.env", 999, 998))
		}), signal: syscall.SIGABRT},
		"multiport console without ports": {play: start(func(_ *library, c *vm) error {
			_, err := c.AddVirtioConsoleMultiport()
			return err
		}), signal: syscall.SIGABRT},
		"too many devices": {play: start(func(_ *library, c *vm) error {
			for i := range 12 {
				if err := c.AddDisk3(fmt.Sprint("d", i), os.Args[0], krun.Raw, true, false, krun.SyncNone); err != nil {
					return err
				}
			}
			return nil
		}), errno: syscall.EINVAL},
		"oversized command line": {play: start(func(_ *library, c *vm) error {
			return c.SetExec("/bin/true", nil, []string{"A=" + strings.Repeat("x", 70_000)})
		}), signal: syscall.SIGABRT},
		"command line not of ASCII": {play: start(func(_ *library, c *vm) error {
			return c.SetExec("/bin/true", nil, []string{"A=\u00e9"})
		}), signal: syscall.SIGABRT},
		"newline in the command line": {play: start(func(_ *library, c *vm) error {
			return c.SetExec("/bin/true", []string{"a\nb"}, nil)
		}), signal: syscall.SIGABRT},
		"tiny memory": {play: start(func(_ *library, c *vm) error { return c.SetVMConfig(1, 16) }), signal: syscall.SIGABRT},
		"no memory":   {play: start(func(_ *library, c *vm) error { return c.SetVMConfig(1, 0) }), errno: syscall.EINVAL},
		"no CPU":      {play: start(func(_ *library, c *vm) error { return c.SetVMConfig(0, 128) }), errno: syscall.EINVAL},
		"second vsock device": {play: start(func(_ *library, c *vm) error {
			return c.AddVsock(krun.VsockPlain)
		}), errno: syscall.EEXIST},
		"port of no console": {play: start(func(_ *library, c *vm) error {
			return c.AddConsolePortInOut(7, "iii.env", 0, 1)
		}), errno: syscall.EINVAL},
		"network on neither path nor file": {play: start(func(_ *library, c *vm) error {
			return c.AddNetUnixStream("", krun.NoFile, [6]byte{2, 0, 0, 0, 0, 1}, 0, 0)
		}), errno: syscall.EINVAL},
		"logger set up twice": {play: func(lib *library) error { return lib.InitLog(2, krun.LogWarn) }, signal: syscall.SIGABRT},
		"started twice": {play: func(lib *library) error {
			ctx, err := lib.NewContext()
			if err != nil {
				return err
			}
			if err := ctx.Free(); err != nil {
				return err
			}
			return ctx.StartEnter()
		}, errno: syscall.ENOENT},
		"no KVM device":        {play: start(func(*library, *vm) error { return hideKVM("") }), signal: syscall.SIGABRT, words: []string{"Error(2)"}},
		"KVM device of others": {play: start(func(*library, *vm) error { return hideKVM("others") }), signal: syscall.SIGABRT, words: []string{"Error(13)"}},
		"another device":       {play: start(func(*library, *vm) error { return hideKVM("/dev/null") }), errno: syscall.EINVAL, words: []string{"KvmApiVersion"}},
		"no firmware":          {play: start(func(*library, *vm) error { return nil }), errno: syscall.ENOENT, words: []string{"libkrunfw"}},
	}
}

// outcome is how a case's process ended.
type outcome struct {
	state  *os.ProcessState
	output string
	took   time.Duration
}

func runCase(t *testing.T, name string, pair [2]string, env ...string) outcome {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Args[0])
	cmd.Env = append([]string{playCase + "=" + name, "KRUN_TEST_LIBRARY=" + pair[0], "KRUN_TEST_FIRMWARE=" + pair[1]}, env...)
	var output bytes.Buffer
	cmd.Stdout, cmd.Stderr = &output, &output
	began := time.Now()
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return outcome{cmd.ProcessState, output.String(), time.Since(began)}
}

// Each mistake ends as package shim/libkrun has to expect it: the call that is
// refused, or the signal, and never as a VM that ended well.
func TestRefusals(t *testing.T) {
	pair := realPair(t)
	for _, name := range slices.Sorted(maps.Keys(cases())) {
		t.Run(name, func(t *testing.T) {
			want, pair := cases()[name], pair
			if strings.Contains(name, "KVM") && (os.Geteuid() != 0 || runtime.GOOS != "linux") {
				t.Skip("SKIP: hiding /dev/kvm needs root on Linux")
			}
			if name == "no firmware" {
				pair[1] = ""
			}
			got := runCase(t, name, pair)
			t.Logf("%v after %v: %s", got.state, got.took.Round(time.Millisecond), strings.TrimSpace(got.output))
			status, _ := got.state.Sys().(syscall.WaitStatus)
			switch {
			case want.signal != 0 && (!status.Signaled() || status.Signal() != want.signal):
				t.Errorf("it did not end by %v", want.signal)
			case want.errno != 0 && (status.ExitStatus() != statusReturned || !strings.Contains(got.output, fmt.Sprintf("(errno %d)", int(want.errno)))):
				t.Errorf("no call answered with errno %d", int(want.errno))
			}
			for _, word := range want.words {
				if !strings.Contains(got.output, word) {
					t.Errorf("its output does not have %q", word)
				}
			}
			if strings.Contains(got.output, "goroutine ") {
				t.Error("the Go runtime panicked")
			}
		})
	}
}

// realPair is the real library, fetched once into a cache of the tests.
func realPair(t *testing.T) [2]string {
	t.Helper()
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Skipf("SKIP: no directory for the real libkrun: %v", err)
	}
	dir := filepath.Join(cache, "iii-sandbox-test")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	pair, err := vmassets.SetupLibkrun(t.Context(), vmassets.Options{
		Dir: dir, Log: slog.New(slog.DiscardHandler), Getenv: os.Getenv,
	})
	if err != nil {
		t.Skipf("SKIP: no real libkrun to test with: %v", err)
	}
	return [2]string{pair.Library, pair.Firmware}
}

// What the real library tells of itself.
func TestOpen(t *testing.T) {
	t.Parallel()
	pair := realPair(t)
	lib, err := krun.Open(pair[0], pair[1])
	if err != nil {
		t.Fatal(err)
	}
	if lib.Path() != pair[0] || lib.Firmware() != pair[1] {
		t.Errorf("it was loaded from %s and %s", lib.Path(), lib.Firmware())
	}
	if !lib.Has(krun.FeatureNet) || !lib.Has(krun.FeatureBlk) || lib.Has(1000) {
		t.Error("the features are not those of a build with disks and network")
	}
	t.Logf("optional functions that it lacks: %q", lib.Missing())
	ctx, err := lib.NewContext()
	if err != nil {
		t.Fatal(err)
	}
	if err := ctx.AddVirtiofs3("t", "/", 0, true); slices.Contains(lib.Missing(), "krun_add_virtiofs3") && !errors.Is(err, syscall.ENOSYS) {
		t.Errorf("a function that is not there answers %v", err)
	}
	if err := ctx.Free(); err != nil {
		t.Error(err)
	}
	err = ctx.SetVMConfig(1, 64)
	if known := (*krun.Error)(nil); !errors.As(err, &known) || known.Call != "krun_set_vm_config" || !errors.Is(err, syscall.ENOENT) {
		t.Errorf("a context that was freed: %v", err)
	}
}

func TestOpenSaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	text := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(text, []byte("no library"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range [][3]string{
		{"/no/libkrun.so.1", "", "load libkrun: /no/libkrun.so.1"},
		{"libno-such-krun.so.1", "", "libno-such-krun.so.1"},
		{"relative/libkrun.so.1", "", "absolute"},
		{text, "", text},
		{"/no/libkrun.so.1", "/no/libkrunfw.so.5", "load libkrunfw: /no/libkrunfw.so.5"},
		{"libc.so.6", "", "has no krun_init_log, krun_create_ctx"},
	} {
		if c[0] == "libc.so.6" && runtime.GOOS != "linux" {
			continue
		}
		if _, err := krun.Open(c[0], c[1]); err == nil || !strings.Contains(err.Error(), c[2]) {
			t.Errorf("%q: error is %v, want %q in it", c[:2], err, c[2])
		}
	}
}
