package proc

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// waitExited waits until the child has ended and leaves it unreaped; false where
// the event cannot be had, because the child is dead already for example.
func waitExited(pid int) bool {
	kq, err := unix.Kqueue()
	if err != nil {
		return false
	}
	defer func() { _ = unix.Close(kq) }()
	unix.CloseOnExec(kq)
	var change unix.Kevent_t
	unix.SetKevent(&change, pid, unix.EVFILT_PROC, unix.EV_ADD|unix.EV_ONESHOT)
	change.Fflags = unix.NOTE_EXIT
	events := make([]unix.Kevent_t, 1)
	for {
		n, err := unix.Kevent(kq, []unix.Kevent_t{change}, events, nil)
		if !errors.Is(err, unix.EINTR) {
			return err == nil && n == 1 && events[0].Flags&unix.EV_ERROR == 0
		}
	}
}

// closeOnExec marks all open files above 2.
func closeOnExec() {
	entries, err := os.ReadDir("/dev/fd")
	if err != nil {
		return
	}
	for _, entry := range entries {
		if fd, err := strconv.Atoi(entry.Name()); err == nil && fd > 2 {
			unix.CloseOnExec(fd)
		}
	}
}

// groupAlive reports whether the process group has members; dead ones not yet
// reaped count too.
func groupAlive(pgid int) bool {
	return !errors.Is(unix.Kill(-pgid, 0), unix.ESRCH)
}

// birthOf is when the process started, to the microsecond.
func birthOf(pid int) (string, error) {
	info, err := unix.SysctlKinfoProc("kern.proc.pid", pid)
	if err != nil || int(info.Proc.P_pid) != pid {
		return "", fmt.Errorf("process %d: %w", pid, errors.Join(ErrGone, err))
	}
	const zombie = 5 // SZOMB of sys/proc.h
	if info.Proc.P_stat == zombie {
		return "", fmt.Errorf("process %d: %w", pid, ErrGone)
	}
	start := info.Proc.P_starttime
	return fmt.Sprintf("%d.%06d", start.Sec, start.Usec), nil
}
