package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/cleanup"
)

// Keys of the OCI image specification, and ours, in image and index.
const (
	keyRefName  = "org.opencontainers.image.ref.name"
	keyTitle    = "org.opencontainers.image.title"
	keyCreated  = "org.opencontainers.image.created"
	keyPackages = "dev.iii.image.packages" // name=version, separated by spaces
)

// image makes the manifest and config around layer. Nothing in it depends on
// when, where or by whom it is built.
func image(r recipe, pkgs []pkg, arch string, created int64, layer v1.Layer) (v1.Image, error) {
	stamp := v1.Time{Time: time.Unix(created, 0).UTC()}
	config := &v1.ConfigFile{
		Architecture: arch, OS: "linux", Created: stamp,
		Config: v1.Config{Env: r.env, Cmd: r.cmd, Labels: map[string]string{
			keyTitle:    r.name,
			keyPackages: strings.Join(strings.Fields(packageList(pkgs)), " "),
		}},
		RootFS: v1.RootFS{Type: "layers", DiffIDs: []v1.Hash{}},
	}
	img := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	img, err := mutate.ConfigFile(img, config)
	if err != nil {
		return nil, err
	}
	img, err = mutate.Append(img, mutate.Addendum{
		Layer: layer, MediaType: types.OCILayerZStd,
		History: v1.History{Created: stamp, CreatedBy: "build/images " + r.name},
	})
	if err != nil {
		return nil, err
	}
	annotated, ok := mutate.Annotations(img, map[string]string{
		keyTitle: r.name, keyCreated: stamp.Format(time.RFC3339),
	}).(v1.Image)
	if !ok {
		return nil, errors.New("annotations turned the image into something else")
	}
	return annotated, nil
}

// packageList is one name=version a line, sorted by name.
func packageList(pkgs []pkg) string {
	var b strings.Builder
	for _, p := range pkgs {
		fmt.Fprintf(&b, "%s=%s\n", p.Name, p.Version)
	}
	return b.String()
}

// publish puts img as the only image of the OCI layout dir and reports whether
// it wrote anything: a whole layout with the same digest is left alone. A
// reader finds the old layout or the new one, whenever this process is killed.
// Callers hold the build lock: what an earlier call left half done is removed.
func publish(img v1.Image, dir string) (wrote bool, err error) {
	digest, err := img.Digest()
	if err != nil {
		return false, err
	}
	parent, name := filepath.Split(filepath.Clean(dir))
	fresh, old := filepath.Join(parent, "."+name+".new"), filepath.Join(parent, "."+name+".old")
	if err := errors.Join(os.RemoveAll(fresh), os.RemoveAll(old)); err != nil {
		return false, err
	}
	if have, err := check(dir); err == nil && have == digest {
		return false, nil
	}
	var undo cleanup.Stack
	defer func() { err = undo.RunOnError(err) }()
	if err := os.MkdirAll(parent, 0o700); err != nil {
		return false, err
	}
	undo.Add(func() error { return os.RemoveAll(fresh) })
	if err := writeLayout(img, fresh); err != nil {
		return false, fmt.Errorf("write image layout %s: %w", dir, err)
	}
	if err := replaceDir(fresh, dir, old); err != nil {
		return false, err
	}
	return true, os.RemoveAll(old)
}

func writeLayout(img v1.Image, dir string) error {
	l, err := layout.Write(dir, empty.Index)
	if err != nil {
		return err
	}
	if err := l.WriteImage(img); err != nil {
		return err
	}
	entry, err := indexEntry(img)
	if err != nil {
		return err
	}
	if err := l.AppendDescriptor(*entry); err != nil {
		return err
	}
	return syncFiles(dir)
}

// indexEntry is the image's line in index.json.
func indexEntry(img v1.Image) (*v1.Descriptor, error) {
	config, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	digest, err := img.Digest()
	if err != nil {
		return nil, err
	}
	size, err := img.Size()
	if err != nil {
		return nil, err
	}
	return &v1.Descriptor{
		MediaType: types.OCIManifestSchema1, Digest: digest, Size: size,
		Platform:    &v1.Platform{OS: config.OS, Architecture: config.Architecture},
		Annotations: map[string]string{keyRefName: "latest"},
	}, nil
}

// syncFiles flushes what is below dir to the disk, so that a name that survives
// a power cut has its content.
func syncFiles(dir string) error {
	return filepath.WalkDir(dir, func(p string, _ os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		f, err := os.Open(p)
		if err != nil {
			return err
		}
		return errors.Join(f.Sync(), f.Close())
	})
}

// check reads the layout at dir with every hash verified and returns its
// image's digest.
func check(dir string) (v1.Hash, error) {
	index, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		return v1.Hash{}, err
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		return v1.Hash{}, err
	}
	if len(manifest.Manifests) != 1 {
		return v1.Hash{}, fmt.Errorf("%s has %d images, not one", dir, len(manifest.Manifests))
	}
	entry := manifest.Manifests[0]
	img, err := index.Image(entry.Digest)
	if err != nil {
		return v1.Hash{}, err
	}
	m, err := img.Manifest()
	if err != nil {
		return v1.Hash{}, err
	}
	l := layout.Path(dir)
	for _, d := range append([]v1.Descriptor{entry, m.Config}, m.Layers...) {
		blob, err := l.Blob(d.Digest)
		if err != nil {
			return v1.Hash{}, err
		}
		have, _, err := v1.SHA256(blob)
		if err := errors.Join(err, blob.Close()); err != nil {
			return v1.Hash{}, err
		}
		if have != d.Digest {
			return v1.Hash{}, fmt.Errorf("%s: blob %s is damaged", dir, d.Digest)
		}
	}
	return entry.Digest, nil
}

// report prints one line about a finished image.
func report(w io.Writer, name string, img v1.Image, dir string, wrote bool) error {
	digest, err := img.Digest()
	if err != nil {
		return err
	}
	m, err := img.Manifest()
	if err != nil {
		return err
	}
	var size int64
	for _, l := range m.Layers {
		size += l.Size
	}
	what := "written"
	if !wrote {
		what = "already up to date"
	}
	_, err = fmt.Fprintf(w, "%s: %s, %.1f MiB compressed, %s in %s\n", name, digest, float64(size)/(1<<20), what, dir)
	return err
}

// swapDir replaces dir by two renames and takes the first back when the second
// fails.
func swapDir(fresh, dir, old string) error {
	if err := os.Rename(dir, old); err != nil {
		return err
	}
	if err := os.Rename(fresh, dir); err != nil {
		return errors.Join(err, os.Rename(old, dir))
	}
	return nil
}
