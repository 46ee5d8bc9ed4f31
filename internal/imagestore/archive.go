package imagestore

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// maxArchiveFiles bounds the index of a docker archive. Each layer has three
// files at most.
const maxArchiveFiles = 16 * maxLayers

// archiveOrigin reads a docker archive: a tar with manifest.json, a config and the
// layers, as "docker save" writes it. Blobs are read where they lie in the file.
type archiveOrigin struct {
	path, tag string
	file      *os.File
	members   map[string]member
	blobs     map[v1.Hash]member
}

// member is one file of the archive, or a link to another.
type member struct {
	offset, size int64
	link         string
}

// archiveImage is an element of manifest.json.
type archiveImage struct {
	Config   string
	RepoTags []string
	Layers   []string
}

func (o *archiveOrigin) local() bool  { return true }
func (o *archiveOrigin) close() error { return o.file.Close() }

func (o *archiveOrigin) fail(reason string, err error) error {
	return &LayoutError{Path: o.path, Reason: reason, Err: err}
}

// openArchive indexes the archive: it reads the tar headers and seeks over the
// rest.
func openArchive(path, tag string) (origin, error) {
	f, err := openRegular(path)
	if err != nil {
		return nil, &LayoutError{Path: path, Reason: "is no docker archive", Err: err}
	}
	o := &archiveOrigin{path: path, tag: tag, file: f, members: map[string]member{}, blobs: map[v1.Hash]member{}}
	if err := o.index(); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return o, nil
}

func (o *archiveOrigin) index() error {
	var magic [4]byte
	n, err := o.file.ReadAt(magic[:], 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return o.fail("cannot be read", err)
	}
	if k := compressionOf(magic[:n]); k != "" {
		return o.fail("is compressed with "+k+": uncompress the file first", nil)
	}
	tr := tar.NewReader(o.file)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return o.fail("is no docker archive", err)
		}
		m := member{size: h.Size}
		switch h.Typeflag {
		case tar.TypeReg:
		case tar.TypeSymlink:
			//nolint:gosec // a key of our own map, no path on the host
			m.link = path.Join(path.Dir(path.Clean(h.Name)), h.Linkname)
		case tar.TypeLink:
			m.link = path.Clean(h.Linkname)
		default:
			continue
		}
		if m.offset, err = o.file.Seek(0, io.SeekCurrent); err != nil {
			return o.fail("cannot be read", err)
		}
		if len(o.members) >= maxArchiveFiles {
			return o.fail(fmt.Sprintf("has more than %d files", maxArchiveFiles), nil)
		}
		o.members[path.Clean(h.Name)] = m
	}
}

// find returns the file called name, through links.
func (o *archiveOrigin) find(name string) (member, error) {
	at := path.Clean(name)
	for range maxNesting {
		m, ok := o.members[at]
		if !ok {
			break
		}
		if m.link == "" {
			return m, nil
		}
		at = m.link
	}
	return member{}, o.fail(fmt.Sprintf("has no file %q", name), nil)
}

func (o *archiveOrigin) section(m member) *io.SectionReader {
	return io.NewSectionReader(o.file, m.offset, m.size)
}

func (o *archiveOrigin) read(name string) ([]byte, error) {
	m, err := o.find(name)
	if err != nil {
		return nil, err
	}
	raw, err := readDocument(o.section(m), o.path)
	if err != nil {
		return nil, o.fail("cannot be read", err)
	}
	return raw, nil
}

// root makes the manifest that the archive has not: the config and, for each diff
// ID, the layer as if it lay uncompressed in the archive. Some tools
// compress the layers in it; the diff IDs hold either way.
func (o *archiveOrigin) root(context.Context) (document, error) {
	image, err := o.image()
	if err != nil {
		return document{}, err
	}
	raw, err := o.read(image.Config)
	if err != nil {
		return document{}, err
	}
	config, err := v1.ParseConfigFile(bytes.NewReader(raw))
	if err != nil {
		return document{}, o.fail("has a damaged configuration", err)
	}
	if len(config.RootFS.DiffIDs) != len(image.Layers) {
		return document{}, o.fail(fmt.Sprintf("has %d layers and a configuration for %d", len(image.Layers), len(config.RootFS.DiffIDs)), nil)
	}
	manifest := v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1}
	manifest.Config = v1.Descriptor{MediaType: types.OCIConfigJSON, Size: int64(len(raw)), Digest: sha256Of(raw)}
	if o.blobs[manifest.Config.Digest], err = o.find(image.Config); err != nil {
		return document{}, err
	}
	for k, layer := range image.Layers {
		m, err := o.find(layer)
		if err != nil {
			return document{}, err
		}
		id := config.RootFS.DiffIDs[k]
		o.blobs[id] = m
		manifest.Layers = append(manifest.Layers, v1.Descriptor{MediaType: types.OCIUncompressedLayer, Size: m.size, Digest: id})
	}
	made, err := json.Marshal(manifest)
	return document{made, types.OCIManifestSchema1}, err
}

// image picks the image with the tag, or the only one.
func (o *archiveOrigin) image() (archiveImage, error) {
	raw, err := o.read("manifest.json")
	if err != nil {
		return archiveImage{}, err
	}
	var images []archiveImage
	if err := json.Unmarshal(raw, &images); err != nil {
		return archiveImage{}, o.fail("has a damaged manifest.json", err)
	}
	var tags []string
	for _, image := range images {
		tags = append(tags, image.RepoTags...)
		if slices.Contains(image.RepoTags, o.tag) || slices.Contains(image.RepoTags, o.tag+":latest") {
			return image, nil
		}
	}
	if o.tag == "" && len(images) == 1 {
		return images[0], nil
	}
	return archiveImage{}, o.fail(fmt.Sprintf("has %d images, none called %q: name one of [%s]", len(images), o.tag, strings.Join(tags, ", ")), nil)
}

func (o *archiveOrigin) manifest(context.Context, v1.Descriptor) (document, error) {
	return document{}, o.fail("has no manifests", nil)
}

func (o *archiveOrigin) blob(_ context.Context, d v1.Descriptor) (io.ReadCloser, error) {
	m, ok := o.blobs[d.Digest]
	if !ok {
		return nil, o.fail("has no content "+d.Digest.String(), nil)
	}
	return io.NopCloser(o.section(m)), nil
}
