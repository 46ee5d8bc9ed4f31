package libkrun_test

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/shim/libkrun"
)

func TestCheckNamesEachFaultAndItsCure(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("SKIP: what libraries and devices look like is checked on Linux")
	}
	dir := shortDir(t)
	file := func(name string, mode os.FileMode, content string) string {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(content), mode)); err != nil {
			t.Fatal(err)
		}
		return path
	}
	text, odd := file("text", 0o600, "no library"), file("odd", 0o600, strings.Repeat("x", 513))
	file("root/agent", 0o700, "agent")
	file("plain/agent", 0o600, "agent")
	for name, c := range map[string]struct {
		change func(*bootspec.Spec)
		device string
		want   []string
	}{
		"nothing of libkrun": {func(s *bootspec.Spec) { s.Libkrun = nil }, "", []string{"bad-spec", "libkrun part is missing"}},
		"everything at once": {
			func(s *bootspec.Spec) {
				s.Libkrun = &bootspec.LibkrunSpec{Library: "/no/k", Firmware: "/no/fw", Root: "/no/root"}
			}, "",
			[]string{"bad-spec", "/no/k", "/no/fw", "/no/root/agent", "adapter vmm setup --libkrun"},
		},
		"no library":               {func(s *bootspec.Spec) { s.Libkrun.Library = text }, "", []string{"is not a shared library"}},
		"a directory":              {func(s *bootspec.Spec) { s.Libkrun.Firmware = dir }, "", []string{"not a regular file"}},
		"agent that is no program": {func(s *bootspec.Spec) { s.Libkrun.Root = filepath.Join(dir, "plain") }, "", []string{"not an executable"}},
		"CPUs":                     {func(s *bootspec.Spec) { s.CPUs = 17 }, "", []string{"cpus is 17", "16"}},
		"half a sector":            {func(s *bootspec.Spec) { s.Lower.Path = odd }, "", []string{"lower", "512"}},
		"no device":                {func(*bootspec.Spec) {}, filepath.Join(dir, "none"), []string{"is missing", "adapter doctor", "--vmm qemu"}},
		"another device":           {func(*bootspec.Spec) {}, os.DevNull, []string{"is not the KVM device"}},
		"no device at all":         {func(*bootspec.Spec) {}, dir, []string{"open " + dir}},
	} {
		s := spec()
		s.Dir, s.Libkrun.Root = dir, filepath.Join(dir, "root")
		s.Libkrun.Library = realLibrary(t)
		s.Libkrun.Firmware = s.Libkrun.Library
		c.change(s)
		err := libkrun.Hypervisor{Device: c.device}.Check(s)
		for _, want := range c.want {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: error is %v, want %q in it", name, err, want)
			}
		}
		if err != nil && strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: the error has several lines: %v", name, err)
		}
	}
}

// realLibrary is some shared library of this host.
func realLibrary(t *testing.T) string {
	t.Helper()
	for _, pattern := range []string{"/lib/*/libc.so.6", "/lib64/libc.so.6", "/usr/lib/libc.so.6"} {
		if found, _ := filepath.Glob(pattern); len(found) > 0 {
			return found[0]
		}
	}
	t.Skip("SKIP: no libc.so.6 to play a library")
	return ""
}
