//go:build linux

package boot

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
)

func TestEnsureDir(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		make func(dir string) error
		link bool
		// stays tells that what was made is still there.
		stays bool
	}{
		{"nothing", func(string) error { return nil }, false, false},
		{"directory", func(p string) error { return os.Mkdir(p, 0o750) }, false, true},
		{"file", func(p string) error { return os.WriteFile(p, nil, 0o600) }, false, false},
		{"fifo", func(p string) error { return syscall.Mkfifo(p, 0o600) }, false, false},
		{"link to a directory, not allowed", func(p string) error { return os.Symlink(filepath.Dir(p), p) }, false, false},
		{"link to a directory, allowed", func(p string) error { return os.Symlink(filepath.Dir(p), p) }, true, true},
		{"link to nothing", func(p string) error { return os.Symlink("/no/such/place", p) }, true, false},
		{"link to itself", func(p string) error { return os.Symlink(p, p) }, true, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "d")
			if err := c.make(path); err != nil {
				t.Fatal(err)
			}
			before, _ := os.Lstat(path)
			if err := ensureDir(path, 0o1777, c.link); err != nil {
				t.Fatal(err)
			}
			after, err := os.Lstat(path)
			if err != nil {
				t.Fatal(err)
			}
			if c.stays {
				if !os.SameFile(before, after) {
					t.Error("it was replaced")
				}
				return
			}
			if want := os.ModeDir | os.ModeSticky | 0o777; after.Mode() != want {
				t.Errorf("mode %v, want %v", after.Mode(), want)
			}
		})
	}
}

func TestDevices(t *testing.T) {
	t.Parallel()
	dev := t.TempDir()
	for _, name := range []string{"vda", "vdb1", "vport2p1", "null", "vcs"} {
		if err := os.WriteFile(filepath.Join(dev, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 { // a second time finds everything done
		if err := errors.Join(linkDevices(dev), hideDevices(dev)); err != nil {
			t.Fatal(err)
		}
	}
	entries, err := os.ReadDir(dev)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	if got, want := strings.Join(names, " "), "fd null stderr stdin stdout vcs"; got != want {
		t.Errorf("/dev has %q, want %q", got, want)
	}
}

// TestStrangeImage enters, in a mount namespace of its own, a root without any
// of the usual directories but with links and files in their place.
func TestStrangeImage(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("SKIP: mounting needs root")
	}
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env = append(os.Environ(), helperEnv+"="+t.TempDir())
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET}
	out, err := cmd.CombinedOutput()
	if errors.Is(err, syscall.EPERM) {
		t.Skipf("SKIP: this host gives root no mount namespace: %v", err)
	}
	if err != nil || !strings.Contains(string(out), "PASS") {
		t.Errorf("%v\n%s", err, out)
	}
}

func enterStrangeImage(dir string) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, ""); err != nil {
		return err
	}
	if err := errors.Join(
		os.Symlink("/etc", filepath.Join(dir, "proc")),
		os.WriteFile(filepath.Join(dir, "sys"), nil, 0o600),
		os.MkdirAll(filepath.Join(dir, "var/run"), 0o755),
		os.Symlink("var/run", filepath.Join(dir, "run")),
		os.Symlink("/no/such/place", filepath.Join(dir, "tmp")),
	); err != nil {
		return err
	}
	if err := enter(dir); err != nil {
		return fmt.Errorf("enter: %w", err)
	}
	// devtmpfs is the host's own, not to be touched by a test.
	list := kernelFileSystems()
	for i := range list {
		if list[i].fstype == "devtmpfs" {
			list[i].fstype, list[i].source = "tmpfs", "tmpfs"
		}
	}
	if err := mountAll(list); err != nil {
		return err
	}
	if err := errors.Join(linkDevices("/dev"), ensureDir("/tmp", 0o1777, true), writeEtc("/etc", &bootspec.Guest{Hostname: "strange"}), loopbackUp()); err != nil {
		return err
	}
	for path, want := range map[string]int64{
		"/": unix.TMPFS_MAGIC, "/proc": unix.PROC_SUPER_MAGIC, "/sys": unix.SYSFS_MAGIC, "/dev/pts": unix.DEVPTS_SUPER_MAGIC,
		"/dev/shm": unix.TMPFS_MAGIC, "/run": unix.TMPFS_MAGIC, "/dev/fd": unix.PROC_SUPER_MAGIC,
	} {
		var st unix.Statfs_t
		if err := unix.Statfs(path, &st); err != nil || int64(st.Type) != want { //nolint:unconvert // its type differs between machines
			return fmt.Errorf("%s: type %#x, %w, want %#x", path, st.Type, err, want)
		}
	}
	hosts, err := os.ReadFile("/etc/hosts")
	if err != nil || !strings.Contains(string(hosts), "strange") {
		return fmt.Errorf("hosts: %q, %w", hosts, err)
	}
	// The old chroot trick must not lead out.
	if err := errors.Join(os.Mkdir("/tmp/x", 0o700), unix.Chroot("/tmp/x")); err != nil {
		return err
	}
	if err := unix.Chdir("../../../../.."); err != nil {
		return err
	}
	if _, err := os.Stat("var/run"); err != nil {
		return fmt.Errorf("the way up from a chroot does not end in the new root: %w", err)
	}
	return nil
}
