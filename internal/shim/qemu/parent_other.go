//go:build !linux

package qemu

import "syscall"

// dieWithParent is empty where the kernel offers nothing of the kind: there a
// killed shim leaves QEMU running until its sockets tell it.
func dieWithParent() *syscall.SysProcAttr { return &syscall.SysProcAttr{} }
