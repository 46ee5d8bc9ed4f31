package qemu

import "syscall"

// dieWithParent makes the kernel kill the child with this process, however that
// ends.
func dieWithParent() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}
