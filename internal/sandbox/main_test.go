package sandbox_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"go.uber.org/goleak"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/catalog"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/imagestore"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/sandbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// addImage puts a tiny image into the folder of layouts.
func addImage(t testing.TB, layouts, name string) {
	t.Helper()
	var content bytes.Buffer
	w := tar.NewWriter(&content)
	err := w.WriteHeader(&tar.Header{Name: "etc/", Typeflag: tar.TypeDir, Mode: 0o755})
	if err := errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(content.Bytes())), nil
	})
	if err != nil {
		t.Fatal(err)
	}
	image, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		t.Fatal(err)
	}
	config, err := image.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	image, err = mutate.ConfigFile(image, &v1.ConfigFile{
		Architecture: "amd64", OS: "linux", RootFS: config.RootFS,
		Config: v1.Config{Env: []string{"LAYER=image", "FROM_IMAGE=yes", "not an entry", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	path, err := layout.Write(filepath.Join(layouts, name), empty.Index)
	if err != nil {
		t.Fatal(err)
	}
	if err := path.AppendImage(image, layout.WithPlatform(v1.Platform{OS: "linux", Architecture: "amd64"})); err != nil {
		t.Fatal(err)
	}
}

// images is a store that finds python in a local layout and nothing else.
func images(t testing.TB, dir string) *imagestore.Store {
	t.Helper()
	addImage(t, dir+"/layouts", "python")
	store, err := imagestore.Open(dir+"/images", imagestore.Options{
		LayoutDir: dir + "/layouts", Arch: "amd64", RetryWaits: []time.Duration{},
	})
	if err != nil {
		t.Fatal(err)
	}
	return store
}

// policy makes a catalog; by default python and node are allowed.
func policy(t testing.TB, cfg catalog.Config) *catalog.Catalog {
	t.Helper()
	if cfg.Allowed == nil {
		cfg.Allowed = []string{"python", "node"}
	}
	c, err := catalog.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// defaults is the configuration that an adapter has where nothing is configured,
// but for the images.
func defaults(t testing.TB, store *imagestore.Store) sandbox.Config {
	return sandbox.Config{
		Images: store, Catalog: policy(t, catalog.Config{}), AutoInstall: true,
		MaxSandboxes: 32, MaxExecs: 4, MaxExecTimeoutMs: 300_000,
		DefaultIdleTimeoutSecs: 300, DefaultCPUs: 1, DefaultMemoryMiB: 512,
	}
}

// wantCode fails unless err has the code and its message all the words.
func wantCode(t testing.TB, err error, code fault.Code, words ...string) {
	t.Helper()
	if !errors.Is(err, code) {
		t.Errorf("error is %v, want %s", err, code)
		return
	}
	for _, word := range words {
		if message := fault.Of(err).Message; !strings.Contains(message, word) {
			t.Errorf("%s: %q does not hold %q", code, message, word)
		}
	}
}

// create makes a sandbox that the test cannot do without.
func create(t testing.TB, m *sandbox.Manager) string {
	t.Helper()
	made, err := m.Create(context.Background(), sandbox.CreateRequest{Image: "python"})
	if err != nil {
		t.Fatal(err)
	}
	return made.SandboxID
}
