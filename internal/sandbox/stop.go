package sandbox

import (
	"context"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
)

// quickWait is how long a stop that need not wait waits all the same: most VMs
// are gone by then, so that their slot is free and their id unknown.
const quickWait = time.Second

// ending is a stop under way.
type ending struct {
	done chan struct{}
	err  error // valid once done is closed
}

// Stop implements Functions. A sandbox whose stop is under way already is a
// success (contract: stop); with wait that end is waited for.
func (m *Manager) Stop(ctx context.Context, id string, wait bool) (string, error) {
	id, err := canonicalID(id)
	if err != nil {
		return "", err
	}
	stop, err := m.claim(id)
	if err != nil {
		return "", err
	}
	var enough <-chan time.Time
	if !wait {
		timer := time.NewTimer(quickWait)
		defer timer.Stop()
		enough = timer.C
	}
	select {
	case <-stop.done:
		if stop.err != nil {
			return "", fault.GuestFailed(stop.err)
		}
	case <-enough:
	case <-ctx.Done():
		if wait {
			return "", fault.GuestFailed(context.Cause(ctx))
		}
	}
	return id, nil
}

func (m *Manager) claim(id string) (*ending, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e, err := m.findLocked(id)
	if err != nil {
		return nil, err
	}
	return m.claimLocked(e, m.inOrder), nil
}

// claimLocked marks a sandbox as stopped and begins to end its VM by halt, unless
// somebody did. It is called with mu held.
func (m *Manager) claimLocked(e *entry, halt func(machine) error) *ending {
	select {
	case <-e.gone:
		over := &ending{done: make(chan struct{})}
		close(over.done)
		return over
	default:
	}
	if e.ending == nil {
		stop := &ending{done: make(chan struct{})}
		e.ending = stop
		e.cut(errStopped)
		m.tasks.Go(func() { m.finish(e, stop, halt) })
	}
	return e.ending
}

// inOrder ends a VM by asking its agent, as long as there is time for that.
func (m *Manager) inOrder(vm machine) error {
	ctx, cancel := context.WithTimeout(m.orderly, stopTimeout)
	defer cancel()
	return vm.Stop(ctx, stopGrace)
}

// finish ends the VM. Where that does not work the sandbox is taken back, so that
// another stop may try again.
func (m *Manager) finish(e *entry, stop *ending, halt func(machine) error) {
	defer close(stop.done)
	if stop.err = halt(e.machine); stop.err == nil {
		<-e.gone
		return
	}
	m.cfg.Log.Error("stop sandbox", "sandbox_id", e.id, "error", stop.err)
	m.mu.Lock()
	defer m.mu.Unlock()
	e.ending = nil
	e.born()
}
