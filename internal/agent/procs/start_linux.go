package procs

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// DefaultPath is searched when the program's environment has no PATH.
const DefaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// timerSlack is the kernel's own default, in nanoseconds.
const timerSlack = 50_000

// Command is what to run.
type Command struct {
	// Argv is the program and its arguments. Argv[0] is used as is when it has
	// a '/', relative to Dir, and else searched in the PATH of Env.
	Argv []string
	// Env is the complete environment, KEY=value, each key once.
	Env []string
	// Dir is the working directory, "/" when empty.
	Dir string
	// TTY gives the program a terminal of this size instead of three pipes.
	TTY *Size
}

// Size is a terminal's size in character cells.
type Size struct {
	Rows, Cols uint16
}

// What a start may fail at: the values of SpawnError.What.
const (
	WhatProgram  = "program"
	WhatWorkdir  = "workdir"
	WhatTerminal = "terminal"
	WhatFork     = "fork"
)

// SpawnError tells why a program was not started; nothing is left of it.
type SpawnError struct {
	// What failed: one of the What constants.
	What string
	// Name is the program or directory in question.
	Name string
	// Errno is the system's reason.
	Errno syscall.Errno
	// Hint is more than Errno says, or empty.
	Hint string
}

func (e *SpawnError) Error() string {
	text := e.Errno.Error()
	if e.Hint != "" {
		text += " (" + e.Hint + ")"
	}
	switch e.What {
	case WhatWorkdir:
		return fmt.Sprintf("working directory %q: %s", e.Name, text)
	case WhatTerminal:
		return "open a terminal: " + text
	case WhatFork:
		return "create a process: " + text
	default:
		return fmt.Sprintf("run %q: %s", e.Name, text)
	}
}

// Unwrap gives the errno to errors.Is.
func (e *SpawnError) Unwrap() error { return e.Errno }

// Start runs cmd as the leader of a new process group, with a terminal of a new
// session. Every error is a *SpawnError. The caller closes the process.
func (t *Table) Start(cmd Command) (*Process, error) {
	if len(cmd.Argv) == 0 || cmd.Argv[0] == "" {
		return nil, &SpawnError{What: WhatProgram, Errno: syscall.ENOENT}
	}
	dir := cmd.Dir
	if dir == "" {
		dir = "/"
	}
	if err := checkDir(dir); err != nil {
		return nil, spawnError(WhatWorkdir, dir, err)
	}
	program, err := lookup(cmd.Argv[0], dir, cmd.Env)
	if err != nil {
		return nil, spawnError(WhatProgram, cmd.Argv[0], err)
	}
	p := &Process{table: t, done: make(chan struct{}), tty: cmd.TTY != nil}
	theirs, err := p.open(cmd.TTY)
	if err != nil {
		return nil, err
	}
	attr := &syscall.ProcAttr{Dir: dir, Env: cmd.Env, Files: theirs[:], Sys: &syscall.SysProcAttr{Setpgid: !p.tty, Setsid: p.tty, Setctty: p.tty}}
	if attr.Env == nil {
		attr.Env = []string{}
	}
	err = t.fork(p, program, cmd.Argv, attr)
	closeAll(theirs)
	if err != nil {
		_ = p.Close()
		return nil, forkError(cmd.Argv[0], err)
	}
	return p, nil
}

func (t *Table) fork(p *Process, program string, argv []string, attr *syscall.ProcAttr) error {
	// A program inherits the timer slack of the thread that forks it, and a
	// thread that of its maker, which may be one that agent/boot slowed down.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, timerSlack, 0, 0, 0); err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	pidfd := -1
	attr.Sys.PidFD = &pidfd
	pid, err := t.groups.start(program, argv, attr)
	if err != nil {
		return err
	}
	p.pid = pid
	t.register(p, pidfd)
	return nil
}

// open makes the pipes or the terminal, puts our ends into p and returns the
// program's.
func (p *Process) open(size *Size) (theirs [3]uintptr, err error) {
	if size != nil {
		master, slave, err := openPTY(*size)
		if err != nil {
			return theirs, spawnError(WhatTerminal, "", err)
		}
		p.Stdin, p.Stdout = master, master
		return [3]uintptr{slave, slave, slave}, nil
	}
	var ours [3]int
	for i := range 3 {
		var ends [2]int
		if err := unix.Pipe2(ends[:], unix.O_CLOEXEC); err != nil {
			for j := range i {
				_ = unix.Close(ours[j])
				_ = unix.Close(int(theirs[j]))
			}
			return theirs, spawnError(WhatFork, "", err)
		}
		ours[i], theirs[i] = ends[0], uintptr(ends[1])
		if i == 0 {
			ours[i], theirs[i] = ends[1], uintptr(ends[0])
		}
	}
	p.Stdin, p.Stdout, p.Stderr = pollable(ours[0], "stdin"), pollable(ours[1], "stdout"), pollable(ours[2], "stderr")
	return theirs, nil
}

// pollable makes a file that waits in Go's poller and takes deadlines. Only our
// end becomes non-blocking; the program's is another open file.
func pollable(fd int, name string) *os.File {
	_ = unix.SetNonblock(fd, true)
	return os.NewFile(uintptr(fd), name)
}

func closeAll(fds [3]uintptr) {
	for i, fd := range fds {
		if i > 0 && fd == fds[i-1] {
			break
		}
		_ = unix.Close(int(fd))
	}
}

func checkDir(dir string) error {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return unix.ENOTDIR
	}
	return unix.Access(dir, unix.X_OK)
}

// lookup finds the program the way execvp does: the first executable file in
// PATH; a file without permission only counts when no other is found. Relative
// entries are relative to dir, an empty one is dir. A name with '/' is left to
// execve, but for what it would report as a confusing error.
func lookup(name, dir string, env []string) (string, error) {
	if strings.Contains(name, "/") {
		return name, executable(absolute(name, dir))
	}
	found := error(unix.ENOENT)
	for entry := range strings.SplitSeq(pathOf(env), ":") {
		file := absolute(entry, dir) + "/" + name
		err := executable(file)
		if err == nil {
			return file, nil
		}
		if errors.Is(err, unix.EACCES) {
			found = err
		}
	}
	return "", found
}

func pathOf(env []string) string {
	for i := len(env) - 1; i >= 0; i-- {
		if path, ok := strings.CutPrefix(env[i], "PATH="); ok {
			return path
		}
	}
	return DefaultPath
}

func absolute(path, dir string) string {
	switch {
	case path == "":
		return dir
	case path[0] == '/':
		return path
	default:
		return dir + "/" + path
	}
}

// executable tells whether execve could take the file: a directory and a file
// without an execute bit give EACCES there too.
func executable(file string) error {
	var st unix.Stat_t
	if err := unix.Stat(file, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return unix.EACCES
	}
	return unix.Faccessat(unix.AT_FDCWD, file, unix.X_OK, unix.AT_EACCESS)
}

func spawnError(what, name string, err error) *SpawnError {
	errno := syscall.EINVAL
	errors.As(err, &errno)
	return &SpawnError{What: what, Name: name, Errno: errno}
}

// forkError sorts an error of ForkExec, which does not say at which step of the
// child it happened: directory and file were checked just before.
func forkError(name string, err error) *SpawnError {
	e := spawnError(WhatProgram, name, err)
	switch e.Errno {
	case syscall.EAGAIN, syscall.ENOMEM, syscall.EMFILE, syscall.ENFILE:
		e.What = WhatFork
	case syscall.ENOENT:
		e.Hint = "the file is there, but not the interpreter or loader that it names"
	case syscall.ENOEXEC:
		e.Hint = "not a program for this machine, and a script needs a #! line"
	}
	return e
}
