package imagestore

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/google/renameio/v2"
	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/flock"
)

// workDir is a directory in tmp that is flocked while it is being used.
type workDir struct {
	path string
	lock *os.File
}

// newWork makes a work directory. The caller calls remove.
func (s *Store) newWork() (*workDir, error) {
	for {
		path, err := os.MkdirTemp(s.tmpDir(), "work-")
		if err != nil {
			return nil, err
		}
		f, err := lockDir(path)
		if err == nil {
			return &workDir{path: path, lock: f}, nil
		}
		if !errors.Is(err, flock.ErrLocked) && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		// A collector got in between: it removes the directory, we take another.
	}
}

// lockDir opens and locks a directory that must still have its name then;
// fs.ErrNotExist when it has not.
func lockDir(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	err = flock.Try(f, flock.Exclusive)
	if err == nil {
		var ok bool
		if ok, err = stillThere(f); ok {
			return f, nil
		}
		if err == nil {
			err = fs.ErrNotExist
		}
	}
	return nil, errors.Join(err, f.Close())
}

// join names a file in the directory.
func (w *workDir) join(name string) string { return filepath.Join(w.path, name) }

// remove takes the directory with all in it away.
func (w *workDir) remove() error {
	return errors.Join(os.RemoveAll(w.path), w.lock.Close())
}

// collectLeftovers removes work directories whose process is gone and returns
// their number.
func (s *Store) collectLeftovers() (int, error) {
	entries, err := os.ReadDir(s.tmpDir())
	if err != nil {
		return 0, err
	}
	n := 0
	for _, e := range entries {
		path := filepath.Join(s.tmpDir(), e.Name())
		if !e.IsDir() {
			continue // nothing of ours
		}
		lock, err := lockDir(path)
		if errors.Is(err, flock.ErrLocked) || errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return n, err
		}
		if err := (&workDir{path, lock}).remove(); err != nil {
			return n, err
		}
		n++
	}
	if n > 0 {
		s.opts.Log.Info("removed what broken pulls left", "directories", n)
	}
	return n, nil
}

// writeJSON puts v at path by rename, with the temporary file in w.
func (w *workDir) writeJSON(path string, v any) error {
	content, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if err := renameio.WriteFile(path, append(content, '\n'), 0o600, renameio.WithTempDir(w.path), renameio.WithStaticPermissions(0o600)); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

// withWork runs f with a work directory.
func (s *Store) withWork(f func(*workDir) error) error {
	work, err := s.newWork()
	if err != nil {
		return s.named(err, 0)
	}
	return s.named(errors.Join(f(work), work.remove()), 0)
}

// readJSON reads what writeJSON wrote.
func readJSON(path string, v any) error {
	content, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(content, v); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}
