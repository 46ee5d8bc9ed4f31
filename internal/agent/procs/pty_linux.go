package procs

import (
	"os"

	"golang.org/x/sys/unix"
)

// openPTY opens a new terminal of the given size. The caller owns both ends;
// only the master is pollable. /dev/ptmx and devpts must be there.
func openPTY(size Size) (master *os.File, slave uintptr, err error) {
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, 0, err
	}
	master = os.NewFile(uintptr(fd), "terminal")
	defer func() {
		if err != nil {
			_ = master.Close()
		}
	}()
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		return nil, 0, err
	}
	if err := setSize(master, size); err != nil {
		return nil, 0, err
	}
	// By ioctl rather than by name, so that no path can be swapped.
	peer, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
	if errno != 0 {
		return nil, 0, errno
	}
	return master, peer, nil
}

func setSize(master *os.File, s Size) error {
	conn, err := master.SyscallConn()
	if err != nil {
		return err
	}
	var set error
	if err := conn.Control(func(fd uintptr) {
		set = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: s.Rows, Col: s.Cols})
	}); err != nil {
		return err
	}
	return set
}
