package imagestore

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// pinRecord is the content of a pin's file, whose name is a hash of the name.
type pinRecord struct {
	Name string `json:"name"`
}

func pinFile(dir, name string) string {
	sum := sha256.Sum256([]byte(name))
	return filepath.Join(dir, dirPins, hex.EncodeToString(sum[:16])+".json")
}

// Pin keeps an image in the store until [Store.Unpin] with the same name, even
// while no process uses it: for a persistent upper, which is worth nothing without
// its lower. name may be anything, such as the path of the upper. Pinning twice is
// pinning once. [ErrNotCached] if the image is not there.
func (s *Store) Pin(ctx context.Context, digest, name string) error {
	h, err := v1.NewHash(digest)
	if err != nil {
		return &ReferenceError{digest, err}
	}
	// With the lower locked the image cannot go meanwhile.
	image, err := s.open(ctx, h, digest)
	if errors.Is(err, fs.ErrNotExist) {
		return &NotCachedError{Ref: digest}
	}
	if err != nil {
		return err
	}
	return errors.Join(s.withWork(func(w *workDir) error {
		return w.writeJSON(pinFile(s.imageDir(h), name), pinRecord{name})
	}), image.Close())
}

// Unpin takes a pin away. One that is not there is no error.
func (s *Store) Unpin(_ context.Context, digest, name string) error {
	h, err := v1.NewHash(digest)
	if err != nil {
		return &ReferenceError{digest, err}
	}
	if err := os.Remove(pinFile(s.imageDir(h), name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// pins returns the names of an image's pins. A pin that cannot be read counts.
func pins(dir string) ([]string, error) {
	files, err := os.ReadDir(filepath.Join(dir, dirPins))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var names []string
	for _, f := range files {
		var rec pinRecord
		if err := readJSON(filepath.Join(dir, dirPins, f.Name()), &rec); err != nil {
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			rec.Name = "a damaged pin"
		}
		names = append(names, rec.Name)
	}
	slices.Sort(names)
	return names, nil
}
