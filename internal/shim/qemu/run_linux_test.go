package qemu_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/proc"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/shim"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/shim/qemu"
)

// A snapshot that is no file must not be waited for, nor keep the VM from
// running.
func TestSnapshotThatIsNoFile(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(path string) error{
		"fifo":      func(path string) error { return unix.Mkfifo(path, 0o600) },
		"directory": func(path string) error { return os.Mkdir(path, 0o700) },
		"device":    func(path string) error { return os.Symlink("/dev/zero", path) },
		"nothing":   func(string) error { return nil },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			s := spec("q35")
			s.QEMU.Binary, s.QEMU.Snapshot = filepath.Join(dir, "qemu"), filepath.Join(dir, "snapshot")
			script := "#!/bin/sh\ncase \"$*\" in *-incoming*) exit 1;; esac\n"
			if err := proc.WriteProgram(s.QEMU.Binary, []byte(script)); err != nil {
				t.Fatal(err)
			}
			if err := spoil(s.QEMU.Snapshot); err != nil {
				t.Fatal(err)
			}
			dev := shim.Devices{Started: func(int) {}}
			for _, file := range []**os.File{&dev.Env, &dev.Link, &dev.Console, &dev.Log} {
				var err error
				if *file, err = os.OpenFile(os.DevNull, os.O_RDWR, 0); err != nil {
					t.Fatal(err)
				}
			}
			ended := make(chan bootspec.End, 1)
			go func() { ended <- qemu.Hypervisor{}.Run(t.Context(), s, dev) }()
			select {
			case end := <-ended:
				if end.Class != bootspec.EndGuest {
					t.Errorf("it ended with %+v", end)
				}
			case <-time.After(20 * time.Second):
				t.Fatal("it waits for the snapshot")
			}
		})
	}
}
