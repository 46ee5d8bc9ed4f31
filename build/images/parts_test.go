package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestAptOutput(t *testing.T) {
	t.Parallel()
	pkgs, err := parseSimulation([]byte("NOTE: x\nInst zlib1g (1:1.2 Debian:12 [amd64]) []\nInst tar (1.34+dfsg Debian:12 [amd64])\nConf tar (1.34+dfsg Debian:12 [amd64])\n"))
	if err != nil {
		t.Fatal(err)
	}
	sum := strings.Repeat("ab", 32)
	got, err := describe(pkgs, []byte("'http://h/tar%2b.deb' tar_1.34+dfsg_amd64.deb 10 SHA256:"+sum+"\n'zlib1g_1%3a1.2.deb' zlib1g_1%3a1.2_amd64.deb 20 SHA256:"+sum+"\n"))
	if err != nil {
		t.Fatal(err)
	}
	want := []pkg{
		{Name: "tar", Version: "1.34+dfsg", File: "tar_1.34+dfsg_amd64.deb", Size: 10, SHA256: sum},
		{Name: "zlib1g", Version: "1:1.2", File: "zlib1g_1%3a1.2_amd64.deb", Size: 20, SHA256: sum},
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %v", got)
	}
}

func TestAptOutputThatIsNotEnough(t *testing.T) {
	t.Parallel()
	if _, err := parseSimulation([]byte("nothing\n")); err == nil {
		t.Error("a simulation without packages passed")
	}
	sum := strings.Repeat("ab", 32)
	for name, line := range map[string]string{
		"weaker hash":  "'u' tar_1_amd64.deb 10 MD5Sum:" + sum[:32],
		"other name":   "'u' tar-x_1_amd64.deb 10 SHA256:" + sum,
		"path in name": "'u' tar_1/../../x.deb 10 SHA256:" + sum,
		"no size":      "'u' tar_1_amd64.deb x SHA256:" + sum,
	} {
		if got, err := describe([]pkg{{Name: "tar", Version: "1"}}, []byte(line)); err == nil {
			t.Errorf("%s: got %v", name, got)
		}
	}
}

// wantPkg describes a package whose .deb has this content.
func wantPkg(name, content string) pkg {
	sum := sha256.Sum256([]byte(content))
	return pkg{Name: name, Version: "1", File: name + "_1_all.deb", Size: int64(len(content)), SHA256: hex.EncodeToString(sum[:])}
}

func TestFetchVerifiesAndKeepsWhatCame(t *testing.T) {
	t.Parallel()
	c := testCache(t)
	good, bad, rotten := wantPkg("good", "good"), wantPkg("bad", "bad"), wantPkg("rotten", "fresh")
	if err := os.WriteFile(c.path(rotten), []byte("moldy"), 0o600); err != nil {
		t.Fatal(err)
	}
	serve := func(files map[string]string, err error) func(context.Context, string, []pkg) error {
		return func(_ context.Context, dir string, need []pkg) error {
			for _, p := range need {
				if text, ok := files[p.Name]; ok {
					if err := os.WriteFile(filepath.Join(dir, p.File), []byte(text), 0o600); err != nil {
						return err
					}
				}
			}
			return err
		}
	}
	all, quiet := []pkg{good, bad, rotten}, func(string) {}
	offline := errors.New("no network")
	err := c.fetch(t.Context(), all, quiet, serve(map[string]string{"good": "good"}, offline))
	if !errors.Is(err, offline) || !strings.Contains(err.Error(), "bad=1 rotten=1;") {
		t.Fatalf("got %v", err)
	}
	err = c.fetch(t.Context(), all, quiet, serve(map[string]string{"bad": "BAD", "rotten": "fresh", "good": "not asked for"}, nil))
	if err == nil || !strings.Contains(err.Error(), "bad=1;") {
		t.Fatalf("got %v", err)
	}
	if err := c.fetch(t.Context(), all, quiet, serve(map[string]string{"bad": "bad"}, nil)); err != nil {
		t.Fatal(err)
	}
	never := func(context.Context, string, []pkg) error { return errors.New("asked again") }
	if err := c.fetch(t.Context(), all, quiet, never); err != nil {
		t.Error(err)
	}
	if left, err := filepath.Glob(filepath.Join(c.dir, "tmp-*")); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func TestCacheLock(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	first, err := lockCache(t.Context(), dir, func() { t.Error("a fresh cache is locked") })
	if err != nil {
		t.Fatal(err)
	}
	if _, err := first.temp(); err != nil { // as a killed build leaves it
		t.Fatal(err)
	}
	waits, done := make(chan struct{}), make(chan error, 1)
	go func() {
		second, err := lockCache(t.Context(), dir, func() { close(waits) })
		if err == nil {
			err = second.close()
		}
		done <- err
	}()
	<-waits
	if err := first.close(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if left, err := filepath.Glob(filepath.Join(dir, "tmp-*")); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func TestCompareSonames(t *testing.T) {
	t.Parallel()
	order := []string{"lib.so", "liba.so.1", "liba.so.2", "liba.so.10", "liba.so.10.1", "liba_1.so", "liba1.so", "liba01b.so", "libb.so"}
	for i, a := range order {
		for j, b := range order {
			got := compareSonames(a, b)
			if (got < 0) != (i < j) || (got > 0) != (i > j) {
				t.Errorf("compare %s with %s: %d", a, b, got)
			}
		}
	}
}

func TestLoaderCacheIsReadByLdconfig(t *testing.T) {
	t.Parallel()
	ldconfig, err := exec.LookPath("ldconfig")
	if err != nil {
		ldconfig = "/sbin/ldconfig"
	}
	if _, err := os.Stat(ldconfig); err != nil {
		t.Skip("SKIPPED: no ldconfig on this host")
	}
	file := filepath.Join(t.TempDir(), "ld.so.cache")
	libs := []library{
		{"liba.so.1", "/lib/x86_64-linux-gnu/liba.so.1", 0x0303},
		{"libb.so.2", "/lib/x86_64-linux-gnu/libb.so.2", 0x0303},
		{"liba.so.10", "/lib/x86_64-linux-gnu/liba.so.10", 0x0303},
	}
	if err := os.WriteFile(file, encodeLoaderCache(libs), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), ldconfig, "-C", file, "-p").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	var got []string
	for line := range strings.Lines(string(out)) {
		if _, p, ok := strings.Cut(strings.TrimSpace(line), " => "); ok {
			got = append(got, filepath.Base(p))
		}
	}
	if want := []string{"libb.so.2", "liba.so.10", "liba.so.1"}; !slices.Equal(got, want) {
		t.Errorf("ldconfig lists %v, want %v:\n%s", got, want, out)
	}
}

func TestCommandLine(t *testing.T) {
	t.Parallel()
	env := func(vars map[string]string) func(string) string { return func(k string) string { return vars[k] } }
	home := env(map[string]string{"HOME": "/home/x"})
	for name, c := range map[string]struct {
		args   []string
		getenv func(string) string
		out    string
		cache  string
		images string
		fault  string
	}{
		"defaults":    {[]string{"all"}, home, "/home/x/.local/share/iii-sandbox/images", "/home/x/.cache/iii-sandbox/packages", "python node git busybox", ""},
		"image dir":   {[]string{"node"}, env(map[string]string{"HOME": "/h", "III_SANDBOX_IMAGE_DIR": "/i"}), "/i", "/h/.cache/iii-sandbox/packages", "node", ""},
		"flags":       {[]string{"--out", "/o", "--cache", "/c", "busybox", "python", "busybox"}, env(nil), "/o", "/c", "python busybox", ""},
		"no home":     {[]string{"--out", "/o", "node"}, env(nil), "", "", "", "HOME"},
		"no image":    {nil, home, "", "", "", "name an image: all python node git busybox"},
		"wrong image": {[]string{"all", "perl"}, home, "", "", "", `no image "perl"`},
		"wrong flag":  {[]string{"--root", "node"}, home, "", "", "", "root"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o, err := parse(c.args, c.getenv, &bytes.Buffer{})
			if c.fault != "" {
				if err == nil || !strings.Contains(err.Error(), c.fault) {
					t.Errorf("got %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			var images []string
			for _, r := range o.recipes {
				images = append(images, r.name)
			}
			if o.out != c.out || o.cache != c.cache || strings.Join(images, " ") != c.images {
				t.Errorf("got %s %s %v", o.out, o.cache, images)
			}
		})
	}
}

func TestHostWithoutDebiansTools(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	var stderr bytes.Buffer
	dir := t.TempDir()
	code := command(t.Context(), []string{"--out", dir, "--cache", dir, "busybox"}, func(string) string { return "" }, &stderr)
	if code != 1 || !strings.Contains(stderr.String(), "apt-get is not installed") || !strings.Contains(stderr.String(), "Debian") {
		t.Errorf("exit %d: %s", code, stderr.String())
	}
}
