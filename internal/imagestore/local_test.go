package imagestore_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/imagestore"
)

// writeLayout makes an OCI layout of images by tag; "" is an image without one.
func writeLayout(t testing.TB, dir string, images map[string]v1.Image) {
	t.Helper()
	path, err := layout.Write(dir, empty.Index)
	if err != nil {
		t.Fatal(err)
	}
	for tag, img := range images {
		var opts []layout.Option
		if tag != "" {
			opts = append(opts, layout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": tag}))
		}
		if err := path.AppendImage(img, opts...); err != nil {
			t.Fatal(err)
		}
	}
}

func appendLayout(t testing.TB, dir string, img v1.Image) {
	t.Helper()
	path, err := layout.FromPath(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := path.AppendImage(img); err != nil {
		t.Fatal(err)
	}
}

func writeArchive(t testing.TB, path string, images map[string]v1.Image) {
	t.Helper()
	byTag := map[name.Tag]v1.Image{}
	for tag, img := range images {
		parsed, err := name.NewTag(tag)
		if err != nil {
			t.Fatal(err)
		}
		byTag[parsed] = img
	}
	if err := tarball.MultiWriteToFile(path, byTag); err != nil {
		t.Fatal(err)
	}
}

func wantLayoutError(t testing.TB, err error, words ...string) {
	t.Helper()
	var bad *imagestore.LayoutError
	if !errors.As(err, &bad) {
		t.Errorf("error is %T %v, want a LayoutError", err, err)
		return
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error is %q, want %q in it", err, w)
		}
	}
}

func TestLayout(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	one, two, foreign := simple(t, "1"), simple(t, "2"), imageOf(t, "linux/s390x")
	writeLayout(t, filepath.Join(dir, "single"), map[string]v1.Image{"": one})
	writeLayout(t, filepath.Join(dir, "tagged"), map[string]v1.Image{"a": one, "b": two, "c": foreign})
	writeLayout(t, filepath.Join(dir, "untagged"), map[string]v1.Image{"": one})
	appendLayout(t, filepath.Join(dir, "untagged"), two)
	s := openStore(t, t.TempDir(), quick())
	for ref, want := range map[string]v1.Image{"single": one, "tagged:a": one, "tagged:b": two} {
		// No leave to pull is needed for what is here.
		got := ensure(t, s, "oci:"+filepath.Join(dir, ref), imagestore.EnsureOptions{})
		if got.Digest != digestOf(t, want) || got.Ref != "oci:"+filepath.Join(dir, ref) {
			t.Errorf("%s: image is %s %s", ref, got.Ref, got.Digest)
		}
	}
	fail := func(ref string) error {
		_, err := s.Ensure(t.Context(), "oci:"+filepath.Join(dir, ref), pull)
		return err
	}
	wantLayoutError(t, fail("tagged"), ":a", ":b")
	wantLayoutError(t, fail("tagged:d"), "a", "b", "c")
	wantLayoutError(t, fail("untagged"), "without a tag")
	wantLayoutError(t, fail("nothing"), "no OCI image layout")
	var platform *imagestore.PlatformError
	if err := fail("tagged:c"); !errors.As(err, &platform) {
		t.Errorf("error is %v, want a PlatformError", err)
	}
}

func TestChangedLayoutIsANewImage(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "img")
	s := openStore(t, t.TempDir(), quick())
	writeLayout(t, dir, map[string]v1.Image{"": simple(t, "1")})
	first := ensure(t, s, "oci:"+dir, pull)
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	// The source is gone, the store still has it.
	if got := ensure(t, s, "oci:"+dir, pull); got.Digest != first.Digest {
		t.Errorf("image is %s, want %s", got.Digest, first.Digest)
	}
	writeLayout(t, dir, map[string]v1.Image{"": simple(t, "2")})
	second := ensure(t, s, "oci:"+dir, pull)
	if second.Digest == first.Digest {
		t.Error("a changed layout is the same image")
	}
	wantFiles(t, first.Lower, files{"etc/": "", "etc/name": "1"})
	wantFiles(t, second.Lower, files{"etc/": "", "etc/name": "2"})
}

func TestDamagedLayout(t *testing.T) {
	t.Parallel()
	img := simple(t, strings.Repeat("content ", 1000))
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	config, err := img.ConfigName()
	if err != nil {
		t.Fatal(err)
	}
	damage := func(content []byte) []byte {
		content = bytes.Clone(content)
		content[len(content)/2] ^= 4
		return content
	}
	half := func(content []byte) []byte { return content[:len(content)/2] }
	type test struct {
		digest string
		change func([]byte) []byte
		want   string
	}
	for what, test := range map[string]test{
		"flipped layer":    {digestOf(t, layers[0]), damage, "layer 1 of 1"},
		"short layer":      {digestOf(t, layers[0]), half, "layer 1 of 1"},
		"flipped config":   {config.String(), damage, "configuration"},
		"short config":     {config.String(), half, "configuration"},
		"flipped manifest": {digestOf(t, img), damage, "manifest"},
	} {
		dir := filepath.Join(t.TempDir(), "img")
		writeLayout(t, dir, map[string]v1.Image{"": img})
		path := filepath.Join(dir, "blobs", "sha256", strings.TrimPrefix(test.digest, "sha256:"))
		content, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, test.change(content), 0o600); err != nil {
			t.Fatal(err)
		}
		store := t.TempDir()
		_, err = openStore(t, store, quick()).Ensure(t.Context(), "oci:"+dir, pull)
		var damaged *imagestore.DigestError
		if !errors.As(err, &damaged) || !strings.Contains(damaged.What, test.want) {
			t.Errorf("%s: error is %T %v, want a DigestError about the %s", what, err, err, test.want)
		}
		wantClean(t, store, 0)
	}
}

func TestLayoutOfSpecialFiles(t *testing.T) {
	t.Parallel()
	img := simple(t, "content")
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	blob := filepath.Join("blobs", "sha256", strings.TrimPrefix(digestOf(t, layers[0]), "sha256:"))
	for _, name := range []string{"index.json", blob} {
		for what, put := range map[string]func(path string) error{
			"fifo":   func(path string) error { return syscall.Mkfifo(path, 0o600) },
			"device": func(path string) error { return os.Symlink("/dev/zero", path) },
		} {
			dir := filepath.Join(t.TempDir(), "img")
			writeLayout(t, dir, map[string]v1.Image{"": img})
			path := filepath.Join(dir, name)
			if err := errors.Join(os.Remove(path), put(path)); err != nil {
				t.Fatal(err)
			}
			_, err := openStore(t, t.TempDir(), quick()).Ensure(t.Context(), "oci:"+dir, pull)
			if refused := (*imagestore.LayoutError)(nil); !errors.As(err, &refused) {
				t.Errorf("%s is a %s: error is %v, want a LayoutError", name, what, err)
			}
		}
	}
}

func TestIndexOfTooManyImages(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "img")
	writeLayout(t, dir, map[string]v1.Image{"": simple(t, "content")})
	path := filepath.Join(dir, "index.json")
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var index v1.IndexManifest
	if err := json.Unmarshal(raw, &index); err != nil {
		t.Fatal(err)
	}
	index.Manifests = slices.Repeat(index.Manifests, 1025)
	if raw, err = json.Marshal(index); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err = openStore(t, t.TempDir(), quick()).Ensure(t.Context(), "oci:"+dir, pull)
	if limit := (*imagestore.LimitError)(nil); !errors.As(err, &limit) || limit.Limit != 1024 {
		t.Errorf("error is %v, want a LimitError", err)
	}
}

func TestWrongDiffID(t *testing.T) {
	t.Parallel()
	l := gzipLayer(t, files{"a": "1"}.tar(t))
	l.diffID = hashOf([]byte("another"))
	dir := filepath.Join(t.TempDir(), "img")
	writeLayout(t, dir, map[string]v1.Image{"": imageOf(t, "linux/"+arch, l)})
	_, err := openStore(t, t.TempDir(), quick()).Ensure(t.Context(), "oci:"+dir, pull)
	var damaged *imagestore.DigestError
	if !errors.As(err, &damaged) || damaged.Want != l.diffID.String() {
		t.Errorf("error is %v, want a DigestError about the diff ID", err)
	}
}

func TestLayoutFolderIsAskedFirst(t *testing.T) {
	t.Parallel()
	srv := newServer(t)
	ref := srv.push(t, "python:latest", simple(t, "from the registry"))
	opts := quick()
	opts.LayoutDir = t.TempDir()
	local := simple(t, "from the folder")
	writeLayout(t, filepath.Join(opts.LayoutDir, "python"), map[string]v1.Image{"": local})
	s := openStore(t, t.TempDir(), opts)
	got := ensure(t, s, ref, imagestore.EnsureOptions{Name: "python"})
	if got.Digest != digestOf(t, local) {
		t.Errorf("image is %s, want the folder's", got.Ref)
	}
	if other := ensure(t, s, ref, imagestore.EnsureOptions{Name: "node", PullMissing: true}); other.Digest == got.Digest {
		t.Error("an image that is not in the folder came from it")
	}
	// A broken layout is an error, not a reason to go to the network.
	if err := os.WriteFile(filepath.Join(opts.LayoutDir, "python", "index.json"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := s.Ensure(t.Context(), ref, imagestore.EnsureOptions{Name: "python", PullMissing: true})
	wantLayoutError(t, err, "python")
	// Names cannot lead out of the folder.
	for _, name := range []string{"../python", "..", ".", "a/b", "x\x00"} {
		if img, err := s.Ensure(t.Context(), ref, imagestore.EnsureOptions{Name: name}); err != nil {
			t.Errorf("%q: %v", name, err)
		} else {
			closeImage(t, img)
		}
	}
}

func TestDockerArchive(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	one, two := simple(t, "1"), simple(t, "2")
	single, multi := filepath.Join(dir, "single.tar"), filepath.Join(dir, "multi.tar")
	writeArchive(t, single, map[string]v1.Image{"app:1": one})
	writeArchive(t, multi, map[string]v1.Image{"app:1": one, "app:2": two, "tool:latest": simple(t, "3")})
	store := t.TempDir()
	s := openStore(t, store, quick())
	for ref, body := range map[string]string{single: "1", multi + ":app:1": "1", multi + ":app:2": "2", multi + ":tool": "3"} {
		img := ensure(t, s, "docker-archive:"+ref, imagestore.EnsureOptions{})
		wantFiles(t, img.Lower, files{"etc/": "", "etc/name": body})
		if img.Config.WorkingDir != "/work" {
			t.Errorf("%s: config is %+v", ref, img.Config)
		}
	}
	wantClean(t, store, 3) // the same image in two archives is one
	fail := func(ref string) error {
		_, err := s.Ensure(t.Context(), "docker-archive:"+ref, pull)
		return err
	}
	wantLayoutError(t, fail(multi), "app:1", "app:2", "tool")
	wantLayoutError(t, fail(multi+":app:3"), "app:3")
	wantLayoutError(t, fail(filepath.Join(dir, "none.tar")), "none.tar")
	content, err := os.ReadFile(single)
	if err != nil {
		t.Fatal(err)
	}
	cut, zipped, other := filepath.Join(dir, "cut.tar"), filepath.Join(dir, "zipped.tar.gz"), filepath.Join(dir, "other.tar")
	for path, content := range map[string][]byte{cut: content[:len(content)/3], zipped: gzipLayer(t, content).blob, other: files{"x": "y"}.tar(t)} {
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	wantLayoutError(t, fail(zipped), "gzip", "uncompress")
	wantLayoutError(t, fail(other), "manifest.json")
	wantLayoutError(t, fail(cut), "cut.tar")
}

func TestDockerArchiveWithLinkedLayers(t *testing.T) {
	t.Parallel()
	// Older docker writes a layer that two images share as a symlink.
	plain := files{"a": "1"}.tar(t)
	config := v1.ConfigFile{OS: "linux", Architecture: arch, RootFS: v1.RootFS{Type: "layers", DiffIDs: []v1.Hash{hashOf(plain)}}}
	raw, err := json.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	var buf bytes.Buffer
	w := newTarWriter(t, &buf)
	w.file("11/layer.tar", string(plain))
	w.symlink("22/layer.tar", "../11/layer.tar")
	w.file("c.json", string(raw))
	w.file("manifest.json", `[{"Config":"c.json","Layers":["22/layer.tar"]}]`)
	w.close()
	path := filepath.Join(t.TempDir(), "old.tar")
	if err := os.WriteFile(path, buf.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	wantFiles(t, ensure(t, openStore(t, t.TempDir(), quick()), "docker-archive:"+path, pull).Lower, files{"a": "1"})
}

// FuzzDockerArchive opens arbitrary files as docker archives: an error or an image,
// never a panic, and nothing left.
func FuzzDockerArchive(f *testing.F) {
	dir := f.TempDir()
	path := filepath.Join(dir, "a.tar")
	writeArchive(f, path, map[string]v1.Image{"app:1": simple(f, "1")})
	content, err := os.ReadFile(path)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(content)
	f.Add(files{"manifest.json": `[{"Config":"manifest.json","Layers":["manifest.json"]}]`}.tar(f))
	f.Fuzz(func(t *testing.T, content []byte) {
		path := filepath.Join(t.TempDir(), "f.tar")
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		store := t.TempDir()
		img, err := openStore(t, store, quick()).Ensure(t.Context(), "docker-archive:"+path, pull)
		if err != nil {
			wantClean(t, store, 0)
			return
		}
		closeImage(t, img)
	})
}

// FuzzLayoutIndex resolves arbitrary index files.
func FuzzLayoutIndex(f *testing.F) {
	dir := filepath.Join(f.TempDir(), "img")
	writeLayout(f, dir, map[string]v1.Image{"a": simple(f, "1")})
	content, err := os.ReadFile(filepath.Join(dir, "index.json"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(content)
	f.Add([]byte(`{"manifests":[{"mediaType":"application/vnd.oci.image.index.v1+json","digest":"sha256:../../x"}]}`))
	f.Fuzz(func(t *testing.T, content []byte) {
		dir, store := t.TempDir(), t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "index.json"), content, 0o600); err != nil {
			t.Fatal(err)
		}
		if img, err := openStore(t, store, quick()).Ensure(t.Context(), "oci:"+dir, pull); err == nil {
			closeImage(t, img)
			t.Error("an index without blobs is an image")
		}
		wantClean(t, store, 0)
	})
}
