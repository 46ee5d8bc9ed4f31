package netstack

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// quiet is a stream's socket that wakes nobody but for what there is to read. To
// Go's own poller a Unix socket is ready for writing anew whenever the peer has
// read from it: that is a thread woken for nothing with each frame to the guest.
// So the socket is with two pollers of its own, and these with Go's: one looks for
// something to read, the other for room while somebody waits for it. Read is for
// one goroutine, Write for another.
type quiet struct {
	fd       int // open as long as readable is
	readable *poller
	writable *poller
	once     sync.Once
}

// newQuiet takes a Unix socket over, unless it fails.
func newQuiet(conn net.Conn) (_ *quiet, err error) {
	socket, ok := conn.(*net.UnixConn)
	if !ok {
		return nil, errors.ErrUnsupported
	}
	q := &quiet{fd: -1}
	raw, err := socket.SyscallConn()
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = q.Close()
		}
	}()
	if errRaw := raw.Control(func(fd uintptr) {
		q.fd, err = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0)
	}); errRaw != nil || err != nil {
		return nil, errors.Join(errRaw, err)
	}
	if q.readable, err = newPoller(q.fd, unix.EPOLLIN); err != nil {
		return nil, err
	}
	if q.writable, err = newPoller(q.fd, unix.EPOLLONESHOT); err != nil {
		return nil, err
	}
	_ = conn.Close() // it is with Go's poller no more; the socket lives on
	return q, nil
}

// Read implements io.Reader.
func (q *quiet) Read(p []byte) (n int, err error) {
	errRaw := q.readable.raw.Read(func(uintptr) bool {
		for {
			n, err = tryRead(uintptr(q.fd), p)
			if !errors.Is(err, unix.EINTR) {
				return !errors.Is(err, unix.EAGAIN)
			}
		}
	})
	switch {
	case errRaw != nil:
		return 0, errRaw
	case err == nil && n == 0:
		err = io.EOF
	}
	return n, err
}

// Write implements io.Writer.
func (q *quiet) Write(data []byte) (int, error) {
	done := 0
	for {
		n, err := writeNow(quietRaw{q}, data[done:])
		done += n
		switch {
		case done == len(data):
			return done, nil
		case err != nil && !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR):
			return done, err
		}
		if err := q.writable.wait(q.fd, unix.EPOLLOUT|unix.EPOLLONESHOT); err != nil {
			return done, err
		}
	}
}

// Close ends what waits, and returns when nothing uses the socket any more.
func (q *quiet) Close() (err error) {
	err = net.ErrClosed
	q.once.Do(func() {
		err = errors.Join(q.readable.close(), q.writable.close())
		if q.fd >= 0 {
			err = errors.Join(err, unix.Close(q.fd))
		}
	})
	return err
}

// poller is an epoll instance that Go's own poller waits for.
type poller struct {
	file *os.File
	raw  syscall.RawConn
}

func newPoller(fd int, events uint32) (*poller, error) {
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, err
	}
	err = errors.Join(
		unix.SetNonblock(epoll, true),
		unix.EpollCtl(epoll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: events, Fd: int32(fd)}),
	)
	p := &poller{file: os.NewFile(uintptr(epoll), "epoll")}
	if err == nil {
		err = p.file.SetReadDeadline(time.Time{}) // fails when it is not with Go's poller
	}
	if err == nil {
		p.raw, err = p.file.SyscallConn()
	}
	if err != nil {
		return nil, errors.Join(err, p.file.Close())
	}
	return p, nil
}

// wait waits once for events of fd.
func (p *poller) wait(fd int, events uint32) (err error) {
	errRaw := p.raw.Read(func(epoll uintptr) bool {
		if events != 0 {
			err = unix.EpollCtl(int(epoll), unix.EPOLL_CTL_MOD, fd, &unix.EpollEvent{Events: events, Fd: int32(fd)})
			events = 0
		}
		var ready [1]unix.EpollEvent
		n, errWait := unix.EpollWait(int(epoll), ready[:], 0)
		if err == nil && !errors.Is(errWait, unix.EINTR) {
			err = errWait
		}
		return n > 0 || err != nil
	})
	return errors.Join(errRaw, err)
}

func (p *poller) close() error {
	if p == nil {
		return nil
	}
	return p.file.Close()
}

// quietRaw is a quiet as a syscall.RawConn, for calls that do not wait.
type quietRaw struct{ q *quiet }

// SyscallConn implements syscall.Conn.
func (q *quiet) SyscallConn() (syscall.RawConn, error) { return quietRaw{q}, nil }

// Read calls f once, whatever it returns.
func (r quietRaw) Read(f func(fd uintptr) bool) error { return r.Control(func(fd uintptr) { f(fd) }) }

// Write calls f once, whatever it returns.
func (r quietRaw) Write(f func(fd uintptr) bool) error { return r.Control(func(fd uintptr) { f(fd) }) }

// Control implements syscall.RawConn.
func (r quietRaw) Control(f func(fd uintptr)) error {
	return r.q.readable.raw.Control(func(uintptr) { f(uintptr(r.q.fd)) })
}

// calm returns what carries a stream without waking anybody for nothing, or conn
// where that cannot be had.
func calm(conn net.Conn) io.ReadWriteCloser {
	if q, err := newQuiet(conn); err == nil {
		return q
	}
	return conn
}
