package shim

import (
	"context"
	"errors"
	"time"

	guestv1 "github.com/iii-hq/workers/sandbox-libkrun/api/guest/v1"
)

const (
	// clockInterval is the time between two looks at the host's clock.
	clockInterval = 10 * time.Second
	// clockSlack is how much it may move before the guest is told.
	clockSlack = time.Second
	// clockTimeout bounds the agent's answer.
	clockTimeout = 5 * time.Second
)

// hostClock notices that the host's wall clock moved against the time that passes:
// the host slept, which the monotonic clock does not count, or its clock was set.
// Guests do not see either.
type hostClock struct {
	// at is when the clock was read last, wall what it told then, without a
	// monotonic reading.
	at, wall time.Time
}

func newHostClock() hostClock {
	now := time.Now()
	return hostClock{at: now, wall: now.Round(0)}
}

// moved reports whether the clock moved since it was new, or since it last did.
func (c *hostClock) moved() bool {
	now := newHostClock()
	if (now.wall.Sub(c.wall) - now.at.Sub(c.at)).Abs() < clockSlack {
		return false
	}
	*c = now
	return true
}

// followClock sets the guest's clock when the host's has moved, until ctx ends. An
// agent that does not answer is asked again at the next look.
func (r *run) followClock(ctx context.Context) {
	look := time.NewTicker(clockInterval)
	defer look.Stop()
	clock, late := newHostClock(), false
	for {
		select {
		case <-ctx.Done():
			return
		case <-r.opts.ClockMoved:
			late = true
		case <-look.C:
			late = clock.moved() || late
		}
		if late {
			late = !r.setGuestClock(ctx)
		}
	}
}

// setGuestClock reports whether the guest has the host's time: one without a link
// gets it with the next one.
func (r *run) setGuestClock(ctx context.Context) bool {
	s := r.link.now()
	if s == nil {
		return true
	}
	ctx, cancel := context.WithTimeoutCause(ctx, clockTimeout, errors.New("the agent did not answer"))
	defer cancel()
	reply, err := guestv1.NewAgentServiceClient(s.client).SetTime(ctx, &guestv1.SetTimeRequest{UnixNanos: time.Now().UnixNano()})
	if err != nil {
		r.log.Warn("set the guest's clock", "error", err)
		return false
	}
	r.log.Info("the guest's clock was set: the host slept, or its own was", "behind", time.Duration(reply.GetOffsetNanos()))
	return true
}
