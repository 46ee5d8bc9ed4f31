package libkrun

import "syscall"

// childAttributes make the kernel kill the child with this process, and keep the
// terminal's signals from it: libkrun handles those in a way of its own.
func childAttributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
}
