package vmassets

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
)

const (
	lockName   = "lock"
	tempPrefix = ".tmp-"
	// lockPoll is how often a waiting process asks for the lock again: flock
	// itself cannot be ended by a context.
	lockPoll = 25 * time.Millisecond
)

// lockDir creates dir, takes its lock exclusively and removes what a process
// killed while holding it left under temporary names. The caller closes the
// file to let go. waiting, if not nil, is called once when somebody else holds
// the lock.
func lockDir(ctx context.Context, dir string, waiting func()) (*os.File, error) {
	if err := layout.MakePrivate(dir); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, lockName), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	if err := waitLock(ctx, f, waiting); err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", f.Name(), err), f.Close())
	}
	if err := sweep(dir); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func waitLock(ctx context.Context, f *os.File, waiting func()) error {
	tick := time.NewTicker(lockPoll)
	defer tick.Stop()
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, unix.EINTR):
			continue
		case !errors.Is(err, unix.EWOULDBLOCK):
			return err
		}
		if waiting != nil {
			waiting()
			waiting = nil
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
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

// writeFile writes name in dir by a temporary file and a rename. With durable
// the content is on the disk before the name is.
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
	if err := os.Rename(f.Name(), filepath.Join(dir, name)); err != nil {
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
