package vm

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/cleanup"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/flock"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
)

// machineDir is a machine directory whose lock this process holds, alone or
// together with the VM's shim.
type machineDir struct {
	layout.Machine
	id   string
	lock *os.File
}

// claim makes the directory for id, or for a new id where that is empty, and
// locks it. Killed at any point, it leaves what Collect finds.
func (l *Launcher) claim(ctx context.Context, id string) (_ *machineDir, err error) {
	if id != "" && !layout.ValidID(id) {
		return nil, fmt.Errorf("vm id %q is not 1 to 64 of a-z, 0-9 and '-'", id)
	}
	for _, dir := range []string{l.roots.Run, l.roots.State, l.roots.Machines()} {
		if err := layout.MakePrivate(dir); err != nil {
			return nil, err
		}
	}
	l.tidy(ctx)
	fence, err := l.fence(ctx, flock.Shared)
	if err != nil {
		return nil, err
	}
	defer func() { _ = fence.Close() }()

	if id != "" {
		return l.makeDir(id)
	}
	for {
		id, err := newID()
		if err != nil {
			return nil, err
		}
		if dir, err := l.makeDir(id); !errors.Is(err, fs.ErrExist) {
			return dir, err
		}
	}
}

// fence takes the lock that keeps makers and collectors of machine directories
// apart. The caller closes it.
func (l *Launcher) fence(ctx context.Context, kind flock.Kind) (*os.File, error) {
	file, err := flock.Open(l.roots.MachinesLock())
	if err != nil {
		return nil, err
	}
	if err := flock.Wait(ctx, file, kind); err != nil {
		_ = file.Close()
		return nil, err
	}
	return file, nil
}

func (l *Launcher) makeDir(id string) (_ *machineDir, err error) {
	var undo cleanup.Stack
	defer func() { err = undo.RunOnError(err) }()

	files := l.roots.Machine(id)
	if err := files.CheckSocket(); err != nil {
		return nil, err
	}
	if err := os.Mkdir(files.Dir, 0o700); err != nil {
		if errors.Is(err, fs.ErrExist) {
			return nil, fmt.Errorf("a vm with id %q exists already: %w", id, err)
		}
		return nil, err
	}
	undo.Add(func() error { return os.RemoveAll(files.Dir) })
	lock, err := flock.Open(files.Lock())
	if err != nil {
		return nil, err
	}
	undo.Add(lock.Close)
	if err := flock.Try(lock, flock.Exclusive); err != nil {
		return nil, fmt.Errorf("lock new machine directory %s: %w", files.Dir, err)
	}
	return &machineDir{Machine: files, id: id, lock: lock}, nil
}

// remove deletes socket and directory, then frees the lock. The socket goes
// first: while the directory is there, a collector still finds both.
func (d *machineDir) remove() error {
	return errors.Join(removeFiles(d.Machine), d.lock.Close())
}

func removeFiles(files layout.Machine) error {
	err := os.Remove(files.Socket)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return errors.Join(err, os.RemoveAll(files.Dir))
}

// lockExisting takes the lock of a directory that somebody else made: flock.ErrLocked
// while its VM lives, fs.ErrNotExist where there is none.
func lockExisting(files layout.Machine) (_ *os.File, err error) {
	lock, err := os.OpenFile(files.Lock(), os.O_RDWR|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	var undo cleanup.Stack
	defer func() { err = undo.RunOnError(err) }()
	undo.Add(lock.Close)
	if err := flock.Try(lock, flock.Exclusive); err != nil {
		return nil, err
	}
	// Directory and lock may have been removed, and even made anew, between
	// the two calls.
	mine, err := lock.Stat()
	if err != nil {
		return nil, err
	}
	current, err := os.Lstat(files.Lock())
	if err != nil {
		return nil, err
	}
	if !os.SameFile(mine, current) {
		return nil, flock.ErrLocked
	}
	return lock, nil
}

// newID is 12 hexadecimal digits; makeDir makes sure that it is unique.
func newID() (string, error) {
	var raw [6]byte
	if _, err := rand.Read(raw[:]); err != nil {
		return "", err
	}
	return hex.EncodeToString(raw[:]), nil
}

// tidy collects; what cannot be collected is in nobody's way.
func (l *Launcher) tidy(ctx context.Context) {
	if err := l.Collect(ctx); err != nil && ctx.Err() == nil {
		l.log.Warn("remove what dead vms left", "error", err)
	}
}

// Collect removes the machine directories, and their sockets, that neither a
// launcher nor a shim holds: what a process killed with -9 left. It is safe at
// any time and in any number of processes. It removes all it can and joins the
// errors.
func (l *Launcher) Collect(ctx context.Context) error {
	dead, err := l.claimDead(ctx)
	var errs []error
	for _, d := range dead {
		l.log.Info("remove what a dead vm left", "vm_id", d.id)
		errs = append(errs, d.remove())
	}
	return errors.Join(append(errs, err)...)
}

// claimDead locks the directories whose lock is free. It holds the fence, so
// none of them is one that is just being made.
func (l *Launcher) claimDead(ctx context.Context) ([]*machineDir, error) {
	entries, err := os.ReadDir(l.roots.Machines())
	if errors.Is(err, fs.ErrNotExist) || len(entries) == 0 {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	fence, err := l.fence(ctx, flock.Exclusive)
	if err != nil {
		return nil, err
	}
	defer func() { _ = fence.Close() }()

	var dead []*machineDir
	var errs []error
	for _, entry := range entries {
		if !entry.IsDir() || !layout.ValidID(entry.Name()) {
			continue
		}
		files := l.roots.Machine(entry.Name())
		lock, err := lockExisting(files)
		switch {
		case err == nil:
			dead = append(dead, &machineDir{Machine: files, id: entry.Name(), lock: lock})
		case errors.Is(err, fs.ErrNotExist):
			// Its maker died before the lock was there, or it is being removed;
			// nobody can be making it while we hold the fence.
			errs = append(errs, removeFiles(files))
		case errors.Is(err, flock.ErrLocked): // it lives
		default:
			errs = append(errs, err)
		}
	}
	return dead, errors.Join(errs...)
}
