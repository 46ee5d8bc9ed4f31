// Package flock locks files by flock(2): a lock belongs to the open file, is
// shared by its duplicates in other processes, and is freed by the kernel when
// the last of them is closed, also by kill -9.
package flock

import (
	"context"
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Kind is how a file is locked.
type Kind int

// Any number of open files may hold a Shared lock, or one an Exclusive one.
const (
	Shared Kind = iota
	Exclusive
)

// ErrLocked tells that another open file holds a lock that excludes this one.
var ErrLocked = errors.New("locked by another process")

// retry is the pause between two tries of Wait: flock(2) cannot both wait and be
// cancelled.
const retry = 20 * time.Millisecond

// Open opens path to be locked, made with mode 0600 where it is missing. A
// symlink in its place is refused.
func Open(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
}

// Try locks f, or changes its lock, without waiting.
func Try(f *os.File, kind Kind) error {
	how := unix.LOCK_SH
	if kind == Exclusive {
		how = unix.LOCK_EX
	}
	for {
		err := unix.Flock(int(f.Fd()), how|unix.LOCK_NB)
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EWOULDBLOCK):
			return ErrLocked
		case err != nil:
			return &os.PathError{Op: "flock", Path: f.Name(), Err: err}
		default:
			return nil
		}
	}
}

// Wait is Try until the lock is free or ctx ends; it then returns ctx's cause.
func Wait(ctx context.Context, f *os.File, kind Kind) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-timer.C:
		}
		if err := Try(f, kind); !errors.Is(err, ErrLocked) {
			return err
		}
		timer.Reset(retry)
	}
}

// Unlock frees f's lock and closes f. It is for a lock that no other process
// shares: closing alone would leave the lock to the duplicate that a child has
// which another goroutine is just forking, until the child runs its program.
func Unlock(f *os.File) error {
	err := unix.Flock(int(f.Fd()), unix.LOCK_UN)
	return errors.Join(err, f.Close())
}
