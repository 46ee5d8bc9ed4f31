package sandbox

import (
	"context"
	"time"
)

// clockSlack is how much the host's clock may move before the sandboxes are told.
const clockSlack = time.Second

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

// followClock sets the clocks of sandboxes when the host's has moved. One that does
// not answer keeps its own.
func (m *Manager) followClock() {
	m.mu.Lock()
	var late []*entry
	for _, e := range m.entries {
		if e.ending == nil && e.clock.moved() {
			late = append(late, e)
		}
	}
	m.mu.Unlock()
	m.each(late, func(ctx context.Context, e *entry) {
		behind, err := e.machine.Guest().SetTime(ctx, time.Now())
		if err != nil {
			m.cfg.Log.Warn("set a sandbox's clock", "sandbox_id", e.id, "error", err)
			return
		}
		m.cfg.Log.Info("a sandbox's clock was set: the host slept, or its own was", "sandbox_id", e.id, "behind", behind)
	})
}
