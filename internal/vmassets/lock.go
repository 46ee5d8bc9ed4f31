package vmassets

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/flock"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
)

const (
	lockName   = "lock"
	tempPrefix = ".tmp-"
)

// lockDir creates dir, takes its lock exclusively and removes what a process
// killed while holding it left under temporary names. The caller closes the
// file to let go. waiting, if not nil, is called once when somebody else holds
// the lock.
func lockDir(ctx context.Context, dir string, waiting func()) (*os.File, error) {
	if err := layout.MakePrivate(dir); err != nil {
		return nil, err
	}
	f, err := flock.Open(filepath.Join(dir, lockName))
	if err != nil {
		return nil, err
	}
	err = flock.Try(f, flock.Exclusive)
	if errors.Is(err, flock.ErrLocked) {
		if waiting != nil {
			waiting()
		}
		err = flock.Wait(ctx, f, flock.Exclusive)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", f.Name(), err), f.Close())
	}
	if err := sweep(dir); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// sweep removes the temporary files and directories in dir.
func sweep(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), tempPrefix) {
			errs = append(errs, os.RemoveAll(filepath.Join(dir, e.Name())))
		}
	}
	return errors.Join(errs...)
}

// writeFile writes name in dir by a temporary file and a rename, whatever had
// that name. With durable the content is on the disk before the name is.
func writeFile(dir, name string, durable bool, write func(*os.File) error) (err error) {
	f, err := os.CreateTemp(dir, tempPrefix)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close(), removeIfThere(f.Name()))
		}
	}()
	if err := write(f); err != nil {
		return err
	}
	if durable {
		if err := f.Sync(); err != nil {
			return err
		}
	}
	path := filepath.Join(dir, name)
	if info, err := os.Lstat(path); err == nil && info.IsDir() {
		if err := os.RemoveAll(path); err != nil {
			return err
		}
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	return f.Close()
}

func removeIfThere(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// syncDir makes names in dir that were just created or renamed survive a crash
// of the host.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
