package shim_test

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
)

func TestBadSpecs(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		spec func(*vm)
		want []string
	}{
		{"many faults at once", func(v *vm) { v.spec.CPUs, v.spec.MemoryMiB = 0, 1 }, []string{"cpus is 0", "memory_mib is 1"}},
		{"id", func(v *vm) { v.spec.ID = "../x" }, []string{`"../x"`}},
		{"long socket", func(v *vm) { v.spec.Socket = "/tmp/" + strings.Repeat("x", 96) }, []string{"101 bytes"}},
		{"no lower", func(v *vm) { v.spec.Lower.Path += "x" }, []string{"lower: open", "no such file"}},
		{"empty lower", func(v *vm) { _ = os.Truncate(v.spec.Lower.Path, 0) }, []string{"lower: ", "is empty"}},
		{"lower is a directory", func(v *vm) { v.spec.Lower.Path = v.spec.Dir }, []string{"lower: ", "not a regular file"}},
		{"upper is a fifo", func(v *vm) {
			v.spec.Upper.Path = filepath.Join(v.spec.Dir, "fifo")
			_ = syscall.Mkfifo(v.spec.Upper.Path, 0o600)
		}, []string{"upper: ", "not a regular file"}},
		{"writable lower", func(v *vm) { v.spec.Lower.ReadOnly = false }, []string{"lower.read_only"}},
		{"environment that swells as JSON", func(v *vm) {
			v.spec.Guest.Env = []string{"A=" + strings.Repeat("\x01", bootspec.MaxEnv-3)}
		}, []string{"as JSON"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			v := newVM(t)
			tt.spec(v)
			v.start()
			v.expectEnd(bootspec.EndBadSpec, "")
			end := v.end
			for _, want := range tt.want {
				if !strings.Contains(end.Message, want) {
					t.Errorf("the message is %q, want %q in it", end.Message, want)
				}
			}
			if v.machine.ran() {
				t.Error("a machine was started")
			}
			if v.reported() != end {
				t.Errorf("the report is %+v, Run told %+v", v.reported(), end)
			}
			if exists(v.spec.Socket) {
				t.Error("a socket is left")
			}
		})
	}
}

func TestHypervisorMayRefuse(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		err   error
		class bootspec.EndClass
	}{
		{errors.New("no emulator: install it"), bootspec.EndRefused},
		{bootspec.End{Class: bootspec.EndBadSpec, Message: "no emulator: install it"}, bootspec.EndBadSpec},
	} {
		v := newVM(t)
		v.machine.refuse = tt.err
		v.start()
		v.expectEnd(tt.class, "no emulator: install it")
	}
}

func TestDisksAreLocked(t *testing.T) {
	t.Parallel()
	first := newVM(t).start()
	first.until("the VM runs", running)

	// The image may serve another VM, the upper may not.
	second := newVM(t)
	second.spec.Lower = first.spec.Lower
	second.start()
	second.until("the VM runs", running)

	third := newVM(t)
	third.spec.Upper = first.spec.Upper
	third.start()
	third.expectEnd(bootspec.EndRefused, "in use by another VM")
	if third.machine.ran() {
		t.Error("a machine was started")
	}

	// A VM that is just ending is waited for.
	fourth := newVM(t)
	fourth.spec.Upper = first.spec.Upper
	first.kill(nil)
	fourth.start()
	fourth.until("the VM runs", running)
}

func TestMachineDirectoryHasOneShim(t *testing.T) {
	t.Parallel()
	first := newVM(t).start()
	first.until("the VM runs", running)
	second := newVM(t)
	second.spec.Dir = first.spec.Dir
	second.start()
	second.expectEnd(bootspec.EndBadSpec, "belongs to a VM that runs")
	if exists(filepath.Join(first.spec.Dir, "end.json")) {
		t.Error("the second reported its end into the first one's directory")
	}
}

func TestInheritedLockIsKeptUntilTheEnd(t *testing.T) {
	t.Parallel()
	v := newVM(t)
	launcher, err := os.OpenFile(filepath.Join(v.spec.Dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Flock(int(launcher.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		t.Fatal(err)
	}
	fd, err := syscall.Dup(int(launcher.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	v.lock = os.NewFile(uintptr(fd), "lock")
	v.start()
	v.until("the VM runs", running)
	if err := launcher.Close(); err != nil {
		t.Fatal(err)
	}
	other, err := os.Open(filepath.Join(v.spec.Dir, "lock"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = other.Close() }()
	if err := syscall.Flock(int(other.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); !errors.Is(err, syscall.EWOULDBLOCK) {
		t.Errorf("the lock can be taken while the VM runs: %v", err)
	}
	v.kill(nil)
	v.wait()
	if err := syscall.Flock(int(other.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		t.Errorf("the lock cannot be taken after the end: %v", err)
	}
}

func TestSocketInUse(t *testing.T) {
	t.Parallel()
	v := newVM(t)
	dir := filepath.Dir(v.spec.Socket)
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	lis, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", v.spec.Socket)
	if err != nil {
		t.Fatal(err)
	}
	unixListener, ok := lis.(*net.UnixListener)
	if !ok {
		t.Fatal("not a unix listener")
	}
	unixListener.SetUnlinkOnClose(false)

	second := newVM(t)
	second.spec.Socket = v.spec.Socket
	second.start()
	second.expectEnd(bootspec.EndRefused, "served by another shim")
	if !exists(v.spec.Socket) {
		t.Fatal("the other's socket was removed")
	}

	// Nobody behind it any more: it is replaced.
	if err := lis.Close(); err != nil {
		t.Fatal(err)
	}
	v.start()
	v.until("the VM runs", running)
}

func TestSocketDirectoryOfOthersIsRefused(t *testing.T) {
	t.Parallel()
	v := newVM(t)
	dir := filepath.Dir(v.spec.Socket)
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	v.start()
	v.expectEnd(bootspec.EndRefused, "may be written to by other users")
}
