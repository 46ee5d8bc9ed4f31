package adapter_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"path/filepath"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/imagestore"
)

// imageStore finds python in a local layout, and nothing else.
func imageStore(t testing.TB, dir string) *imagestore.Store {
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
	image, err = mutate.ConfigFile(image, &v1.ConfigFile{Architecture: "amd64", OS: "linux", RootFS: config.RootFS})
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
