package netstack

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// tryRead reads from a socket that does not block. The runtime is not told of the
// call: it would wake a thread of its own to watch over it, each time after
// everything was idle, and the call takes no longer than a function.
func tryRead(fd uintptr, into []byte) (int, error) { return try(unix.SYS_READ, fd, into) }

// tryWrite is tryRead for writing.
func tryWrite(fd uintptr, data []byte) (int, error) { return try(unix.SYS_WRITE, fd, data) }

func try(call, fd uintptr, data []byte) (int, error) {
	p := unsafe.Pointer(unsafe.SliceData(data)) //nolint:gosec // there is no other way to make the call
	n, _, errno := unix.RawSyscall(call, fd, uintptr(p), uintptr(len(data)))
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}
