package main

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/klauspost/compress/zstd"
)

// layerEntries reads img's one layer and fails the test unless it could be
// unpacked by the simplest reader: no path twice, parents before children,
// hard links after their file.
func layerEntries(t *testing.T, img v1.Image) map[string]*tar.Header {
	t.Helper()
	layers, err := img.Layers()
	if err != nil || len(layers) != 1 {
		t.Fatalf("%d layers, %v", len(layers), err)
	}
	rc, err := layers[0].Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = rc.Close() }()
	found := map[string]*tar.Header{}
	for tr := tar.NewReader(rc); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return found
		}
		if err != nil {
			t.Fatal(err)
		}
		p := path.Clean(h.Name)
		if found[p] != nil {
			t.Errorf("%s is there twice", p)
		}
		if up := found[path.Dir(p)]; p != "." && (up == nil || up.Typeflag != tar.TypeDir) {
			t.Errorf("%s comes before its directory", p)
		}
		if h.Typeflag == tar.TypeLink && (found[h.Linkname] == nil || found[h.Linkname].Typeflag != tar.TypeReg) {
			t.Errorf("hard link %s comes before its file %s", p, h.Linkname)
		}
		found[p] = h
	}
}

func samplePackages(t *testing.T, c *cache) []pkg {
	t.Helper()
	return []pkg{
		putDeb(t, c, "aaa",
			dirEntry("./"), dirEntry("./tmp/"), dirEntry("./usr/share/doc-x/"), fileEntry("./bin/tool", "tool"),
			entry{name: "./usr/bin/su", typ: tar.TypeReg, mode: 0o4755, body: "su", uid: 7},
			hardEntry("./usr/bin/0su", "./usr/bin/su"), linkEntry("./lib/libx.so", "libx.so.1"),
			fileEntry("./usr/share/doc/aaa/copyright", "free"), fileEntry("./usr/share/doc/aaa/README", "long"),
			fileEntry("./usr/share/man/man1/tool.1.gz", "man"), fileEntry("./usr/share/doc/a-b/copyright", "free")),
		putDeb(t, c, "base-files",
			entry{name: "./tmp/", typ: tar.TypeDir, mode: 0o1777}, dirEntry("./bin/"), fileEntry("./etc/empty", "")),
		putDeb(t, c, "usr-merged", linkEntry("./bin", "usr/bin"), fileEntry("./usr/bin/other", "o")),
	}
}

func sampleRecipe() recipe {
	return recipe{name: "sample", finish: []step{mergedUsr}, env: []string{pathEnv}, cmd: []string{"sh"}}
}

func TestAssembleMergesPackages(t *testing.T) {
	t.Parallel()
	b := testBuilder(t)
	img, err := b.assemble(t.Context(), sampleRecipe(), samplePackages(t, b.cache), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	got := layerEntries(t, img)
	for p, want := range map[string]string{
		"bin":                          "symlink usr/bin",
		"lib":                          "symlink usr/lib",
		"usr/bin/tool":                 "file 0644 0",
		"usr/bin/0su":                  "file 4755 7",
		"usr/bin/su":                   "link usr/bin/0su",
		"usr/bin/other":                "file 0644 0",
		"usr/lib/libx.so":              "symlink libx.so.1",
		"tmp":                          "dir 1777", // base-files comes first
		"etc/empty":                    "file 0644 0",
		"usr/share/doc/aaa/copyright":  "file 0644 0",
		"usr/share/iii-image/packages": "file 0644 0",
		"usr/share/doc/aaa/README":     "none",
		"usr/share/man":                "none",
		"lib64":                        "none",
	} {
		if have := describeEntry(got[p]); have != want {
			t.Errorf("%s is %q, want %q", p, have, want)
		}
	}
	for p, h := range got {
		if h.ModTime.Unix() != debTime {
			t.Errorf("%s has time %v, not the packages'", p, h.ModTime)
		}
	}
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if config.Created.Unix() != debTime || config.OS != "linux" || config.Config.Env[0] != pathEnv ||
		config.Config.Labels[keyPackages] != "aaa=1:2.0-3 base-files=1:2.0-3 usr-merged=1:2.0-3" {
		t.Errorf("config is %+v", config)
	}
}

func describeEntry(h *tar.Header) string {
	switch {
	case h == nil:
		return "none"
	case h.Typeflag == tar.TypeSymlink:
		return "symlink " + h.Linkname
	case h.Typeflag == tar.TypeLink:
		return "link " + h.Linkname
	case h.Typeflag == tar.TypeDir:
		return fmt.Sprintf("dir %04o", h.Mode)
	default:
		return fmt.Sprintf("file %04o %d", h.Mode, h.Uid)
	}
}

// The umask belongs to the process, so this test runs alone.
func TestSamePackagesGiveTheSameDigest(t *testing.T) {
	b := testBuilder(t)
	pkgs := samplePackages(t, b.cache)
	digest := func(umask int, tz string) v1.Hash {
		t.Helper()
		t.Setenv("TZ", tz)
		defer syscall.Umask(syscall.Umask(umask))
		img, err := b.assemble(t.Context(), sampleRecipe(), pkgs, t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		d, err := img.Digest()
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	if one, two := digest(0o022, "UTC0"), digest(0o077, "Asia/Kolkata"); one != two {
		t.Errorf("digest %s became %s", one, two)
	}
}

// sampleImage builds an image that differs from others by the text in it.
func sampleImage(t *testing.T, b *builder, text string) v1.Image {
	t.Helper()
	img, err := b.assemble(t.Context(), sampleRecipe(), []pkg{putDeb(t, b.cache, "p", fileEntry("./usr/x", text))}, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return img
}

func TestPublishWritesAWholeLayout(t *testing.T) {
	t.Parallel()
	b := testBuilder(t)
	dir := filepath.Join(b.out, "deep", "sample")
	if wrote, err := publish(sampleImage(t, b, "one"), dir); err != nil || !wrote {
		t.Fatalf("wrote %v, %v", wrote, err)
	}
	index, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		t.Fatal(err)
	}
	digest, err := check(dir)
	if err != nil {
		t.Fatal(err)
	}
	img, err := index.Image(digest)
	if err != nil {
		t.Fatal(err)
	}
	checkDiffID(t, img)
	if got := layerEntries(t, img); got["usr/x"] == nil {
		t.Error("the layer lost its file")
	}
	m, err := index.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	if len(m.Manifests) != 1 || m.Manifests[0].Annotations[keyRefName] != "latest" || m.Manifests[0].Platform.OS != "linux" {
		t.Errorf("index is %+v", m)
	}
}

// checkDiffID unpacks the layer as any runtime does and compares the hash of
// its tar with the config's.
func checkDiffID(t *testing.T, img v1.Image) {
	t.Helper()
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	rc, err := layers[0].Compressed()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = rc.Close() }()
	zr, err := zstd.NewReader(rc)
	if err != nil {
		t.Fatal(err)
	}
	defer zr.Close()
	if have, _, err := v1.SHA256(zr); err != nil || have != config.RootFS.DiffIDs[0] {
		t.Errorf("the tar is %v, %v; the config says %v", have, err, config.RootFS.DiffIDs)
	}
}

func TestPublishRewritesOnlyWhatDiffers(t *testing.T) {
	t.Parallel()
	b := testBuilder(t)
	dir := filepath.Join(b.out, "sample")
	step := func(text string, want bool) {
		t.Helper()
		img := sampleImage(t, b, text)
		wrote, err := publish(img, dir)
		if err != nil || wrote != want {
			t.Fatalf("%s: wrote %v, %v", text, wrote, err)
		}
		digest, err := img.Digest()
		if err != nil {
			t.Fatal(err)
		}
		if have, err := check(dir); err != nil || have != digest {
			t.Fatalf("%s: layout has %v, %v", text, have, err)
		}
	}
	step("one", true)
	step("one", false)
	step("two", true)
	// A blob that rotted is written again.
	m, err := sampleImage(t, b, "two").Manifest()
	if err != nil {
		t.Fatal(err)
	}
	blob := filepath.Join(dir, "blobs", "sha256", m.Layers[0].Digest.Hex)
	if err := os.WriteFile(blob, []byte("rot"), 0o600); err != nil {
		t.Fatal(err)
	}
	step("two", true)
	// So is a layout that a build killed half-way left, whatever it left.
	for _, name := range []string{".sample.new/blobs", ".sample.old/blobs"} {
		if err := os.MkdirAll(filepath.Join(b.out, name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Remove(filepath.Join(dir, "index.json")); err != nil {
		t.Fatal(err)
	}
	step("two", true)
	if files, err := os.ReadDir(b.out); err != nil || len(files) != 1 {
		t.Errorf("left behind: %v, %v", files, err)
	}
}

func TestPublishKeepsTheOldLayoutWhenItCannotWrite(t *testing.T) {
	t.Parallel()
	b := testBuilder(t)
	dir := filepath.Join(b.out, "sample")
	old := sampleImage(t, b, "one")
	if _, err := publish(old, dir); err != nil {
		t.Fatal(err)
	}
	img := sampleImage(t, b, "two")
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	digest, err := layers[0].Digest()
	if err != nil {
		t.Fatal(err)
	}
	broken := brokenImage{Image: img, bad: digest}
	if _, err := publish(broken, dir); err == nil {
		t.Fatal("no error")
	}
	want, err := old.Digest()
	if err != nil {
		t.Fatal(err)
	}
	if have, err := check(dir); err != nil || have != want {
		t.Errorf("layout has %v, %v", have, err)
	}
	if files, err := os.ReadDir(b.out); err != nil || len(files) != 1 {
		t.Errorf("left behind: %v, %v", files, err)
	}
}

// brokenImage cannot give its layer.
type brokenImage struct {
	v1.Image
	bad v1.Hash
}

// Layers gives layers that cannot be read.
func (b brokenImage) Layers() ([]v1.Layer, error) {
	return []v1.Layer{&fileLayer{path: "/nonexistent/layer", digest: b.bad}}, nil
}

func TestBuildFallsBackToTheLastPlan(t *testing.T) {
	t.Parallel()
	b := testBuilder(t)
	r := sampleRecipe()
	if _, err := b.savedPackages(r, errNoIndex); !errors.Is(err, errNoIndex) {
		t.Fatalf("without a plan: %v", err)
	}
	pkgs := samplePackages(t, b.cache)
	if err := b.cache.savePlan(r.name, pkgs); err != nil {
		t.Fatal(err)
	}
	got, err := b.savedPackages(r, errNoIndex)
	if err != nil || len(got) != len(pkgs) || got[0] != pkgs[0] {
		t.Fatalf("got %v, %v", got, err)
	}
	old := putDeb(t, b.cache, "old")
	if err := b.cache.prune(); err != nil {
		t.Fatal(err)
	}
	if missing, err := b.cache.missing(append(pkgs, old)); err != nil || len(missing) != 1 || missing[0] != old {
		t.Fatalf("after pruning there lack %v, %v", missing, err)
	}
	if err := os.Remove(b.cache.path(pkgs[1])); err != nil {
		t.Fatal(err)
	}
	_, err = b.savedPackages(r, errNoIndex)
	if !errors.Is(err, errNoIndex) || !strings.Contains(err.Error(), "base-files=1:2.0-3") || strings.Contains(err.Error(), "aaa=") {
		t.Errorf("got %v", err)
	}
}

func TestRealBusybox(t *testing.T) {
	t.Parallel()
	img := realImage(t, "busybox")
	m, err := img.Manifest()
	if err != nil {
		t.Fatal(err)
	}
	if size := m.Layers[0].Size; size > 5<<20 {
		t.Errorf("the layer has %d bytes, more than 5 MiB", size)
	}
	got := layerEntries(t, img)
	for _, p := range []string{"usr/bin/sh", "usr/bin/cat", "usr/bin/env"} {
		if have := describeEntry(got[p]); have != "symlink busybox" {
			t.Errorf("%s is %q", p, have)
		}
	}
	if have := describeEntry(got["tmp"]); have != "dir 1777" {
		t.Errorf("/tmp is %q", have)
	}
}

// TestRealPython needs the network and half a minute: III_TEST_IMAGES=1 asks
// for it.
func TestRealPython(t *testing.T) {
	t.Parallel()
	if os.Getenv("III_TEST_IMAGES") == "" {
		t.Skip("SKIPPED: set III_TEST_IMAGES=1 to fetch and build the python image")
	}
	got := layerEntries(t, realImage(t, "python"))
	link := got["usr/bin/python3"]
	if link == nil || describeEntry(got["usr/bin/python"]) != "symlink python3" {
		t.Fatalf("python3 is %v, python %v", link, got["usr/bin/python"])
	}
	tag := "cpython-" + strings.ReplaceAll(strings.TrimPrefix(link.Linkname, "python"), ".", "")
	for _, p := range []string{
		"usr/lib/" + link.Linkname + "/json/__pycache__/decoder." + tag + ".pyc",
		"etc/ssl/certs/ca-certificates.crt", "etc/ld.so.cache", "usr/bin/bash", "etc/shadow",
	} {
		if got[p] == nil || got[p].Size == 0 {
			t.Errorf("%s is missing or empty", p)
		}
	}
	if mode := got["etc/shadow"].Mode; mode != 0o640 {
		t.Errorf("/etc/shadow has mode %04o", mode)
	}
}

// realImage builds an image of real packages, or skips with the reason where
// this host cannot.
func realImage(t *testing.T, name string) v1.Image {
	t.Helper()
	b := testBuilder(t)
	chosen, err := choose([]string{name})
	if err != nil {
		t.Fatal(err)
	}
	client, err := newApt(t.Context(), t.TempDir())
	if err != nil {
		t.Skipf("SKIPPED: %v", err)
	}
	if sources, err := debianSources(t.Context()); err != nil || len(sources) == 0 {
		t.Skipf("SKIPPED: this host has no package lists of Debian (%v)", err)
	}
	if err := client.useDebian(t.Context(), func(string) {}); err != nil {
		t.Fatal(err)
	}
	pkgs, err := client.resolve(t.Context(), chosen[0])
	if err != nil {
		t.Fatal(err)
	}
	fetch := func(ctx context.Context, dir string, need []pkg) error { return client.download(ctx, dir, need) }
	if err := b.cache.fetch(t.Context(), pkgs, func(string) {}, fetch); err != nil {
		t.Skipf("SKIPPED: no package could be fetched: %v", err)
	}
	if err := b.build(t.Context(), chosen[0]); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(b.out, name)
	digest, err := check(dir)
	if err != nil {
		t.Fatal(err)
	}
	img, err := layout.Path(dir).Image(digest)
	if err != nil {
		t.Fatal(err)
	}
	return img
}
