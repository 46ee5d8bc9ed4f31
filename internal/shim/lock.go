package shim

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
)

// A disk's last user may still be dying when the next one comes.
const (
	lockPatience = 2 * time.Second
	lockRetry    = 50 * time.Millisecond
)

// errLocked tells that another open file holds the lock.
var errLocked = errors.New("locked")

// openLock opens a lock file, made 0600 where missing.
func openLock(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
}

// tryLock flocks f without waiting; errLocked when somebody else has it. The
// kernel frees it when the last duplicate of f is closed.
func tryLock(f *os.File, exclusive bool) error {
	how := unix.LOCK_SH
	if exclusive {
		how = unix.LOCK_EX
	}
	for {
		err := unix.Flock(int(f.Fd()), how|unix.LOCK_NB)
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EWOULDBLOCK):
			return errLocked
		case err != nil:
			return &os.PathError{Op: "flock", Path: f.Name(), Err: err}
		default:
			return nil
		}
	}
}

// lockDisk locks the image as long as the returned file is open: shared for a
// read-only one, else exclusively, because two guests on one ext4 destroy it.
func lockDisk(ctx context.Context, disk bootspec.Disk) (*os.File, error) {
	file, err := os.Open(disk.Path)
	if err != nil {
		return nil, err
	}
	deadline := time.Now().Add(lockPatience)
	for {
		err := tryLock(file, !disk.ReadOnly)
		if err == nil {
			return file, nil
		}
		if errors.Is(err, errLocked) && time.Now().After(deadline) {
			err = bootspec.End{
				Class:   bootspec.EndRefused,
				Message: fmt.Sprintf("disk %s is in use by another VM: stop that one first", disk.Path),
			}
		}
		if !errors.Is(err, errLocked) {
			_ = file.Close()
			return nil, err
		}
		if err := pause(ctx, lockRetry); err != nil {
			_ = file.Close()
			return nil, err
		}
	}
}

// pause waits for d, or returns the cause of ctx's end.
func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-timer.C:
		return nil
	}
}
