package sandbox

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
)

// canonicalID reads a sandbox's id in any form that a UUID has.
func canonicalID(id string) (string, error) {
	parsed, err := uuid.Parse(id)
	// Parse alone takes any two bytes for the braces of {uuid}.
	if err != nil || uuid.Validate(id) != nil {
		return "", fault.BadSandboxID(id)
	}
	return parsed.String(), nil
}

// register makes a booted sandbox known and watches it. The caller's slot is the
// entry's from now on.
func (m *Manager) register(e *entry) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return fault.ShuttingDown()
	}
	e.gone = make(chan struct{})
	e.born()
	e.created = time.Now()
	e.lastActivity = e.created
	m.made++
	e.number = m.made
	m.entries[e.id] = e
	m.tasks.Go(func() { m.watch(e) })
	return nil
}

// born begins a life.
func (e *entry) born() {
	e.life, e.cut = context.WithCancelCause(context.Background())
}

// watch waits for the VM's end and forgets the sandbox. It is the only place
// that does.
func (m *Manager) watch(e *entry) {
	<-e.machine.Done()
	m.mu.Lock()
	wanted := e.ending != nil
	delete(m.entries, e.id)
	m.used--
	if !wanted {
		m.lost.add(e.id, e.machine.End())
	}
	e.cut(e.machine.End())
	close(e.gone)
	m.mu.Unlock()
	if wanted {
		m.cfg.Log.Info("sandbox ended", "sandbox_id", e.id)
		return
	}
	// What the guest printed last is the caller's, not the log's.
	cause := e.machine.End()
	if ended := (*vm.EndError)(nil); errors.As(cause, &ended) {
		cause = ended.End
	}
	m.cfg.Log.Warn("a sandbox's vm ended by itself", "sandbox_id", e.id, "cause", cause)
}

// findLocked returns a registered sandbox. It is called with mu held.
func (m *Manager) findLocked(id string) (*entry, error) {
	if m.closed {
		return nil, fault.ShuttingDown()
	}
	if e, ok := m.entries[id]; ok {
		return e, nil
	}
	if cause, ok := m.lost.causes[id]; ok {
		return nil, fault.SandboxLost(id, cause)
	}
	return nil, fault.SandboxNotFound(id)
}

// useFor says what a call does in a sandbox.
type useFor bool

const (
	forOp   useFor = false
	forExec useFor = true
)

// visit is an admitted call to a sandbox.
type visit struct {
	*entry
	// life is the sandbox's at the admission.
	life context.Context //nolint:containedctx // see entry.life
	// done ends the visit. It may be called more than once.
	done func()
}

// use admits a call to a sandbox: S002, S004, and for a program S003. The
// sandbox counts as busy until the caller calls done.
func (m *Manager) use(id string, what useFor) (*visit, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e, err := m.findLocked(id)
	if err != nil {
		return nil, err
	}
	if e.ending != nil {
		return nil, fault.SandboxStopped(id)
	}
	count := &e.ops
	if what == forExec {
		if e.execs >= m.cfg.MaxExecs {
			return nil, fault.ExecSlotsFull(id, int(m.cfg.MaxExecs))
		}
		count = &e.execs
	}
	*count++
	e.lastActivity = time.Now()
	return &visit{entry: e, life: e.life, done: sync.OnceFunc(func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		*count--
		e.lastActivity = time.Now()
	})}, nil
}

// errStopped is the cause of what ends because its sandbox is stopped.
var errStopped = errors.New("the sandbox was stopped meanwhile")

// within returns ctx, bounded by the sandbox's life. The caller calls cancel.
func (v *visit) within(ctx context.Context) (context.Context, context.CancelCauseFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	detach := context.AfterFunc(v.life, func() { cancel(context.Cause(v.life)) })
	return ctx, func(cause error) {
		detach()
		cancel(cause)
	}
}

// stoppedUnder reports whether err is the end of a VM that was meant to end: what
// its logs say is then of no use to anybody.
func (m *Manager) stoppedUnder(e *entry, err error) bool {
	if ended := (*vm.EndError)(nil); !errors.As(err, &ended) {
		return false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return e.ending != nil
}

// List implements Functions.
func (m *Manager) List() []Summary {
	m.mu.Lock()
	defer m.mu.Unlock()
	entries := make([]*entry, 0, len(m.entries))
	for _, e := range m.entries {
		entries = append(entries, e)
	}
	slices.SortFunc(entries, func(a, b *entry) int { return int(int64(a.number) - int64(b.number)) })
	list := make([]Summary, len(entries))
	for i, e := range entries {
		list[i] = Summary{
			SandboxID: e.id, Name: e.name, Image: e.image,
			AgeSecs:        uint64(time.Since(e.created) / time.Second),
			ExecInProgress: e.execs > 0, ExecInFlight: e.execs, ExecSlotsFree: m.cfg.MaxExecs - e.execs,
			Stopped: e.ending != nil,
		}
	}
	return list
}

// maxLost is how many sandboxes whose VM ended by itself are remembered.
const maxLost = 64

// lost remembers why VMs ended that nobody stopped, the last ones. Its zero
// value is ready.
type lost struct {
	causes map[string]error
	order  []string
}

func (l *lost) add(id string, cause error) {
	if l.causes == nil {
		l.causes = map[string]error{}
	}
	l.causes[id] = cause
	l.order = append(l.order, id)
	if len(l.order) > maxLost {
		delete(l.causes, l.order[0])
		l.order = slices.Delete(l.order, 0, 1)
	}
}
