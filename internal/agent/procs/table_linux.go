package procs

import (
	"context"
	"errors"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Mode says whose exits a table collects.
type Mode int

const (
	// OwnOnly waits for the table's own processes and leaves every other child
	// of this process alone: for an agent inside a test.
	OwnOnly Mode = iota
	// All collects every child, orphans that the kernel hands over included:
	// for PID 1 or a child subreaper. Nothing else in the process may wait for
	// children then.
	All
)

// Table starts processes and collects their exits. Its methods may be called
// concurrently.
type Table struct {
	mode Mode
	// mu is held across fork and registration, and across collecting a status
	// and marking its process reaped: so no exit is lost, and no signal goes to
	// a process id that is free again.
	mu   sync.Mutex
	live map[int]*Process
	// idle is closed while there is no child to wait for, and replaced by an
	// open channel when there is.
	idle    chan struct{}
	isIdle  bool
	started chan struct{}
	waiters sync.WaitGroup
}

// Open makes a table. In mode All it starts the reaper, which lives as long as
// this process.
func Open(mode Mode) *Table {
	t := &Table{mode: mode, live: map[int]*Process{}, idle: make(chan struct{}), isIdle: true, started: make(chan struct{}, 1)}
	close(t.idle)
	if mode == All {
		t.busy() // children from before us may exist; the reaper finds out
		t.waiters.Go(t.reapAll)
	}
	return t
}

// busy and rest keep idle; the caller holds mu or is the only one to know t.
func (t *Table) busy() {
	if t.isIdle {
		t.isIdle, t.idle = false, make(chan struct{})
	}
}

func (t *Table) rest() {
	if !t.isIdle {
		t.isIdle = true
		close(t.idle)
	}
}

// Wait returns when the table has no process left, in mode All when this
// process has no child left at all, or with ctx's error.
func (t *Table) Wait(ctx context.Context) error {
	t.mu.Lock()
	idle := t.idle
	t.mu.Unlock()
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// SignalAll sends sig to every process: in mode All to every process of the
// system that may be signalled, else to the groups of the table's own. Errors
// are of no use to the caller and not returned: a process may always be gone.
func (t *Table) SignalAll(sig syscall.Signal) {
	if t.mode == All {
		// Without the lock: a fork that hangs in execve holds it, and this
		// signal may be what ends it.
		_ = unix.Kill(-1, sig)
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for pid := range t.live {
		_ = unix.Kill(-pid, sig)
	}
}

// register enters a process that was just forked; the caller holds mu.
func (t *Table) register(p *Process) {
	t.live[p.pid] = p
	t.busy()
	if t.mode == OwnOnly {
		t.waiters.Go(func() { t.reapOne(p.pid) })
		return
	}
	select {
	case t.started <- struct{}{}:
	default:
	}
}

// reapAll is the reaper of mode All. It blocks in waitid without collecting, so
// that the status is collected under mu.
func (t *Table) reapAll() {
	for {
		switch err := waitExit(unix.P_ALL, 0); {
		case errors.Is(err, unix.ECHILD):
			if t.restIfChildless() {
				<-t.started
			}
		case err == nil:
			t.collectAll()
		default:
			// waitid knows no other error; do not spin if a kernel finds one.
			<-time.After(time.Second)
		}
	}
}

// restIfChildless declares the table idle unless a process was started since.
// A process that is registered although there is no child was collected by
// somebody else, which the mode forbids; it must not hang its waiter for ever.
func (t *Table) restIfChildless() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	err := unix.Waitid(unix.P_ALL, 0, nil, unix.WEXITED|unix.WNOWAIT|unix.WNOHANG, nil)
	if !errors.Is(err, unix.ECHILD) {
		return false
	}
	for pid := range t.live {
		t.ended(pid, unknownStatus)
	}
	t.rest()
	return true
}

func (t *Table) collectAll() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, unix.WNOHANG, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || pid <= 0 {
			return
		}
		t.ended(pid, status)
	}
}

// reapOne waits for one process of mode OwnOnly.
func (t *Table) reapOne(pid int) {
	err := waitExit(unix.P_PID, pid)
	t.mu.Lock()
	defer t.mu.Unlock()
	var status unix.WaitStatus
	for err == nil {
		if _, err = unix.Wait4(pid, &status, 0, nil); errors.Is(err, unix.EINTR) {
			err = nil
			continue
		}
		break
	}
	if err != nil {
		// Somebody else collected it: its status is unknown.
		status = unknownStatus
	}
	t.ended(pid, status)
}

// unknownStatus is "exited with 255", for an exit that another part of the
// process collected. It cannot happen in mode All.
const unknownStatus = unix.WaitStatus(255 << 8)

// ended publishes a collected status; the caller holds mu. A pid that is not
// ours was an orphan, or the child of a fork whose execve failed.
func (t *Table) ended(pid int, status unix.WaitStatus) {
	p, ok := t.live[pid]
	if !ok {
		return
	}
	delete(t.live, pid)
	p.status = statusOf(status)
	p.reaped = true
	close(p.done)
	if t.mode == OwnOnly && len(t.live) == 0 {
		t.rest()
	}
}

// waitExit blocks until a child has ended, and leaves it to be collected.
func waitExit(kind, id int) error {
	for {
		err := unix.Waitid(kind, id, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// Status is how a process ended.
type Status struct {
	// Code is the exit code, or 128 + Signal.
	Code int
	// Signal ended the process, 0 when it exited by itself.
	Signal syscall.Signal
	// At is when the exit was seen.
	At time.Time
}

func statusOf(w unix.WaitStatus) Status {
	if w.Signaled() {
		return Status{Code: 128 + int(w.Signal()), Signal: w.Signal(), At: time.Now()}
	}
	return Status{Code: w.ExitStatus(), At: time.Now()}
}

// Process is one started program. Its methods may be called concurrently.
type Process struct {
	// Stdin, Stdout and Stderr are our ends of the program's pipes; the caller
	// may use them until Close. With a terminal Stdin and Stdout are one file,
	// its master, and Stderr is nil. They take deadlines.
	Stdin, Stdout, Stderr *os.File

	table  *Table
	pid    int
	done   chan struct{}
	status Status
	reaped bool
	tty    bool
}

// PID is the process id, which is also the group's.
func (p *Process) PID() int { return p.pid }

// TTY tells that the program has a terminal.
func (p *Process) TTY() bool { return p.tty }

// Done is closed when the program has ended and was reaped. Its children, and
// whatever they write, may outlive it.
func (p *Process) Done() <-chan struct{} { return p.done }

// Status is valid once Done is closed.
func (p *Process) Status() Status { return p.status }

// Signal sends sig to the process group, also when the leader has ended and
// only its children are left. It returns os.ErrProcessDone when nothing is.
func (p *Process) Signal(sig syscall.Signal) error {
	p.table.mu.Lock()
	defer p.table.mu.Unlock()
	if p.reaped && unix.Kill(p.pid, 0) == nil {
		// The kernel does not give a number away while a group bears it. A
		// process with our leader's number means that our group is gone.
		return os.ErrProcessDone
	}
	err := unix.Kill(-p.pid, sig)
	if errors.Is(err, unix.ESRCH) {
		return os.ErrProcessDone
	}
	return err
}

// Resize sets the size of the program's terminal; without one it does nothing.
func (p *Process) Resize(s Size) error {
	if !p.tty {
		return nil
	}
	return setSize(p.Stdout, s)
}

// Close closes our ends of the pipes. A program that still runs is not told
// other than by end of file and broken pipe, and is still reaped.
func (p *Process) Close() error {
	err := p.Stdin.Close()
	if p.tty {
		return ignoreClosed(err)
	}
	return errors.Join(ignoreClosed(err), ignoreClosed(p.Stdout.Close()), ignoreClosed(p.Stderr.Close()))
}

func ignoreClosed(err error) error {
	if errors.Is(err, os.ErrClosed) {
		return nil
	}
	return err
}
