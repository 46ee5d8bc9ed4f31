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

// sweepPause is how long an orphan may stay a zombie.
const sweepPause = time.Second

// Table starts processes and collects their exits. Its methods may be called
// concurrently.
//
// A process that it started is collected the moment it ends, through its pidfd
// in Go's poller: a thread that blocked in wait4 would cost a switch for each
// exit, and a SIGCHLD another one. Orphans have no pidfd; they are collected
// with the next of ours that ends, and by a sweep once a second as long as there
// are children at all.
type Table struct {
	mode Mode
	// mu is held across fork and registration, and across collecting a status
	// and marking its process reaped: so no exit is lost, and no signal goes to
	// a process id that is free again.
	mu   sync.Mutex
	live map[int]*Process
	// changed is closed and replaced when a process has ended.
	changed chan struct{}
	// sweeper runs sweep while sweeping; mode All alone has one.
	sweeper  *time.Timer
	sweeping bool
	// groups are where programs start; nil where that is this process's own group.
	groups *groups
}

// Open makes a table.
func Open(mode Mode) *Table {
	return &Table{mode: mode, live: map[int]*Process{}, changed: make(chan struct{})}
}

// Wait returns when the table has no process left, in mode All when this
// process has no child left at all, or with ctx's error.
func (t *Table) Wait(ctx context.Context) error {
	// Orphans end without an event.
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		t.mu.Lock()
		left, changed := t.collect(), t.changed
		t.mu.Unlock()
		if !left {
			return nil
		}
		select {
		case <-changed:
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
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
func (t *Table) register(p *Process, pidfd int) {
	t.live[p.pid] = p
	if t.mode == All {
		t.sweepSoon()
	}
	go t.reap(p, pidfd)
}

// reap waits for the end of p and collects it. It ends with p.
func (t *Table) reap(p *Process, pidfd int) {
	waitExit(p.pid, pidfd)
	t.mu.Lock()
	defer t.mu.Unlock()
	if !p.reaped {
		var status unix.WaitStatus
		_, err := retry(func() (int, error) { return unix.Wait4(p.pid, &status, 0, nil) })
		if err != nil {
			// Somebody else collected it, against the rules.
			status = unknownStatus
		}
		t.ended(p.pid, status)
	}
	t.collect()
}

// collect takes the exits of orphans, and of processes whose reap is still to
// come, and tells whether something is left to wait for. The caller holds mu.
func (t *Table) collect() (left bool) {
	if t.mode == OwnOnly {
		return len(t.live) > 0
	}
	for {
		var status unix.WaitStatus
		pid, err := retry(func() (int, error) { return unix.Wait4(-1, &status, unix.WNOHANG, nil) })
		if err != nil { // ECHILD
			return false
		}
		if pid <= 0 {
			return true
		}
		t.ended(pid, status)
	}
}

// sweepSoon makes sure that a sweep will come; the caller holds mu.
func (t *Table) sweepSoon() {
	if t.sweeping {
		return
	}
	t.sweeping = true
	if t.sweeper == nil {
		t.sweeper = time.AfterFunc(sweepPause, t.sweep)
		return
	}
	t.sweeper.Reset(sweepPause)
}

func (t *Table) sweep() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.sweeping = t.collect(); t.sweeping {
		t.sweeper.Reset(sweepPause)
	}
}

func retry(call func() (int, error)) (int, error) {
	for {
		n, err := call()
		if !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
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
	close(t.changed)
	t.changed = make(chan struct{})
}

// waitExit returns when the process has ended, and leaves it to be collected. It
// closes pidfd. Errors need no answer: what follows then waits itself.
func waitExit(pid, pidfd int) {
	if pidfd < 0 {
		// A kernel without pidfds, before 5.2.
		_, _ = retry(func() (int, error) {
			return 0, unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		})
		return
	}
	f := pollable(pidfd, "pidfd")
	defer f.Close() //nolint:errcheck // nothing was written
	conn, err := f.SyscallConn()
	if err != nil {
		return
	}
	_ = conn.Read(func(fd uintptr) bool {
		var info unix.Siginfo
		_, err := retry(func() (int, error) {
			return 0, unix.Waitid(unix.P_PIDFD, int(fd), &info, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
		})
		return err != nil || info.Signo != 0
	})
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
