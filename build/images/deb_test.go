package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// entry is one file of a synthetic package.
type entry struct {
	name string
	typ  byte
	mode int64
	body string // content, or target of a link
	uid  int
}

func dirEntry(name string) entry { return entry{name: name, typ: tar.TypeDir, mode: 0o755} }

func fileEntry(name, body string) entry {
	return entry{name: name, typ: tar.TypeReg, mode: 0o644, body: body}
}

func linkEntry(name, target string) entry {
	return entry{name: name, typ: tar.TypeSymlink, mode: 0o777, body: target}
}

func hardEntry(name, original string) entry {
	return entry{name: name, typ: tar.TypeLink, mode: 0o644, body: original}
}

const debTime = 1_700_000_000

// putDeb writes a .deb of these files into the cache and returns its package.
func putDeb(t *testing.T, c *cache, name string, files ...entry) pkg {
	t.Helper()
	data := makeDeb(t, files)
	sum := sha256.Sum256(data)
	p := pkg{
		Name: name, Version: "1:2.0-3", File: name + "_1%3a2.0-3_all.deb",
		Size: int64(len(data)), SHA256: hex.EncodeToString(sum[:]),
	}
	if err := os.WriteFile(c.path(p), data, 0o600); err != nil {
		t.Fatal(err)
	}
	return p
}

// makeDeb lays out the format of deb(5): an ar archive of a version and two
// compressed tars.
func makeDeb(t *testing.T, files []entry) []byte {
	t.Helper()
	var deb bytes.Buffer
	deb.WriteString("!<arch>\n")
	for _, m := range []struct {
		name string
		data []byte
	}{
		{"debian-binary", []byte("2.0\n")},
		{"control.tar.gz", gzipTar(t, []entry{fileEntry("./control", "Package: x\n")})},
		{"data.tar.gz", gzipTar(t, files)},
	} {
		fmt.Fprintf(&deb, "%-16s%-12d%-6d%-6d%-8s%-10d`\n", m.name, debTime, 0, 0, "100644", len(m.data))
		deb.Write(m.data)
		if len(m.data)%2 == 1 {
			deb.WriteByte('\n')
		}
	}
	return deb.Bytes()
}

func gzipTar(t *testing.T, files []entry) []byte {
	t.Helper()
	var out bytes.Buffer
	zw := gzip.NewWriter(&out)
	tw := tar.NewWriter(zw)
	for _, f := range files {
		h := &tar.Header{Name: f.name, Typeflag: f.typ, Mode: f.mode, Uid: f.uid, ModTime: time.Unix(debTime, 0)}
		if f.typ == tar.TypeReg {
			h.Size = int64(len(f.body))
		} else {
			h.Linkname = f.body
		}
		if err := tw.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if f.typ == tar.TypeReg {
			if _, err := tw.Write([]byte(f.body)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	if err := zw.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// needDpkg skips, with the reason, where no .deb can be read.
func needDpkg(t *testing.T) {
	t.Helper()
	if _, err := exec.LookPath("dpkg-deb"); err != nil {
		t.Skip("SKIPPED: dpkg-deb is not installed, so no package can be unpacked here")
	}
}

func testCache(t *testing.T) *cache {
	t.Helper()
	c, err := lockCache(t.Context(), t.TempDir(), func() { t.Error("a fresh cache is locked") })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

func testBuilder(t *testing.T) *builder {
	t.Helper()
	needDpkg(t)
	return &builder{out: t.TempDir(), cache: testCache(t), progress: &bytes.Buffer{}}
}

func TestUnpackRefusesBrokenPackages(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		first, second []entry
		want          []string
	}{
		"leaves the root":       {second: []entry{fileEntry("./../etc/passwd", "x")}, want: []string{"two", "leaves the root"}},
		"device":                {second: []entry{{name: "./dev/sda", typ: tar.TypeBlock, mode: 0o600}}, want: []string{"two", "/dev/sda"}},
		"same file twice":       {first: []entry{fileEntry("./usr/bin/x", "a")}, second: []entry{fileEntry("./bin/x", "b")}, want: []string{"package one", "package two", "/usr/bin/x"}},
		"below a file":          {first: []entry{fileEntry("./etc/x", "a")}, second: []entry{fileEntry("./etc/x/y", "b")}, want: []string{"package one", "/etc/x"}},
		"below a symlink":       {first: []entry{linkEntry("./etc/x", "/root")}, second: []entry{fileEntry("./etc/x/y", "b")}, want: []string{"package one", "not a directory"}},
		"hard link to nothing":  {second: []entry{hardEntry("./etc/y", "./etc/x")}, want: []string{"two", "hard link"}},
		"hard link out of here": {second: []entry{hardEntry("./etc/y", "../../etc/shadow")}, want: []string{"leaves the root"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := testBuilder(t)
			pkgs := []pkg{putDeb(t, b.cache, "one", c.first...), putDeb(t, b.cache, "two", c.second...)}
			_, err := b.assemble(t.Context(), recipe{name: "x"}, pkgs, t.TempDir())
			if err == nil {
				t.Fatal("no error")
			}
			for _, w := range c.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("error %q does not mention %q", err, w)
				}
			}
		})
	}
}

func TestUnpackTellsWhatDpkgSays(t *testing.T) {
	t.Parallel()
	needDpkg(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "bad.deb")
	if err := os.WriteFile(file, []byte("not a package"), 0o600); err != nil {
		t.Fatal(err)
	}
	tr, err := newTree(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tr.close() }()
	err = unpack(context.Background(), tr, "bad", file)
	if err == nil || !strings.Contains(err.Error(), "unpack bad") || !strings.Contains(err.Error(), "bad.deb") {
		t.Errorf("got %v", err)
	}
}
