package imagestore

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/flock"
)

// lockPause is the pause between two tries for a lock: flock cannot both wait and
// be cancelled. Waiting for a pull may take minutes, so 25 ms is nothing.
const lockPause = 25 * time.Millisecond

// stillThere reports whether f's path leads to f: a lock on a file that was
// removed meanwhile protects nothing.
func stillThere(f *os.File) (bool, error) {
	opened, err := f.Stat()
	if err != nil {
		return false, err
	}
	named, err := os.Lstat(f.Name())
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil && os.SameFile(opened, named), err
}

// pause waits for d or returns the cause of ctx's end.
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

// workLock is the exclusive right to pull one reference or digest. Its file tells
// others how far the work is.
type workLock struct{ file *os.File }

// noteSize is the size of the progress note in a lock file.
const noteSize = 512

// acquire waits for the lock file path. waiting is called now and then with what
// the holder last noted; nil if nothing readable is there.
func acquire(ctx context.Context, path string, waiting func(*Progress)) (*workLock, error) {
	for {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		f, err := flock.Open(path)
		if err != nil {
			return nil, err
		}
		for {
			if err = flock.Try(f, flock.Exclusive); !errors.Is(err, flock.ErrLocked) {
				break
			}
			waiting(readNote(f))
			if err = pause(ctx, lockPause); err != nil {
				break
			}
		}
		ok := false
		if err == nil {
			ok, err = stillThere(f)
		}
		if ok {
			return &workLock{f}, nil
		}
		if err := errors.Join(err, flock.Unlock(f)); err != nil {
			return nil, err
		}
	}
}

// note tells waiters how far the work is. They can do without, so errors count
// for nothing.
func (l *workLock) note(p Progress) {
	content, err := json.Marshal(p)
	if err != nil || len(content) > noteSize {
		return
	}
	padded := make([]byte, noteSize)
	for i := copy(padded, content); i < noteSize; i++ {
		padded[i] = ' '
	}
	_, _ = l.file.WriteAt(padded, 0)
}

func readNote(f *os.File) *Progress {
	content := make([]byte, noteSize)
	n, _ := f.ReadAt(content, 0)
	var p Progress
	if json.Unmarshal(content[:n], &p) != nil {
		return nil
	}
	return &p
}

// release frees the lock. The file stays, without a note.
func (l *workLock) release() error {
	return errors.Join(l.file.Truncate(0), flock.Unlock(l.file))
}
