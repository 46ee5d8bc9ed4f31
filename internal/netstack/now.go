package netstack

import (
	"errors"
	"syscall"
)

// rawConn is nil for what is no socket.
func rawConn(conn any) syscall.RawConn {
	if socket, ok := conn.(syscall.Conn); ok {
		if raw, err := socket.SyscallConn(); err == nil {
			return raw
		}
	}
	return nil
}

// writeNow writes what a socket takes without waiting: n bytes, of which the rest
// is to be written another way, which also meets any error.
func writeNow(raw syscall.RawConn, data []byte) (n int, err error) {
	errRaw := raw.Write(func(fd uintptr) bool {
		n, err = tryWrite(fd, data)
		return true
	})
	return max(n, 0), errors.Join(errRaw, err)
}
