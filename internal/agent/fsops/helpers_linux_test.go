package fsops_test

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
)

// elsewhere is a directory on another file system than t.TempDir's.
func elsewhere(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "fsops-")
	if err != nil {
		t.Skipf("no second file system: %v", err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	var a, b unix.Stat_t
	check(t, unix.Stat(dir, &a))
	check(t, unix.Stat(t.TempDir(), &b))
	if a.Dev == b.Dev {
		t.Skip("no second file system: /dev/shm and the temporary directory are one")
	}
	return dir
}

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func put(t testing.TB, path, content string) string {
	t.Helper()
	check(t, os.MkdirAll(filepath.Dir(path), 0o755))
	check(t, os.WriteFile(path, []byte(content), 0o644))
	return path
}

func content(t testing.TB, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	check(t, err)
	return string(b)
}

// wantCode fails unless err is a fault of that code whose path is the given one,
// where one is given.
func wantCode(t testing.TB, err error, code fault.Code, path ...string) {
	t.Helper()
	var e *fault.Error
	if !errors.As(err, &e) {
		t.Fatalf("got %v, want %s", err, code)
	}
	if e.Code != code {
		t.Fatalf("got %v, want %s", err, code)
	}
	if len(path) > 0 && e.Path != path[0] {
		t.Fatalf("%v is about %q, want %q", err, e.Path, path[0])
	}
}

// names lists what is in dir, temporary names included.
func names(t testing.TB, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	check(t, err)
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

func wantNames(t testing.TB, dir string, want ...string) {
	t.Helper()
	slices.Sort(want)
	if got := names(t, dir); !slices.Equal(got, want) {
		t.Fatalf("%s holds %q, want %q", dir, got, want)
	}
}

func mode(t testing.TB, path string) uint32 {
	t.Helper()
	var st unix.Stat_t
	check(t, unix.Lstat(path, &st))
	return st.Mode & 0o7777
}

func wantMode(t testing.TB, path string, want uint32) {
	t.Helper()
	if got := mode(t, path); got != want {
		t.Fatalf("mode of %s is %04o, want %04o", path, got, want)
	}
}

// snapshot describes a tree: type, mode, owner, size, mtime, content, links,
// attributes and which names are one file.
func snapshot(t testing.TB, root string) string {
	t.Helper()
	var b strings.Builder
	inodes := map[uint64]string{}
	check(t, filepath.WalkDir(root, func(path string, _ os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(root, path)
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		fmt.Fprintf(&b, "%q mode %o owner %d:%d mtime %d.%09d", rel, st.Mode, st.Uid, st.Gid, st.Mtim.Sec, st.Mtim.Nsec)
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			fmt.Fprintf(&b, " size %d content %x", st.Size, sha256.Sum256([]byte(content(t, path))))
		case unix.S_IFLNK:
			target, err := os.Readlink(path)
			check(t, err)
			fmt.Fprintf(&b, " -> %q", target)
		case unix.S_IFCHR, unix.S_IFBLK:
			fmt.Fprintf(&b, " dev %x", st.Rdev)
		}
		if st.Mode&unix.S_IFMT != unix.S_IFDIR && st.Nlink > 1 {
			if first, ok := inodes[st.Ino]; ok {
				fmt.Fprintf(&b, " = %q", first)
			} else {
				inodes[st.Ino] = rel
			}
		}
		value := make([]byte, 100)
		if n, err := unix.Lgetxattr(path, "user.test", value); err == nil {
			fmt.Fprintf(&b, " xattr %q", value[:n])
		}
		b.WriteByte('\n')
		return nil
	}))
	return b.String()
}
