package vm

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/flock"
)

// slots limits how many boots go on at one time, in this process and over all
// processes that use the same lock files. A slot is a flocked file, so that the
// kernel frees it when its holder dies.
type slots struct {
	path func(n int) string
	// own has room for the boots of this process; waiting here costs nothing
	// and keeps at most one waiter per slot trying the files.
	own chan struct{}
}

func newSlots(path func(n int) string, limit int) *slots {
	return &slots{path: path, own: make(chan struct{}, limit)}
}

// acquire waits for a slot, as long as ctx allows. The caller calls release
// exactly once.
func (s *slots) acquire(ctx context.Context) (release func(), err error) {
	select {
	case s.own <- struct{}{}:
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for a boot slot (%d boots are going on): %w", cap(s.own), context.Cause(ctx))
	}
	for {
		file, err := s.try()
		switch {
		case err == nil:
			return func() {
				_ = file.Close() // nothing was written; closing frees the lock
				<-s.own
			}, nil
		case errors.Is(err, flock.ErrLocked):
			err = pause(ctx, lockRetry)
		}
		if err != nil {
			<-s.own
			return nil, fmt.Errorf("wait for a boot slot: %w", err)
		}
	}
}

// try looks for a free file. A slot's file is never removed: a new one of the
// same name would be another lock.
func (s *slots) try() (*os.File, error) {
	for n := range cap(s.own) {
		file, err := flock.Open(s.path(n))
		if err != nil {
			return nil, err
		}
		if err = flock.Try(file, flock.Exclusive); err == nil {
			return file, nil
		}
		_ = file.Close()
		if !errors.Is(err, flock.ErrLocked) {
			return nil, err
		}
	}
	return nil, flock.ErrLocked
}
