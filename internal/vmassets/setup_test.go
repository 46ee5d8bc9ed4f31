package vmassets_test

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/vmassets"
)

// archive is a package archive of the tests: scripts named like Debian's
// package client that serve what lies in a directory.
type archive struct {
	t    *testing.T
	dir  string // bin/, and what the scripts read and write
	tree string // the unpacked package
}

// The scripts obey files in $A: lists (the meta package's record), offered (the
// version to be had), fail-<program> (what to say and fail with), hang (stop in
// the download); they append what they were asked to log.
const (
	aptCacheScript = `echo "apt-cache $*" >>"$A/log"
test -s "$A/lists" || { echo "E: No packages found" >&2; exit 100; }
cat "$A/lists"`
	aptGetScript = `echo "apt-get $*" >>"$A/log"
test -e "$A/fail-apt-get" && { cat "$A/fail-apt-get" >&2; exit 100; }
case "$*" in
*update) cp "$A/newlists" "$A/lists" || exit 100;;
*download*)
  test -e "$A/hang" && { echo half >part.deb; echo $$ >"$A/hanging.tmp"; mv "$A/hanging.tmp" "$A/hanging"; exec sleep 600; }
  case "$*" in *"=$(cat "$A/offered")") ;; *) echo "E: 404 Not Found" >&2; exit 100;; esac
  echo package >"kernel_$(cat "$A/offered")_any.deb";;
esac`
	dpkgScript = `echo "dpkg-deb $*" >>"$A/log"
test -e "$A/fail-dpkg-deb" && { cat "$A/fail-dpkg-deb" >&2; exit 2; }
grep -q package "$2" || exit 2
cp -r "$A/tree/." "$3"`
)

func newArchive(t *testing.T) *archive {
	t.Helper()
	if runtime.GOARCH != "amd64" {
		t.Skip("SKIP: the kernels made here are for amd64")
	}
	a := &archive{t: t, dir: t.TempDir()}
	a.tree = filepath.Join(a.dir, "tree")
	for name, script := range map[string]string{"apt-cache": aptCacheScript, "apt-get": aptGetScript, "dpkg-deb": dpkgScript} {
		body := fmt.Sprintf("#!/bin/sh\nPATH=/usr/bin:/bin\nA='%s'\n%s\n", a.dir, script)
		writeFile(t, filepath.Join(a.dir, "bin", name), []byte(body), 0o755)
	}
	a.offer("6.9.1-1")
	a.put("lists", string(readFile(t, filepath.Join(a.dir, "newlists"))))
	return a
}

// offer puts a version into the archive, which lists learn at the next update.
func (a *archive) offer(version string) {
	a.t.Helper()
	meta := "Package: linux-image-cloud-amd64\nVersion: " + version + "\nDepends: linux-image-" + fakeRelease + " (= " + version + ")\nSize: 1\n"
	a.put("offered", version)
	a.put("newlists", meta)
	writeTree(a.t, filepath.Join(a.tree, "lib/modules", fakeRelease), debianTree())
	writeFile(a.t, filepath.Join(a.tree, "boot/vmlinuz-"+fakeRelease), bzImage(payload(a.t, "lz4", vmlinux(true, version))), 0o644)
}

func (a *archive) put(name, content string) {
	a.t.Helper()
	writeFile(a.t, filepath.Join(a.dir, name), []byte(content), 0o644)
}

// asked counts the lines of the log that have all these words.
func (a *archive) asked(words ...string) int {
	a.t.Helper()
	log, err := os.ReadFile(filepath.Join(a.dir, "log"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		a.t.Fatal(err)
	}
	n := 0
lines:
	for line := range strings.SplitSeq(string(log), "\n") {
		for _, word := range words {
			if !strings.Contains(line, word) {
				continue lines
			}
		}
		n++
	}
	return n
}

func (a *archive) options(dir string) vmassets.Options {
	return vmassets.Options{
		Dir: dir, Log: slog.New(slog.DiscardHandler), Getenv: env("PATH", filepath.Join(a.dir, "bin")),
	}
}

func (a *archive) setup(dir string) (*vmassets.Kernel, error) {
	return vmassets.Setup(a.t.Context(), a.options(dir))
}

func TestSetupFetchesOnce(t *testing.T) {
	t.Parallel()
	a, dir := newArchive(t), privateDir(t)
	var progress bytes.Buffer
	o := a.options(dir)
	o.Progress = &progress
	k, err := vmassets.Setup(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if k.Version != "6.9.1-1" || k.Release != fakeRelease || len(k.Modules) != 14 {
		t.Errorf("kernel is %+v", k)
	}
	for _, want := range []string{"downloading linux-image-6.9.0-fake 6.9.1-1", "unpacking", "ready"} {
		if !strings.Contains(progress.String(), want) {
			t.Errorf("progress %q does not say %q", progress.String(), want)
		}
	}
	if !bytes.Equal(readFile(t, k.Image), vmlinux(true, "6.9.1-1")) {
		t.Error("the image is not the package's kernel")
	}
	found, err := vmassets.Find(dir, env())
	if err != nil || found.Image != k.Image {
		t.Errorf("found %v, %v", found, err)
	}
	// Now nothing is asked, be there an archive or not.
	o.Getenv = env()
	again, err := vmassets.Setup(t.Context(), o)
	if err != nil || again.Image != k.Image || a.asked("apt") != 2 {
		t.Errorf("the second setup: %v, %v, asked %d", again, err, a.asked("apt"))
	}
	noTemporaries(t, filepath.Join(dir, "kernels"))
}

func TestSetupOfManyAtOnceDownloadsOnce(t *testing.T) {
	t.Parallel()
	a, dir := newArchive(t), privateDir(t)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if k, err := a.setup(dir); err != nil || k.Version != "6.9.1-1" {
				t.Errorf("%v, %v", k, err)
			}
		})
	}
	wg.Wait()
	if n := a.asked("apt-get", "download"); n != 1 {
		t.Errorf("%d downloads", n)
	}
}

func TestSetupUpdates(t *testing.T) {
	t.Parallel()
	a, dir := newArchive(t), privateDir(t)
	o := a.options(dir)
	o.Update = true
	var kernels []*vmassets.Kernel
	for _, version := range []string{"6.9.1-1", "6.9.1-1", "6.9.2-1", "6.9.3-1~deb13u1"} {
		a.offer(version)
		a.put("lists", string(readFile(t, filepath.Join(a.dir, "newlists"))))
		k, err := vmassets.Setup(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		if found, err := vmassets.Find(dir, env()); err != nil || found.Image != k.Image || k.Version != version {
			t.Fatalf("after the setup of %s: %+v, %v", version, found, err)
		}
		kernels = append(kernels, k)
	}
	if kernels[0].Image != kernels[1].Image || a.asked("apt-get", "download") != 3 {
		t.Errorf("an unchanged version was fetched again: %d downloads", a.asked("apt-get", "download"))
	}
	for i, want := range []bool{false, false, true, true} {
		if _, err := os.Stat(kernels[i].Image); (err == nil) != want {
			t.Errorf("kernel %d is there: %v, not %v", i, err == nil, want)
		}
	}
}

func TestSetupWithoutPackageLists(t *testing.T) {
	t.Parallel()
	for _, what := range []string{"missing", "outdated"} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			a, dir := newArchive(t), privateDir(t)
			if what == "missing" {
				a.put("lists", "")
			} else {
				a.offer("6.9.7-1")
			}
			k, err := a.setup(dir)
			if os.Geteuid() == 0 {
				// Root brings them up to date, once.
				if err != nil || a.asked("update") != 1 {
					t.Errorf("%v, %v, %d updates", k, err, a.asked("update"))
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), "apt-get update") || a.asked("update") != 0 {
				t.Errorf("%v, %d updates", err, a.asked("update"))
			}
		})
	}
}

func TestSetupFailuresNameTheCureAndLeaveNothing(t *testing.T) {
	t.Parallel()
	meta := func(depends string) func(*archive) {
		return func(a *archive) { a.put("lists", "Package: x\nDepends: "+depends+"\n") }
	}
	for name, c := range map[string]struct {
		prepare func(a *archive)
		want    []string
	}{
		"no lists and no update": {func(a *archive) {
			a.put("lists", "")
			a.put("fail-apt-get", "E: Could not resolve host")
		}, []string{"No packages found", "apt-get update", "III_VM_KERNEL"}},
		"download": {
			func(a *archive) { a.put("fail-apt-get", "E: Could not resolve host\nE: Failed") },
			[]string{"apt-get", "Could not resolve host; E: Failed", "check the network"},
		},
		"unpack": {
			func(a *archive) { a.put("fail-dpkg-deb", "dpkg-deb: error: No space left on device") },
			[]string{"dpkg-deb", "No space left"},
		},
		"no kernel inside": {func(a *archive) {
			if err := os.RemoveAll(filepath.Join(a.tree, "boot")); err != nil {
				t.Error(err)
			}
		}, []string{"0 files vmlinuz-*"}},
		"two kernels inside": {func(a *archive) { a.put("tree/boot/vmlinuz-7", "x") }, []string{"2 files vmlinuz-*"}},
		"no modules inside": {func(a *archive) {
			if err := os.RemoveAll(filepath.Join(a.tree, "lib")); err != nil {
				t.Error(err)
			}
		}, []string{"no such file"}},
		"no dependency":   {meta("kmod, linux-base (>= 4.3~)"), []string{"depends on no single kernel"}},
		"no version":      {meta("linux-image-6.9.0-fake"), []string{"depends on no single kernel"}},
		"option as name":  {meta("--allow-unauthenticated (= 1)"), []string{"depends on no single kernel"}},
		"path as version": {meta("linux-image-6.9.0 (= ../../1)"), []string{"depends on no single kernel"}},
		"program is missing": {func(a *archive) {
			if err := os.Remove(filepath.Join(a.dir, "bin/dpkg-deb")); err != nil {
				t.Error(err)
			}
		}, []string{"dpkg-deb is not in PATH", "III_VM_KERNEL", "III_VM_MODULES"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a, dir := newArchive(t), privateDir(t)
			c.prepare(a)
			k, err := a.setup(dir)
			if err == nil {
				t.Fatalf("it went well: %+v", k)
			}
			for _, want := range c.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q does not say %q", err, want)
				}
			}
			if _, err := vmassets.Find(dir, env()); !errors.Is(err, vmassets.ErrNoKernel) {
				t.Errorf("Find says %v", err)
			}
			noTemporaries(t, filepath.Join(dir, "kernels"))
		})
	}
}

func TestSetupKeepsTheKernelWhenAnUpdateFails(t *testing.T) {
	t.Parallel()
	a, dir := newArchive(t), privateDir(t)
	k, err := a.setup(dir)
	if err != nil {
		t.Fatal(err)
	}
	a.put("fail-apt-get", "E: Could not resolve host")
	a.offer("6.9.9-1")
	a.put("lists", string(readFile(t, filepath.Join(a.dir, "newlists"))))
	o := a.options(dir)
	o.Update = true
	if _, err := vmassets.Setup(t.Context(), o); err == nil {
		t.Error("the update went well")
	}
	found, err := vmassets.Find(dir, env())
	if err != nil || found.Image != k.Image {
		t.Errorf("the old kernel is gone: %v, %v", found, err)
	}
}

func TestSetupRepairsADamagedKernel(t *testing.T) {
	t.Parallel()
	a, dir := newArchive(t), privateDir(t)
	k, err := a.setup(dir)
	if err != nil {
		t.Fatal(err)
	}
	for name, damage := range map[string]func() error{
		"image gone":  func() error { return os.Remove(k.Image) },
		"image empty": func() error { return os.Truncate(k.Image, 0) },
		"module gone": func() error { return os.Remove(filepath.Join(filepath.Dir(k.Image), "modules", "erofs.ko")) },
	} {
		if err := damage(); err != nil {
			t.Fatal(err)
		}
		if _, err := vmassets.Find(dir, env()); !errors.Is(err, vmassets.ErrNoKernel) {
			t.Errorf("%s: Find says %v", name, err)
		}
		if _, err := a.setup(dir); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if found, err := vmassets.Find(dir, env()); err != nil || !bytes.Equal(readFile(t, found.Image), vmlinux(true, "6.9.1-1")) {
			t.Errorf("%s: it was not repaired: %v", name, err)
		}
	}
}
