package main

import "syscall"

// dieWithParent lets the kernel kill a child when the thread that started it
// ends: no QEMU outlives a killed bench. The caller keeps its thread.
func dieWithParent() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}
