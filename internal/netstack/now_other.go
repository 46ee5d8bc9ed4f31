//go:build !linux

package netstack

import "golang.org/x/sys/unix"

func tryRead(fd uintptr, into []byte) (int, error) { return unix.Read(int(fd), into) }

func tryWrite(fd uintptr, data []byte) (int, error) { return unix.Write(int(fd), data) }
