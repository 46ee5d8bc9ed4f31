package vmassets_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/vmassets"
)

// snapshotInputs are two files and a machine.
func snapshotInputs(t *testing.T) vmassets.SnapshotInputs {
	t.Helper()
	dir := t.TempDir()
	in := vmassets.SnapshotInputs{Machine: "microvm, 1 CPU"}
	for _, name := range []string{"qemu", "kernel"} {
		path := filepath.Join(dir, name)
		writeFile(t, path, []byte(name), 0o700)
		in.Files = append(in.Files, path)
	}
	return in
}

func saveText(text string, calls *atomic.Int32) func(context.Context, *os.File) error {
	return func(_ context.Context, f *os.File) error {
		calls.Add(1)
		_, err := f.WriteString(text)
		return err
	}
}

// A Go program that was touched, as a build does that changes nothing, is the same;
// any other file may have changed.
func TestSnapshotOutlivesATouchedProgram(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("SKIPPED: the build ID is looked for in ELF files")
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	root, in := privateDir(t), snapshotInputs(t)
	program := filepath.Join(t.TempDir(), "krun-shim")
	writeFile(t, program, readFile(t, self), 0o700)
	in.Files = append(in.Files, program)
	var calls atomic.Int32
	for i, touched := range []string{"", program, in.Files[0]} {
		if touched != "" {
			day := time.Now().Add(time.Duration(i) * 24 * time.Hour)
			if err := os.Chtimes(touched, day, day); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := vmassets.Snapshot(t.Context(), root, in, saveText("state", &calls)); err != nil {
			t.Fatal(err)
		}
		if want := int32(1 + i/2); calls.Load() != want {
			t.Errorf("touched %q: it was made %d times, want %d", touched, calls.Load(), want)
		}
	}
}

func TestSnapshotIsMadeOnce(t *testing.T) {
	t.Parallel()
	root, in := privateDir(t), snapshotInputs(t)
	var calls atomic.Int32
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			path, err := vmassets.Snapshot(t.Context(), root, in, saveText("state", &calls))
			if err != nil {
				t.Error(err)
				return
			}
			if got := string(readFile(t, path)); got != "state" {
				t.Errorf("the snapshot is %q", got)
			}
		})
	}
	all.Wait()
	if calls.Load() != 1 {
		t.Errorf("it was made %d times", calls.Load())
	}
	noTemporaries(t, filepath.Join(root, "snapshots"))
}

// What is not a file, such as a fifo that nobody writes to, gives way to one.
func TestSnapshotReplacesWhatIsNoFile(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(path string) error{
		"directory": func(path string) error { return os.MkdirAll(filepath.Join(path, "x"), 0o700) },
		"fifo":      func(path string) error { return unix.Mkfifo(path, 0o600) },
		"link":      func(path string) error { return os.Symlink("/dev/zero", path) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			root, in := privateDir(t), snapshotInputs(t)
			var calls atomic.Int32
			path, err := vmassets.Snapshot(t.Context(), root, in, saveText("state", &calls))
			if err = errors.Join(err, os.Remove(path), spoil(path)); err != nil {
				t.Fatal(err)
			}
			if again, err := vmassets.Snapshot(t.Context(), root, in, saveText("state", &calls)); err != nil || again != path || calls.Load() != 2 {
				t.Fatalf("%q, %v, made %d times", again, err, calls.Load())
			}
			info, err := os.Lstat(path)
			if err != nil || !info.Mode().IsRegular() || string(readFile(t, path)) != "state" {
				t.Errorf("it is %v, %v", info, err)
			}
			noTemporaries(t, filepath.Dir(path))
		})
	}
}

func TestSnapshotIsOfItsInputs(t *testing.T) {
	t.Parallel()
	root, in := privateDir(t), snapshotInputs(t)
	var calls atomic.Int32
	paths := map[string]bool{}
	get := func() {
		t.Helper()
		path, err := vmassets.Snapshot(t.Context(), root, in, saveText("state", &calls))
		if err != nil {
			t.Fatal(err)
		}
		paths[path] = true
	}
	get()
	in.Machine = "microvm, 2 CPUs"
	get()
	writeFile(t, in.Files[0], []byte("qemu, next version"), 0o700)
	get()
	boot := filepath.Join(t.TempDir(), "boot_id")
	in.Contents = []string{boot}
	for _, id := range []string{"a", "b", "a"} {
		writeFile(t, boot, []byte(id), 0o600)
		get()
	}
	if len(paths) != 5 || calls.Load() != 5 {
		t.Errorf("%d snapshots, made %d times, want 5", len(paths), calls.Load())
	}
	in.Contents[0] += ".gone"
	if _, err := vmassets.Snapshot(t.Context(), root, in, saveText("state", &calls)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without what it must say: %v", err)
	}
	in.Contents = nil
	in.Files[1] += ".gone"
	if _, err := vmassets.Snapshot(t.Context(), root, in, saveText("state", &calls)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without its kernel: %v", err)
	}
}

func TestSnapshotThatFailsIsNotTriedAtOnce(t *testing.T) {
	t.Parallel()
	for name, later := range map[string]time.Duration{"two minutes later": 2 * time.Minute, "clock set back": -time.Hour} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			failAndRetry(t, later)
		})
	}
}

// failAndRetry has the making of a snapshot fail, and makes it again when the
// clock says that later.
func failAndRetry(t *testing.T, later time.Duration) {
	t.Helper()
	root, in := privateDir(t), snapshotInputs(t)
	broken := errors.New("no such machine")
	_, err := vmassets.Snapshot(t.Context(), root, in, func(_ context.Context, f *os.File) error {
		_, err := f.WriteString("half a sta")
		return errors.Join(err, broken)
	})
	if !errors.Is(err, broken) {
		t.Fatalf("got %v", err)
	}
	var calls atomic.Int32
	if path, err := vmassets.Snapshot(t.Context(), root, in, saveText("state", &calls)); !errors.Is(err, vmassets.ErrNoSnapshot) || calls.Load() != 0 {
		t.Errorf("at once: %q, %v, made %d times", path, err, calls.Load())
	}
	dir := filepath.Join(root, "snapshots")
	noTemporaries(t, dir)
	marks, err := filepath.Glob(filepath.Join(dir, "*.failed"))
	if err != nil || len(marks) != 1 {
		t.Fatalf("marks %q, %v", marks, err)
	}
	before := time.Now().Add(-later)
	if err := os.Chtimes(marks[0], before, before); err != nil {
		t.Fatal(err)
	}
	if _, err := vmassets.Snapshot(t.Context(), root, in, saveText("state", &calls)); err != nil || calls.Load() != 1 {
		t.Errorf("later: %v, made %d times", err, calls.Load())
	}
	if _, err := os.Stat(marks[0]); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the mark is still there: %v", err)
	}
}

// A caller who gives up is no reason not to try again.
func TestSnapshotOfACallerThatLeft(t *testing.T) {
	t.Parallel()
	root, in := privateDir(t), snapshotInputs(t)
	ctx, cancel := context.WithCancel(t.Context())
	_, err := vmassets.Snapshot(ctx, root, in, func(ctx context.Context, _ *os.File) error {
		cancel()
		return ctx.Err()
	})
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v", err)
	}
	var calls atomic.Int32
	if _, err := vmassets.Snapshot(t.Context(), root, in, saveText("state", &calls)); err != nil || calls.Load() != 1 {
		t.Errorf("the next caller: %v, made %d times", err, calls.Load())
	}
}

func TestOldSnapshotsAreRemoved(t *testing.T) {
	t.Parallel()
	root, in := privateDir(t), snapshotInputs(t)
	var calls atomic.Int32
	var paths []string
	for i := range 7 {
		in.Machine = string(rune('a' + i))
		path, err := vmassets.Snapshot(t.Context(), root, in, saveText("state", &calls))
		if err != nil {
			t.Fatal(err)
		}
		paths = append(paths, path)
	}
	// What is no snapshot goes too.
	if err := errors.Join(os.Remove(paths[0]), os.MkdirAll(filepath.Join(paths[0], "x"), 0o700)); err != nil {
		t.Fatal(err)
	}
	// The first six were last used six minutes ago or more, the first longest.
	for i, path := range paths[:6] {
		used := time.Now().Add(time.Duration(i-12) * time.Minute)
		if err := os.Chtimes(path, used, used); err != nil {
			t.Fatal(err)
		}
	}
	in.Machine = "new"
	if _, err := vmassets.Snapshot(t.Context(), root, in, saveText("state", &calls)); err != nil {
		t.Fatal(err)
	}
	for i, path := range paths {
		_, err := os.Stat(path)
		if gone := errors.Is(err, os.ErrNotExist); gone != (i < 4) {
			t.Errorf("snapshot %d: gone is %v", i, gone)
		}
	}
}
