package vm

import (
	"context"
	"time"
)

// lockRetry is the pause between two looks for what another process holds.
const lockRetry = 20 * time.Millisecond

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
