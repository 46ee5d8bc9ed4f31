package vmassets_test

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/vmtest"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vmassets"
)

func kinds() map[string]vmassets.UpperKind {
	return map[string]vmassets.UpperKind{"ephemeral": vmassets.Ephemeral, "durable": vmassets.Durable}
}

func TestUpperIsASoundEmptyFileSystem(t *testing.T) {
	t.Parallel()
	for name, kind := range kinds() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "upper [1].ext4")
			if err := vmassets.CreateUpper(path, kind); err != nil {
				t.Fatal(err)
			}
			info, err := os.Stat(path)
			if err != nil {
				t.Fatal(err)
			}
			if info.Size() != vmassets.UpperSize || info.Mode() != 0o600 {
				t.Errorf("size %d, mode %v", info.Size(), info.Mode())
			}
			if st, ok := info.Sys().(*syscall.Stat_t); ok && st.Blocks*512 > 1<<20 {
				t.Errorf("it takes %d KiB of the host's disk", st.Blocks/2)
			}
			noTemporaries(t, filepath.Dir(path))
			e2fsck := needProgram(t, "e2fsck", "/usr/sbin/e2fsck")
			if out, err := exec.CommandContext(t.Context(), e2fsck, "-fn", path).CombinedOutput(); err != nil {
				t.Errorf("e2fsck: %v: %s", err, out)
			}
			dumpe2fs := needProgram(t, "dumpe2fs", "/usr/sbin/dumpe2fs")
			out, err := exec.CommandContext(t.Context(), dumpe2fs, path).Output()
			if err != nil {
				t.Fatal(err)
			}
			if journal := strings.Contains(string(out), "has_journal"); journal != (kind == vmassets.Durable) {
				t.Errorf("has a journal: %v", journal)
			}
			// Without this mark the guest zeroes all inode tables after the mount.
			groups, zeroed := strings.Count(string(out), ": (Blocks "), strings.Count(string(out), "ITABLE_ZEROED")
			if groups != 128 || zeroed != groups {
				t.Errorf("of %d groups %d have zeroed inode tables", groups, zeroed)
			}
		})
	}
}

// unmount waits for the mount to be free: a child that another test is just
// forking has our files open until it runs its program.
func unmount(t *testing.T, dir string) {
	t.Helper()
	var err error
	vmtest.Eventually(t, 10*time.Second, "the mount is free", func() bool {
		err = syscall.Unmount(dir, 0)
		return !errors.Is(err, syscall.EBUSY)
	})
	if err != nil {
		t.Errorf("unmount %s: %v", dir, err)
	}
}

func TestUpperIsMountedByThisKernel(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("SKIP: mounting needs root")
	}
	for name, kind := range kinds() {
		path, dir := filepath.Join(t.TempDir(), "upper.ext4"), t.TempDir()
		if err := vmassets.CreateUpper(path, kind); err != nil {
			t.Fatal(err)
		}
		if out, err := exec.CommandContext(t.Context(), "mount", "-t", "ext4", "-o", "loop", path, dir).CombinedOutput(); err != nil {
			t.Skipf("SKIP: this host mounts no loop devices: %v: %s", err, out)
		}
		data := bytes.Repeat([]byte("abc"), 1<<20)
		if err := os.WriteFile(filepath.Join(dir, "file"), data, 0o644); err != nil {
			t.Error(name, err)
		}
		if got, err := os.ReadFile(filepath.Join(dir, "file")); err != nil || !bytes.Equal(got, data) {
			t.Errorf("%s: read back %d bytes, %v", name, len(got), err)
		}
		unmount(t, dir)
		if e2fsck, err := exec.LookPath("e2fsck"); err == nil {
			if out, err := exec.CommandContext(t.Context(), e2fsck, "-fn", path).CombinedOutput(); err != nil {
				t.Errorf("%s: e2fsck after use: %v: %s", name, err, out)
			}
		}
	}
}

func TestUpperNeverReplacesAFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	target := filepath.Join(dir, "target")
	writeFile(t, target, []byte("precious"), 0o600)
	link := filepath.Join(dir, "link")
	if err := os.Symlink(filepath.Join(dir, "nowhere"), link); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{target, link, dir} {
		if err := vmassets.CreateUpper(path, vmassets.Durable); !errors.Is(err, fs.ErrExist) {
			t.Errorf("%s: the error is %v", path, err)
		}
	}
	if string(readFile(t, target)) != "precious" {
		t.Error("the file was replaced")
	}
	if _, err := os.Stat(filepath.Join(dir, "nowhere")); err == nil {
		t.Error("a symlink was followed")
	}
	err := vmassets.CreateUpper(filepath.Join(dir, "none", "upper"), vmassets.Ephemeral)
	if !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("missing directory: %v", err)
	}
	noTemporaries(t, dir)
}

func TestUpperIsMadeByOneOfMany(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "upper.ext4")
	var made, refused atomic.Int32
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			switch err := vmassets.CreateUpper(path, vmassets.Ephemeral); {
			case err == nil:
				made.Add(1)
			case errors.Is(err, fs.ErrExist):
				refused.Add(1)
			default:
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if made.Load() != 1 || refused.Load() != 7 {
		t.Errorf("made %d, refused %d", made.Load(), refused.Load())
	}
	noTemporaries(t, filepath.Dir(path))
}

func TestUpperOnAFullDiskLeavesNothing(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("SKIP: mounting needs root")
	}
	dir := t.TempDir()
	if out, err := exec.CommandContext(t.Context(), "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", dir).CombinedOutput(); err != nil {
		t.Skipf("SKIP: this host mounts no tmpfs: %v: %s", err, out)
	}
	t.Cleanup(func() { unmount(t, dir) })
	for name, kind := range kinds() {
		path := filepath.Join(dir, "upper.ext4")
		err := vmassets.CreateUpper(path, kind)
		if !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "free some disk space") {
			t.Errorf("%s: the error is %v", name, err)
		}
		if _, err := os.Stat(path); err == nil {
			t.Errorf("%s: a half disk was left", name)
		}
		noTemporaries(t, dir)
	}
}

// TestTemplatesAreReproducible makes them again, where the same mke2fs is there.
func TestTemplatesAreReproducible(t *testing.T) {
	t.Parallel()
	mke2fs := needProgram(t, "mke2fs", "/usr/sbin/mke2fs")
	out, err := exec.CommandContext(t.Context(), mke2fs, "-V").CombinedOutput()
	if err != nil {
		t.Fatal(err)
	}
	const madeWith = "mke2fs 1.47.0 "
	if !strings.Contains(string(out), madeWith) {
		t.Skipf("SKIP: the templates were made with %s", madeWith)
	}
	dir := t.TempDir()
	if out, err := exec.CommandContext(t.Context(), "go", "run", "../../build/upper", "-dir", dir).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for name := range kinds() {
		if !bytes.Equal(readFile(t, filepath.Join(dir, name+".gz")), readFile(t, filepath.Join("upper", name+".gz"))) {
			t.Errorf("template %s differs from the one that build/upper makes: run go generate", name)
		}
	}
}

func BenchmarkCreateUpper(b *testing.B) {
	for name, kind := range kinds() {
		b.Run(name, func(b *testing.B) {
			path := filepath.Join(b.TempDir(), "upper.ext4")
			for b.Loop() {
				if err := vmassets.CreateUpper(path, kind); err != nil {
					b.Fatal(err)
				}
				if err := os.Remove(path); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
