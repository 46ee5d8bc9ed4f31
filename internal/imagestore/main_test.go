package imagestore_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	reader "github.com/erofs/go-erofs"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/zstd"
	"go.uber.org/goleak"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/imagestore"
)

func TestMain(m *testing.M) {
	if os.Getenv("IMAGESTORE_TEST_PULL") != "" {
		os.Exit(pullHelper())
	}
	goleak.VerifyTestMain(m)
}

const arch = "amd64"

// quick are options under which nothing waits for seconds.
func quick() imagestore.Options {
	return imagestore.Options{Arch: arch, RetryWaits: []time.Duration{time.Millisecond, time.Millisecond}}
}

func openStore(t testing.TB, dir string, opts imagestore.Options) *imagestore.Store {
	t.Helper()
	s, err := imagestore.Open(dir, opts)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// files is a layer: names and bodies; a name with a trailing slash is a directory.
type files map[string]string

func (f files) tar(t testing.TB) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, name := range slices.Sorted(maps.Keys(f)) {
		h := &tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(f[name]))}
		if strings.HasSuffix(name, "/") {
			h.Typeflag, h.Mode = tar.TypeDir, 0o755
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, f[name]); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

// blobLayer is a layer whose bytes and claims a test chooses.
type blobLayer struct {
	blob      []byte
	plain     []byte
	mediaType types.MediaType
	diffID    v1.Hash
}

func (l blobLayer) Digest() (v1.Hash, error)            { return hashOf(l.blob), nil }
func (l blobLayer) DiffID() (v1.Hash, error)            { return l.diffID, nil }
func (l blobLayer) Size() (int64, error)                { return int64(len(l.blob)), nil }
func (l blobLayer) MediaType() (types.MediaType, error) { return l.mediaType, nil }
func (l blobLayer) Compressed() (io.ReadCloser, error) {
	return io.NopCloser(bytes.NewReader(l.blob)), nil
}

func (l blobLayer) Uncompressed() (io.ReadCloser, error) {
	return io.NopCloser(bytes.NewReader(l.plain)), nil
}

func plainLayer(plain []byte) blobLayer {
	return blobLayer{plain, plain, types.OCIUncompressedLayer, hashOf(plain)}
}

func compressedLayer(plain, blob []byte, m types.MediaType) blobLayer {
	return blobLayer{blob, plain, m, hashOf(plain)}
}

func hashOf(p []byte) v1.Hash {
	sum := sha256.Sum256(p)
	return v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(sum[:])}
}

func gzipLayer(t testing.TB, plain []byte) blobLayer {
	t.Helper()
	var buf bytes.Buffer
	w := gzip.NewWriter(&buf)
	_, err := w.Write(plain)
	if err := errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	return compressedLayer(plain, buf.Bytes(), types.OCILayer)
}

func zstdLayer(t testing.TB, plain []byte) blobLayer {
	t.Helper()
	w, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	return compressedLayer(plain, w.EncodeAll(plain, nil), types.OCILayerZStd)
}

// imageOf makes an image for platform "os/arch" of layers.
func imageOf(t testing.TB, platform string, layers ...blobLayer) v1.Image {
	t.Helper()
	img := mutate.MediaType(empty.Image, types.OCIManifestSchema1)
	img = mutate.ConfigMediaType(img, types.OCIConfigJSON)
	for _, l := range layers {
		var err error
		if img, err = mutate.AppendLayers(img, l); err != nil {
			t.Fatal(err)
		}
	}
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	config = config.DeepCopy()
	config.OS, config.Architecture, _ = strings.Cut(platform, "/")
	config.Config = v1.Config{Env: []string{"PATH=/bin", "A=b c"}, WorkingDir: "/work", User: "1000:1000", Entrypoint: []string{"/e"}, Cmd: []string{"c"}}
	if img, err = mutate.ConfigFile(img, config); err != nil {
		t.Fatal(err)
	}
	return img
}

func simple(t testing.TB, body string) v1.Image {
	t.Helper()
	return imageOf(t, "linux/"+arch, gzipLayer(t, files{"etc/name": body}.tar(t)))
}

func digestOf(t testing.TB, img interface{ Digest() (v1.Hash, error) }) string {
	t.Helper()
	d, err := img.Digest()
	if err != nil {
		t.Fatal(err)
	}
	return d.String()
}

// server is a registry on loopback that counts blobs and can be told to misbehave.
type server struct {
	host string
	http *httptest.Server

	mu    sync.Mutex
	gets  map[string]int
	fault http.HandlerFunc // answers GETs of blobs when set and not told otherwise
	real  http.Handler
}

func newServer(t testing.TB) *server {
	t.Helper()
	s := &server{gets: map[string]int{}, real: registry.New(registry.Logger(slog.NewLogLogger(slog.DiscardHandler, slog.LevelInfo)))}
	s.http = httptest.NewServer(s)
	s.host = strings.TrimPrefix(s.http.URL, "http://")
	t.Cleanup(s.http.Close)
	return s
}

func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	fault := s.fault
	if r.Method == http.MethodGet {
		s.gets[r.URL.Path]++
	}
	s.mu.Unlock()
	if fault != nil && r.Method == http.MethodGet {
		fault(w, r)
		return
	}
	s.real.ServeHTTP(w, r)
}

func (s *server) setFault(f http.HandlerFunc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fault = f
}

// blobGets returns how often each blob was asked for.
func (s *server) blobGets() map[string]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	blobs := map[string]int{}
	for path, n := range s.gets {
		if _, digest, ok := strings.Cut(path, "/blobs/"); ok {
			blobs[digest] += n
		}
	}
	return blobs
}

func (s *server) push(t testing.TB, repo string, img v1.Image) string {
	t.Helper()
	ref, err := name.ParseReference(s.host + "/" + repo)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(ref, img); err != nil {
		t.Fatal(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gets = map[string]int{}
	return ref.String()
}

func (s *server) pushIndex(t testing.TB, repo string, index v1.ImageIndex) string {
	t.Helper()
	ref, err := name.ParseReference(s.host + "/" + repo)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.WriteIndex(ref, index); err != nil {
		t.Fatal(err)
	}
	return ref.String()
}

// isLayer tells whether a request is for one of the image's layers, the config not
// being one.
func isLayer(t testing.TB, img v1.Image) func(*http.Request) bool {
	t.Helper()
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	paths := map[string]bool{}
	for _, l := range layers {
		paths["/blobs/"+digestOf(t, l)] = true
	}
	return func(r *http.Request) bool {
		i := strings.LastIndex(r.URL.Path, "/blobs/")
		return i >= 0 && paths[r.URL.Path[i:]]
	}
}

var pull = imagestore.EnsureOptions{PullMissing: true}

// ensure returns an image that the test closes.
func ensure(t testing.TB, s *imagestore.Store, ref string, opts imagestore.EnsureOptions) *imagestore.Image {
	t.Helper()
	img, err := s.Ensure(t.Context(), ref, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := img.Close(); err != nil {
			t.Error(err)
		}
	})
	return img
}

func closeImage(t testing.TB, img *imagestore.Image) {
	t.Helper()
	if err := img.Close(); err != nil {
		t.Fatal(err)
	}
}

// lowerFiles reads a lower back: names and bodies, directories with a slash.
func lowerFiles(t testing.TB, path string) files {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}()
	img, err := reader.Open(f)
	if err != nil {
		t.Fatal(err)
	}
	all := files{}
	err = fs.WalkDir(img, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == "." {
			return err
		}
		if d.IsDir() {
			all[path+"/"] = ""
			return nil
		}
		body, err := fs.ReadFile(img, path)
		all[path] = string(body)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func wantFiles(t testing.TB, path string, want files) {
	t.Helper()
	if got := lowerFiles(t, path); !maps.Equal(got, want) {
		t.Errorf("lower has %.300q, want %.300q", got, want)
	}
}

// wantClean checks that a store has no work in progress, and no more images than n.
func wantClean(t testing.TB, dir string, n int) {
	t.Helper()
	for sub, want := range map[string]int{"tmp": 0, "images": n} {
		entries, err := os.ReadDir(filepath.Join(dir, sub))
		if err != nil {
			t.Fatal(err)
		}
		if len(entries) != want {
			t.Errorf("%s has %d entries, want %d: %v", sub, len(entries), want, entries)
		}
	}
}

// tarWriter writes tars entry by entry.
type tarWriter struct {
	t testing.TB
	w *tar.Writer
}

func newTarWriter(t testing.TB, w io.Writer) tarWriter { return tarWriter{t, tar.NewWriter(w)} }

func (w tarWriter) add(h *tar.Header, body string) {
	w.t.Helper()
	if err := w.w.WriteHeader(h); err != nil {
		w.t.Fatal(err)
	}
	if _, err := io.WriteString(w.w, body); err != nil {
		w.t.Fatal(err)
	}
}

func (w tarWriter) file(name, body string) {
	w.t.Helper()
	w.add(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(body))}, body)
}

func (w tarWriter) symlink(name, target string) {
	w.t.Helper()
	w.add(&tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target}, "")
}

func (w tarWriter) close() {
	w.t.Helper()
	if err := w.w.Close(); err != nil {
		w.t.Fatal(err)
	}
}
