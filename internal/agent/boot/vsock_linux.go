package boot

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/mdlayher/socket"
	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/agentlink"
)

const (
	// vsockBuffer is what may be under way to the guest unread, in bytes. With the
	// kernel's default of 256 KiB, guests of libkrun 1.18.0 and earlier stop for
	// ever when they have sent that much: the kernel takes the smaller of both
	// sides' buffers for the limit, and libkrun tells it too late of room.
	vsockBuffer = 16 << 20
	// maxPacket is the most bytes sent at once: each send becomes packets of up to
	// 64 KiB, and libkrun before 1.18.1 drops one of more than 32.
	maxPacket = 32 << 10
	// dialWait bounds one try to connect.
	dialWait = 5 * time.Second
)

// vsockLink dials the shim; each session is a connection of its own.
type vsockLink struct{}

func (vsockLink) connect(ctx context.Context) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialWait)
	defer cancel()
	conn, err := dialHost(ctx, agentlink.VsockPort)
	if err != nil {
		return nil, fmt.Errorf("dial port %d of the host: %w", agentlink.VsockPort, err)
	}
	return conn, nil
}

// dialHost connects to a vsock port of the host, with large buffers: they count
// only when they are set before the connection is made, which package vsock has
// no way to do.
func dialHost(ctx context.Context, port uint32) (_ net.Conn, err error) {
	conn, err := socket.Socket(unix.AF_VSOCK, unix.SOCK_STREAM, 0, "vsock", nil)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, conn.Close())
		}
	}()
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	var optionErr error
	err = raw.Control(func(fd uintptr) {
		for _, option := range []int{unix.SO_VM_SOCKETS_BUFFER_MAX_SIZE, unix.SO_VM_SOCKETS_BUFFER_SIZE} {
			optionErr = errors.Join(optionErr, unix.SetsockoptUint64(int(fd), unix.AF_VSOCK, option, vsockBuffer))
		}
	})
	if err = errors.Join(err, os.NewSyscallError("setsockopt", optionErr)); err != nil {
		return nil, err
	}
	if _, err := conn.Connect(ctx, &unix.SockaddrVM{CID: unix.VMADDR_CID_HOST, Port: port}); err != nil {
		return nil, err
	}
	return vsockConn{conn}, nil
}

// vsockConn is a connection with the addresses that net.Conn wants, which sends
// packets that every libkrun takes. It is for one writer at a time.
type vsockConn struct{ *socket.Conn }

// Write implements net.Conn.
func (c vsockConn) Write(b []byte) (int, error) {
	written := 0
	for {
		n, err := c.Conn.Write(b[written:min(len(b), written+maxPacket)])
		written += n
		if err != nil || written == len(b) {
			return written, err
		}
	}
}

func (vsockConn) LocalAddr() net.Addr  { return addr{} }
func (vsockConn) RemoteAddr() net.Addr { return addr{} }
