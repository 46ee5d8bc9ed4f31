// Package proc starts child processes that outlive the call that started them,
// each in a session of its own, and ends processes without ever hitting a
// recycled process id.
package proc

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"
)

// Command is a program to start.
type Command struct {
	// Path is the executable's absolute path.
	Path string
	// Args are the arguments behind argv[0].
	Args []string
	// Env is the whole environment; nothing is inherited.
	Env []string
	// Stdin, Stdout and Stderr are the child's; nil is the null device.
	Stdin, Stdout, Stderr *os.File
	// Files become file descriptors 3, 4, ... of the child. Nothing else is
	// inherited, not even what this process got from its own parent: a VM that
	// lives on must not hold a shell's pipes and locks. To that end Start makes
	// everything above 2 close-on-exec in this process.
	Files []*os.File
}

// Exit is how a process ended.
type Exit struct {
	// Code is its exit status, -1 when a signal ended it.
	Code int
	// Signal ended it, 0 when none did.
	Signal syscall.Signal
}

func (e Exit) String() string {
	if e.Signal != 0 {
		return fmt.Sprintf("killed by signal %d (%v)", int(e.Signal), e.Signal)
	}
	return fmt.Sprintf("exit status %d", e.Code)
}

// Process is a child process and its group. Methods may be called concurrently.
type Process struct {
	cmd  *exec.Cmd
	done chan struct{}
	exit Exit // valid once done is closed

	mu sync.Mutex
	// reaped tells that the kernel may give the process id to somebody else.
	reaped bool
}

// groupWait bounds how long Done waits for the rest of a killed group. A member
// outlives SIGKILL that long only when it hangs in the kernel.
const groupWait = 5 * time.Second

// Start starts the program in a session and process group of its own. The files
// of c stay the caller's, who may close them on return. One goroutine waits for
// the child; it ends with it.
func Start(c Command) (*Process, error) {
	// Not CommandContext: the child outlives the caller's request.
	closeOnExec()
	cmd := exec.Command(c.Path, c.Args...)
	cmd.Env = append([]string{}, c.Env...)
	cmd.ExtraFiles = c.Files
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	// A nil *os.File in an interface would not be nil.
	if c.Stdin != nil {
		cmd.Stdin = c.Stdin
	}
	if c.Stdout != nil {
		cmd.Stdout = c.Stdout
	}
	if c.Stderr != nil {
		cmd.Stderr = c.Stderr
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", c.Path, err)
	}
	p := &Process{cmd: cmd, done: make(chan struct{})}
	go p.wait()
	return p, nil
}

// wait is the only one to reap the child. It kills the child's group while the
// dead leader still holds the group's number.
func (p *Process) wait() {
	defer close(p.done)
	if !waitExited(p.PID()) {
		_ = p.cmd.Wait() // its outcome is in ProcessState
	}
	p.mu.Lock()
	_ = syscall.Kill(-p.PID(), syscall.SIGKILL) // ESRCH or EPERM: nobody else is left
	p.reaped = true
	p.mu.Unlock()
	_ = p.cmd.Wait() // as above; a second Wait does nothing
	p.exit = exitOf(p.cmd.ProcessState)

	for deadline := time.Now().Add(groupWait); groupAlive(p.PID()) && time.Now().Before(deadline); {
		time.Sleep(5 * time.Millisecond) // nothing tells the end of another's child
	}
}

func exitOf(state *os.ProcessState) Exit {
	if state == nil {
		return Exit{Code: -1}
	}
	status, ok := state.Sys().(syscall.WaitStatus)
	if !ok {
		return Exit{Code: state.ExitCode()}
	}
	if status.Signaled() {
		return Exit{Code: -1, Signal: status.Signal()}
	}
	return Exit{Code: status.ExitStatus()}
}

// PID is the child's process id, also its group's and session's.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Done is closed when the child has ended, was reaped, and nothing of its
// process group is left. What remained of the group was killed.
func (p *Process) Done() <-chan struct{} { return p.done }

// Exit tells how the child ended; valid once Done is closed.
func (p *Process) Exit() Exit { return p.exit }

// Kill ends the child and its group with SIGKILL and returns at once. Safe at
// any time; a no-op after the end.
func (p *Process) Kill() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.reaped {
		return nil
	}
	if err := syscall.Kill(-p.PID(), syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("kill process group %d: %w", p.PID(), err)
	}
	return nil
}
