package sandbox

import (
	"context"
	"log/slog"
	"sync"
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
		case <-ticker.C:
			m.askNetworks()
			m.reap(time.Now())
		}
	}
}

// askTimeout bounds a question to a shim, which runs on this host, or through it to
// an agent.
const askTimeout = 5 * time.Second

// each calls do for every one of the sandboxes, for all at the same time, and waits
// until they have returned. ctx gives each of them askTimeout.
func (m *Manager) each(sandboxes []*entry, do func(ctx context.Context, e *entry)) {
	var calls sync.WaitGroup
	for _, e := range sandboxes {
		calls.Go(func() {
			ctx, cancel := context.WithTimeout(m.life, askTimeout)
			defer cancel()
			do(ctx, e)
		})
	}
	calls.Wait()
}

// askNetworks counts what went through networks as activity, for the sandboxes
// that would be ended otherwise. A shim that does not answer has no say.
func (m *Manager) askNetworks() {
	now := time.Now()
	m.mu.Lock()
	var asked []*entry
	for _, e := range m.entries {
		if e.networked && e.ending == nil && e.due(now.Sub(e.lastActivity), m.busyGrace()) {
			asked = append(asked, e)
		}
	}
	m.mu.Unlock()
	m.each(asked, func(ctx context.Context, e *entry) {
		stats, err := e.machine.Stats(ctx)
		if err != nil || stats.Network == nil {
			m.cfg.Log.Warn("ask a sandbox's network for its activity", "sandbox_id", e.id, "error", err)
			return
		}
		at := time.Now().Add(-stats.Network.Idle)
		m.mu.Lock()
		defer m.mu.Unlock()
		if at.After(e.lastActivity) {
			e.lastActivity = at
		}
	})
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
