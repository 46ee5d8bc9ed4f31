//go:build linux

package agent

import (
	"context"
	"io"
	"log/slog"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// SetStall makes the patience of f with uploads and disks short.
func (f *Files) SetStall(d time.Duration) { f.stall = d }

// MaxTransfers is for tests from outside.
const MaxTransfers = maxTransfers

// An operation that the kernel does not answer is the same as one that waits for
// a channel: its call ends all the same.
func TestSingle_StuckOperationDoesNotHoldTheCall(t *testing.T) {
	t.Parallel()
	f := NewFiles(slog.New(slog.DiscardHandler))
	release, ended := make(chan struct{}), make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	started := make(chan struct{})
	go func() {
		<-started
		cancel()
	}()
	_, err := single(ctx, f, f.onPath("stuck", nil), func(context.Context) (int, error) {
		defer close(ended)
		close(started)
		<-release
		return 1, nil
	})
	if status.Code(err) != codes.Canceled {
		t.Errorf("%v", err)
	}
	if len(f.slots) != 1 {
		t.Errorf("%d slots are taken by one stuck operation", len(f.slots))
	}
	close(release)
	<-ended
}

func TestMany_StalledDisk(t *testing.T) {
	t.Parallel()
	f := NewFiles(slog.New(slog.DiscardHandler))
	sent := 0
	err := many(t.Context(), f, task{"stuck", nil, f.slots, 50 * time.Millisecond}, func(ctx context.Context, emit func(int) error) error {
		if err := emit(1); err != nil {
			return err
		}
		<-ctx.Done()
		return ctx.Err()
	}, func(int) error {
		sent++
		return nil
	})
	if status.Code(err) != codes.FailedPrecondition || sent != 1 {
		t.Errorf("%v after %d", err, sent)
	}
}

func TestMany_ReaderThatIsGoneEndsTheOperation(t *testing.T) {
	t.Parallel()
	f := NewFiles(slog.New(slog.DiscardHandler))
	ended := make(chan struct{})
	err := many(t.Context(), f, f.onPath("read", nil), func(_ context.Context, emit func(int) error) error {
		defer close(ended)
		for {
			if err := emit(1); err != nil {
				return err
			}
		}
	}, func(int) error { return io.ErrClosedPipe })
	if err == nil {
		t.Error("no error")
	}
	<-ended
}

func TestStart_WaitsForASlotNoLongerThanItsCall(t *testing.T) {
	t.Parallel()
	f := NewFiles(slog.New(slog.DiscardHandler))
	for range cap(f.slots) {
		f.slots <- struct{}{}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err := single(ctx, f, f.onPath("stat", nil), func(context.Context) (int, error) { return 0, nil })
	if status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("%v", err)
	}
	<-f.slots
	if _, err := single(t.Context(), f, f.onPath("stat", nil), func(context.Context) (int, error) { return 0, nil }); err != nil {
		t.Error(err)
	}
}
