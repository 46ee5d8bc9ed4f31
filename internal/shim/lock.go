package shim

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/flock"
)

// lockPatience is how long a disk's last user may still be dying when the next
// one comes.
const lockPatience = 2 * time.Second

// lockDisk locks the image as long as the returned file is open: shared for a
// read-only one, else exclusively, because two guests on one ext4 destroy it.
func lockDisk(ctx context.Context, disk bootspec.Disk) (*os.File, error) {
	file, err := os.Open(disk.Path)
	if err != nil {
		return nil, err
	}
	kind := flock.Exclusive
	if disk.ReadOnly {
		kind = flock.Shared
	}
	ctx, cancel := context.WithTimeoutCause(ctx, lockPatience, bootspec.End{
		Class:   bootspec.EndRefused,
		Message: fmt.Sprintf("disk %s is in use by another VM: stop that one first", disk.Path),
	})
	defer cancel()
	if err := flock.Wait(ctx, file, kind); err != nil {
		_ = file.Close()
		return nil, err
	}
	return file, nil
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
