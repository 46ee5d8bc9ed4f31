package sandbox

import (
	"log/slog"
	"time"
)

// The idle reaper's timing (contract: limits).
const (
	// reapInterval is the time between two looks.
	reapInterval = 10 * time.Second
	// busySlack is how much longer than the longest program an idle sandbox may
	// count as busy: a slot that leaked would keep it for ever.
	busySlack = time.Minute
)

// reapIdle ends idle sandboxes until the Manager is closed.
func (m *Manager) reapIdle() {
	ticker := time.NewTicker(reapInterval)
	defer ticker.Stop()
	for {
		select {
		case <-m.life.Done():
			return
		case now := <-ticker.C:
			m.reap(now)
		}
	}
}

// reap decides and claims under one lock, so that a call which was admitted is
// never cut off by a decision made before.
func (m *Manager) reap(now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return
	}
	for _, e := range m.entries {
		if idle := now.Sub(e.lastActivity); e.ending == nil && e.due(idle, m.busyGrace()) {
			level := slog.LevelInfo
			if e.execs > 0 {
				level = slog.LevelWarn
			}
			m.cfg.Log.Log(m.life, level, "end an idle sandbox", "sandbox_id", e.id, "idle", idle, "programs", e.execs)
			m.claimLocked(e, m.inOrder)
		}
	}
}

// due reports whether a sandbox is to be ended. Calls other than programs end by
// themselves and keep it for as long as they take.
func (e *entry) due(idle, busyGrace time.Duration) bool {
	switch {
	case e.ops > 0 || idle <= e.idleTimeout:
		return false
	case e.execs > 0:
		return idle > e.idleTimeout+busyGrace
	}
	return true
}

func (m *Manager) busyGrace() time.Duration {
	return clamped(m.cfg.MaxExecTimeoutMs, time.Millisecond) + busySlack
}
