//go:build !linux

package main

import "syscall"

// dieWithParent has no counterpart on this system.
func dieWithParent() *syscall.SysProcAttr { return nil }
