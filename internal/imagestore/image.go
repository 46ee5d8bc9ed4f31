package imagestore

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/flock"
)

// recordVersion is the version of image.json and of how lowers are written. An
// image of another version counts as not there and is made anew.
const recordVersion = 1

// Config is the part of an image's configuration that matters to a VM.
type Config struct {
	// Env are the image's variables, KEY=value.
	Env        []string `json:"env,omitempty"`
	WorkingDir string   `json:"working_dir,omitempty"`
	// User is what the image would run as: "user", "uid", or either ":group".
	User       string   `json:"user,omitempty"`
	Entrypoint []string `json:"entrypoint,omitempty"`
	Cmd        []string `json:"cmd,omitempty"`
}

// record is image.json.
type record struct {
	Version  int       `json:"version"`
	Digest   string    `json:"digest"`
	Arch     string    `json:"arch"`
	Config   Config    `json:"config"`
	Size     int64     `json:"size"`
	Unpacked int64     `json:"unpacked"`
	Inodes   int       `json:"inodes"`
	Made     time.Time `json:"made"`
}

// refRecord is what a reference last stood for.
type refRecord struct {
	Ref    string    `json:"ref"`
	Arch   string    `json:"arch"`
	Digest string    `json:"digest"`
	Pulled time.Time `json:"pulled"`
}

// Image is an image in the store. It stays there until Close.
type Image struct {
	// Ref is the reference in its full form, with registry and tag.
	Ref string
	// Digest is that of the manifest, "sha256:<hex>".
	Digest string
	// Lower is the path of the EROFS file.
	Lower string
	// Config comes from the image's configuration.
	Config Config
	// Size is the length of Lower in bytes, Unpacked the sum of the files' sizes in
	// all layers.
	Size, Unpacked int64
	// Inodes is the number of files, directories and so on.
	Inodes int

	close func() error
}

// Close frees the shared lock on the lower. Further calls return what the first did.
func (i *Image) Close() error { return i.close() }

// open returns the image with this digest, its lower locked. ref only fills
// Image.Ref. fs.ErrNotExist means that it is not there, or damaged, or for
// another processor.
func (s *Store) open(ctx context.Context, digest v1.Hash, ref string) (*Image, error) {
	dir := s.imageDir(digest)
	var rec record
	if err := readJSON(filepath.Join(dir, fileRecord), &rec); err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			s.opts.Log.Warn("image cannot be read and will be made anew", "digest", digest.String(), "error", err)
		}
		return nil, fs.ErrNotExist
	}
	if rec.Version != recordVersion || rec.Digest != digest.String() || rec.Arch != s.opts.Arch {
		return nil, fs.ErrNotExist
	}
	lower, err := os.OpenFile(filepath.Join(dir, fileLower), os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	image := newImage(lower, rec, ref)
	if err := s.secure(ctx, lower, rec); err != nil {
		return nil, errors.Join(err, image.Close())
	}
	// The time of use, for GCOptions.UnusedFor. A store that cannot be written to
	// still serves.
	now := time.Now()
	_ = os.Chtimes(filepath.Join(dir, fileRecord), now, now)
	return image, nil
}

func newImage(lower *os.File, rec record, ref string) *Image {
	return &Image{
		Ref: ref, Digest: rec.Digest, Lower: lower.Name(), Config: rec.Config, Size: rec.Size,
		Unpacked: rec.Unpacked, Inodes: rec.Inodes, close: sync.OnceValue(func() error { return flock.Unlock(lower) }),
	}
}

// secure locks lower and makes sure that it is what rec describes and not removed.
func (s *Store) secure(ctx context.Context, lower *os.File, rec record) error {
	// Somebody else has it exclusively only while looking whether it is in use, or
	// removing it.
	if err := flock.Wait(ctx, lower, flock.Shared); err != nil {
		return err
	}
	there, err := stillThere(lower)
	if err != nil {
		return err
	}
	info, err := lower.Stat()
	if err != nil {
		return err
	}
	if !there {
		return fs.ErrNotExist
	}
	if info.Size() != rec.Size {
		s.opts.Log.Warn("image is damaged and will be made anew", "digest", rec.Digest, "size", info.Size(), "recorded", rec.Size)
		return fs.ErrNotExist
	}
	return nil
}
