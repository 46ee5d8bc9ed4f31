package flock_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/flock"
)

func open(t *testing.T, path string) *os.File {
	t.Helper()
	f, err := flock.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func TestSharedAndExclusive(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "lock")
	a, b, c := open(t, path), open(t, path), open(t, path)
	for _, f := range []*os.File{a, b} {
		if err := flock.Try(f, flock.Shared); err != nil {
			t.Fatal(err)
		}
	}
	if err := flock.Try(c, flock.Exclusive); !errors.Is(err, flock.ErrLocked) {
		t.Fatalf("exclusive beside shared: %v", err)
	}
	if err := errors.Join(flock.Unlock(a), flock.Unlock(b)); err != nil {
		t.Fatal(err)
	}
	if err := flock.Try(c, flock.Exclusive); err != nil {
		t.Fatal(err)
	}
	if info, err := c.Stat(); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
}

func TestUnlockFreesDespiteADuplicate(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "lock")
	a, b := open(t, path), open(t, path)
	if err := flock.Try(a, flock.Exclusive); err != nil {
		t.Fatal(err)
	}
	dup, err := unix.FcntlInt(a.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(dup) }()
	if err := flock.Unlock(a); err != nil {
		t.Fatal(err)
	}
	if err := flock.Try(b, flock.Exclusive); err != nil {
		t.Fatalf("after Unlock: %v", err)
	}
}

func TestWait(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "lock")
	a, b := open(t, path), open(t, path)
	if err := flock.Try(a, flock.Exclusive); err != nil {
		t.Fatal(err)
	}
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	if err := flock.Wait(ctx, b, flock.Shared); !errors.Is(err, cause) {
		t.Fatalf("cancelled wait: %v", err)
	}
	got := make(chan error, 1)
	go func() { got <- flock.Wait(t.Context(), b, flock.Exclusive) }()
	if err := flock.Unlock(a); err != nil {
		t.Fatal(err)
	}
	if err := <-got; err != nil {
		t.Fatal(err)
	}
}

func TestOpenRefusesASymlink(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	link := filepath.Join(dir, "lock")
	if err := os.Symlink(filepath.Join(dir, "elsewhere"), link); err != nil {
		t.Fatal(err)
	}
	if f, err := flock.Open(link); err == nil {
		_ = f.Close()
		t.Fatal("a symlink was followed")
	}
}
