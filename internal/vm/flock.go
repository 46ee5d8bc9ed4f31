package vm

import (
	"context"
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// lockRetry is the pause between two tries for a lock that another process
// holds. flock cannot wait and be cancelled at the same time.
const lockRetry = 20 * time.Millisecond

// errLocked tells that another open file holds the lock.
var errLocked = errors.New("locked")

// openLock opens path, made 0600 where missing, for flock. Nothing of it is
// inherited by children.
func openLock(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
}

// tryLock flocks f without waiting; errLocked when somebody else has it.
// exclusive says which kind. The kernel frees it when the last duplicate of f
// is closed.
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

// waitLock is tryLock again and again until ctx ends.
func waitLock(ctx context.Context, f *os.File, exclusive bool) error {
	for {
		err := tryLock(f, exclusive)
		if !errors.Is(err, errLocked) {
			return err
		}
		if err := pause(ctx, lockRetry); err != nil {
			return err
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
