package imagestore

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/sys/unix"
)

// Names of an OCI image layout (image-spec, image-layout.md).
const (
	fileIndex     = "index.json"
	annotationTag = "org.opencontainers.image.ref.name"
)

// layoutOrigin reads a directory in OCI image layout.
type layoutOrigin struct{ dir, tag string }

func (o *layoutOrigin) local() bool  { return true }
func (o *layoutOrigin) close() error { return nil }

func (o *layoutOrigin) fail(reason string, err error) error {
	return &LayoutError{Path: o.dir, Reason: reason, Err: err}
}

// root returns index.json, with the images of the tag alone if there is one.
func (o *layoutOrigin) root(context.Context) (document, error) {
	raw, err := readBounded(filepath.Join(o.dir, fileIndex))
	if err != nil {
		return document{}, o.fail("is no OCI image layout", err)
	}
	if o.tag == "" {
		return document{raw, types.OCIImageIndex}, nil
	}
	var index v1.IndexManifest
	if err := json.Unmarshal(raw, &index); err != nil {
		return document{}, o.fail("has a damaged index.json", err)
	}
	var tags []string
	index.Manifests = slices.DeleteFunc(index.Manifests, func(d v1.Descriptor) bool {
		tag := d.Annotations[annotationTag]
		if tag != "" && !slices.Contains(tags, tag) {
			tags = append(tags, tag)
		}
		return tag != o.tag
	})
	if len(index.Manifests) == 0 {
		return document{}, o.fail("has no image tagged "+o.tag+", only ["+strings.Join(tags, ", ")+"]", nil)
	}
	raw, err = json.Marshal(index)
	return document{raw, types.OCIImageIndex}, err
}

func (o *layoutOrigin) path(d v1.Descriptor) (string, error) {
	if err := checkDescriptor("content of "+o.dir, d); err != nil {
		return "", err
	}
	return filepath.Join(o.dir, "blobs", d.Digest.Algorithm, d.Digest.Hex), nil
}

func (o *layoutOrigin) manifest(_ context.Context, d v1.Descriptor) (document, error) {
	path, err := o.path(d)
	if err != nil {
		return document{}, err
	}
	raw, err := readBounded(path)
	if err != nil {
		return document{}, o.fail("is incomplete", err)
	}
	return document{raw, d.MediaType}, nil
}

func (o *layoutOrigin) blob(_ context.Context, d v1.Descriptor) (io.ReadCloser, error) {
	path, err := o.path(d)
	if err != nil {
		return nil, err
	}
	f, err := openRegular(path)
	if err != nil {
		return nil, o.fail("is incomplete", err)
	}
	return f, nil
}

// openRegular opens a file that is one: a FIFO would be waited for, a device read
// without end.
func openRegular(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = &fs.PathError{Op: "open", Path: path, Err: errors.New("is not a regular file")}
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// readBounded reads a small file.
func readBounded(path string) (_ []byte, err error) {
	f, err := openRegular(path)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	return readDocument(f, path)
}

// readDocument reads all of r, up to the bound for documents.
func readDocument(r io.Reader, path string) ([]byte, error) {
	raw, err := io.ReadAll(io.LimitReader(r, maxDocument+1))
	if err == nil && len(raw) > maxDocument {
		err = &fs.PathError{Op: "read", Path: path, Err: errors.New("is larger than 8 MiB")}
	}
	return raw, err
}
