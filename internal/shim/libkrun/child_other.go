//go:build !linux

package libkrun

import "syscall"

// childAttributes keep the terminal's signals from the child; its standard input
// tells it when this process is gone.
func childAttributes() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
