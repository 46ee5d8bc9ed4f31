package imagestore

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// Prefixes of references that are no registry's.
const (
	prefixLayout  = "oci:"
	prefixArchive = "docker-archive:"
	prefixDigest  = "sha256:"
)

// origin is where an image comes from. Nothing that it returns is verified.
type origin interface {
	// root returns the manifest or index that the reference names.
	root(ctx context.Context) (document, error)
	// manifest returns the manifest or index with d's digest.
	manifest(ctx context.Context, d v1.Descriptor) (document, error)
	// blob opens the content with d's digest; the caller closes it.
	blob(ctx context.Context, d v1.Descriptor) (io.ReadCloser, error)
	// local tells that blobs are files here: they need no download.
	local() bool
	// close frees connections and files.
	close() error
}

// document is a manifest or index as it was served.
type document struct {
	raw       []byte
	mediaType types.MediaType
}

// source is a parsed reference.
type source struct {
	// ref is the reference in full and the key of its record.
	ref string
	// digest is set when ref names a manifest or index by digest in a registry or
	// in the store.
	digest string
	// inStore tells that the image can come from the store alone.
	inStore bool
	// local sources are asked every time: that is quick and needs no network.
	local bool
	open  func() (origin, error)
}

// source parses ref. A catalog name with a layout in Options.LayoutDir takes
// precedence.
func (s *Store) source(ref, catalogName string) (source, error) {
	if dir, ok, err := s.layoutOf(catalogName); ok || err != nil {
		return layoutSource(dir, ""), err
	}
	if rest, ok := strings.CutPrefix(ref, prefixLayout); ok {
		dir, tag, err := splitPath(ref, rest)
		return layoutSource(dir, tag), err
	}
	if rest, ok := strings.CutPrefix(ref, prefixArchive); ok {
		path, tag, err := splitPath(ref, rest)
		return archiveSource(path, tag), err
	}
	if strings.HasPrefix(ref, prefixDigest) {
		h, err := v1.NewHash(ref)
		if err != nil {
			return source{}, &ReferenceError{ref, err}
		}
		return source{ref: h.String(), digest: h.String(), inStore: true}, nil
	}
	return s.registrySource(ref)
}

// layoutOf finds the OCI layout of a catalog name.
func (s *Store) layoutOf(catalogName string) (string, bool, error) {
	if s.opts.LayoutDir == "" || catalogName == "" || catalogName == "." || catalogName == ".." || strings.ContainsAny(catalogName, "/\x00") {
		return "", false, nil
	}
	dir, err := filepath.Abs(filepath.Join(s.opts.LayoutDir, catalogName))
	if err != nil {
		return "", false, err
	}
	_, err = os.Stat(filepath.Join(dir, fileIndex))
	if errors.Is(err, fs.ErrNotExist) {
		return "", false, nil
	}
	if err != nil {
		return "", false, &LayoutError{Path: dir, Reason: "cannot look into this image folder", Err: err}
	}
	return dir, true, nil
}

// splitPath splits "<path>[:tag]". A path that exists as it is has no tag.
func splitPath(ref, rest string) (path, tag string, err error) {
	path = rest
	if _, err := os.Stat(rest); err != nil {
		if i := strings.LastIndexByte(rest, ':'); i > 0 && !strings.HasSuffix(rest, ":") {
			path, tag = rest[:i], rest[i+1:]
			// A docker archive's names have a tag of their own: "img.tar:app:1".
			if _, err := os.Stat(path); err != nil {
				if j := strings.LastIndexByte(path, ':'); j > 0 {
					if _, err := os.Stat(rest[:j]); err == nil {
						path, tag = rest[:j], rest[j+1:]
					}
				}
			}
		}
	}
	if path == "" {
		return "", "", &ReferenceError{ref, errors.New("names no path")}
	}
	path, err = filepath.Abs(path)
	return path, tag, err
}

// withTag is the full form of a local reference.
func withTag(prefix, path, tag string) string {
	if tag == "" {
		return prefix + path
	}
	return prefix + path + ":" + tag
}

func layoutSource(dir, tag string) source {
	return source{ref: withTag(prefixLayout, dir, tag), local: true, open: func() (origin, error) {
		return &layoutOrigin{dir: dir, tag: tag}, nil
	}}
}

func archiveSource(path, tag string) source {
	return source{ref: withTag(prefixArchive, path, tag), local: true, open: func() (origin, error) {
		return openArchive(path, tag)
	}}
}

func (s *Store) registrySource(ref string) (source, error) {
	parsed, err := name.ParseReference(ref)
	if err != nil {
		return source{}, &ReferenceError{ref, errors.New("is no registry's name[:tag][@digest] and does not begin with \"oci:\" or \"docker-archive:\"")}
	}
	if s.insecure(parsed.Context().RegistryStr()) {
		if parsed, err = name.ParseReference(ref, name.Insecure); err != nil {
			return source{}, &ReferenceError{ref, err}
		}
	}
	src := source{ref: strings.Replace(parsed.Name(), name.DefaultRegistry+"/", "docker.io/", 1)}
	if d, ok := parsed.(name.Digest); ok {
		src.digest = d.DigestStr()
		if !strings.HasPrefix(src.digest, prefixDigest) {
			return source{}, &ReferenceError{ref, errors.New("has a digest other than sha256")}
		}
	}
	src.open = func() (origin, error) { return newRegistry(s, src.ref, parsed) }
	return src, nil
}
