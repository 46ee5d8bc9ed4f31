package vm

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"sync"
	"time"

	"google.golang.org/grpc"

	shimv1 "github.com/iii-hq/workers/sandbox-libkrun/api/shim/v1"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/flock"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/guest"
)

// shutdownSlack is how much longer than the grace an orderly shutdown may take:
// programs ending, disks flushed, power off; an emulated CPU is slow.
const shutdownSlack = 10 * time.Second

// ErrClosed tells that this process no longer watches a VM that lives on.
var ErrClosed = errors.New("the vm was let go by Close")

// Machine is one VM: launched by this process, or kept by an earlier one and
// attached to. Its methods may be called concurrently.
//
// One goroutine watches the VM from Launch or Attach until its end or Close.
// When the VM ends, calls in flight fail with an *EndError, and directory,
// socket and connection are gone before Done is closed.
type Machine struct {
	id       string
	launcher *Launcher
	spec     *bootspec.Spec // nil when attached
	info     guest.Info
	dir      *machineDir // without lock when attached
	process  Process
	conn     *grpc.ClientConn
	guest    *guest.Client
	shim     shimv1.ShimServiceClient

	// watched ends when Close lets go of a VM that lives on.
	watched <-chan struct{}
	letGo   context.CancelFunc

	// ended is closed once endErr is set, done when the rest is gone too.
	ended, done chan struct{}
	endErr      error // an *EndError, or ErrClosed

	mu sync.Mutex
	// kept tells that the VM outlives this process; then dir.lock is closed.
	kept bool
}

// newMachine makes the handle of a VM. It sends nothing and starts nothing; the
// caller sets process and calls watch in a goroutine, or closes conn. The
// context ends when the machine is let go.
func newMachine(l *Launcher, dir *machineDir) (context.Context, *Machine, error) {
	ctx, letGo := context.WithCancel(context.Background())
	m := &Machine{
		id: dir.id, launcher: l, dir: dir,
		watched: ctx.Done(), letGo: letGo, ended: make(chan struct{}), done: make(chan struct{}),
	}
	conn, err := m.dial()
	if err != nil {
		letGo()
		return nil, nil, err
	}
	m.conn = conn
	m.guest = guest.New(conn)
	m.shim = shimv1.NewShimServiceClient(conn)
	return ctx, m, nil
}

// watch waits for the VM's end and cleans up after it.
func (m *Machine) watch() {
	defer close(m.done)
	defer m.letGo()
	select {
	case <-m.process.Done():
		m.endErr = &EndError{ID: m.id, End: m.process.End(), Tails: ReadTails(m.dir.Machine)}
		close(m.ended)
		if err := m.removeFiles(); err != nil {
			m.launcher.log.Warn("remove what a vm left", "vm_id", m.id, "error", err)
		}
	case <-m.watched:
		m.endErr = ErrClosed
		close(m.ended)
	}
	_ = m.conn.Close() // only reports that it is closed already
}

// removeFiles removes directory and socket and gives up the lock.
func (m *Machine) removeFiles() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.kept {
		return m.dir.remove()
	}
	lock, err := lockExisting(m.dir.Machine)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, flock.ErrLocked) {
		return nil // the shim or a collector was or is at it
	}
	if err != nil {
		return err
	}
	return (&machineDir{Machine: m.dir.Machine, id: m.id, lock: lock}).remove()
}

// ID names the VM.
func (m *Machine) ID() string { return m.id }

// Guest calls the agent. It fails once the VM has ended.
func (m *Machine) Guest() *guest.Client { return m.guest }

// Info is what the agent told when it answered first.
func (m *Machine) Info() guest.Info { return m.info }

// Done is closed when the VM is gone with all it had on this host, or when
// Close let go of one that lives on.
func (m *Machine) Done() <-chan struct{} { return m.done }

// End is nil before Done. Afterwards it is an *EndError that tells how the VM
// ended, or ErrClosed.
func (m *Machine) End() error {
	select {
	case <-m.done:
		return m.endErr
	default:
		return nil
	}
}

// Stop ends the VM in order: the agent gives programs the grace, flushes the
// disks and powers off. A VM that takes 10 s longer than the grace is killed,
// and so is one whose agent does not answer, and one whose ctx ends. It returns
// when the VM is gone; an error means that it is not. Idempotent.
func (m *Machine) Stop(ctx context.Context, grace time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, min(max(grace, 0), guest.MaxGrace)+shutdownSlack)
	defer cancel()
	if err := m.guest.Shutdown(ctx, grace); err != nil {
		// The end of the VM looks like this too: see whether it is about to come.
		m.launcher.log.Debug("shut down guest", "vm_id", m.id, "error", err)
		ctx, cancel = context.WithTimeout(ctx, linkWait)
		defer cancel()
	}
	select {
	case <-m.done:
		return m.gone()
	case <-ctx.Done():
		m.launcher.log.Warn("the guest did not shut down and is killed", "vm_id", m.id)
		return m.end()
	}
}

// Kill ends the VM without asking the guest, as if its power were cut, and
// returns when it is gone. Idempotent.
func (m *Machine) Kill() error { return m.end() }

// end kills and waits.
func (m *Machine) end() error {
	err := m.process.Kill()
	timer := time.NewTimer(killWait)
	defer timer.Stop()
	select {
	case <-m.done:
		return m.gone()
	case <-timer.C:
		return errors.Join(fmt.Errorf("vm %s (process %d) is still there %v after it was killed", m.id, m.process.PID(), killWait), err)
	}
}

// gone is ErrClosed for a VM that may live on, nil otherwise.
func (m *Machine) gone() error {
	if errors.Is(m.endErr, ErrClosed) {
		return m.endErr
	}
	return nil
}

// Close frees what this process holds of the VM. A kept one lives on; one that
// is not kept is killed, since nobody could end it any more. Idempotent.
func (m *Machine) Close() error {
	m.mu.Lock()
	kept := m.kept
	m.mu.Unlock()
	if !kept {
		return m.end()
	}
	m.letGo()
	<-m.done
	return nil
}
