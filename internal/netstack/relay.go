package netstack

import (
	"bytes"
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"
)

const (
	// chunkSize is how much of a flow is moved at once. Memory for it is held only
	// while there is something to move.
	chunkSize = 64 << 10
	// closeTimeout is how long a guest may take to acknowledge the end of a
	// connection that both sides have ended.
	closeTimeout = 10 * time.Second
	// A guest whose side has ended is asked every halfOpenProbe whether it still
	// waits for the other: Linux forgets a socket that nobody has open any more after
	// a minute, without a word.
	halfOpenProbe = 75 * time.Second
)

// chunks is a pool of buffers of chunkSize.
type chunks struct{ pool sync.Pool }

func (c *chunks) get() *[chunkSize]byte {
	if chunk, ok := c.pool.Get().(*[chunkSize]byte); ok {
		return chunk
	}
	return new([chunkSize]byte)
}

func (c *chunks) put(chunk *[chunkSize]byte) { c.pool.Put(chunk) }

// relay moves data both ways until both have ended, passing each end on by
// itself and a reset of one side to the other.
func (g *Gateway) relay(ep tcpip.Endpoint, queue *waiter.Queue, conn net.Conn) {
	stop := g.onEnd(func() { _ = conn.Close() })
	defer stop()
	var up sync.WaitGroup
	var upEnded atomic.Bool
	downEnded := make(chan struct{})
	up.Go(func() {
		err := g.fromGuest(ep, queue, conn, &upEnded)
		if err == nil {
			err = stillThere(ep, queue, downEnded)
		}
		if err != nil {
			ep.Abort()
			abort(conn)
		}
	})
	if err := g.toGuest(ep, queue, conn, &upEnded); err != nil {
		ep.Abort()
		abort(conn)
	}
	close(downEnded)
	up.Wait()
	_ = conn.Close()
	g.finish(ep, queue)
}

// errReset tells that the guest, or the end of the gateway, broke a connection.
var errReset = errors.New("connection reset")

// fromGuest moves the guest's data to conn; nil is an orderly end, passed on after
// ended was set.
func (g *Gateway) fromGuest(ep tcpip.Endpoint, queue *waiter.Queue, conn net.Conn, ended *atomic.Bool) error {
	entry, readable := waiter.NewChannelEntry(waiter.ReadableEvents | waiter.EventErr | waiter.EventHUp)
	queue.EventRegister(&entry)
	defer queue.EventUnregister(&entry)
	raw := rawConn(conn)
	for {
		err := g.copyFromGuest(ep, conn, raw)
		switch {
		case errors.Is(err, errWouldBlock):
			<-readable
		case errors.Is(err, io.EOF):
			ended.Store(true)
			if half, ok := conn.(interface{ CloseWrite() error }); ok {
				_ = half.CloseWrite() // fails when it is closed the other way, too
			}
			return nil
		case err != nil:
			return err
		}
	}
}

// stillThere waits for the end of the other direction after the guest's own; an
// error means that the guest went away before, which nothing that the host does not
// send would tell.
func stillThere(ep tcpip.Endpoint, queue *waiter.Queue, downEnded <-chan struct{}) error {
	entry, gone := waiter.NewChannelEntry(waiter.EventErr | waiter.EventHUp)
	queue.EventRegister(&entry)
	defer queue.EventUnregister(&entry)
	every := tcpip.KeepaliveIntervalOption(halfOpenProbe)
	idle := tcpip.KeepaliveIdleOption(halfOpenProbe)
	_, _ = ep.SetSockOpt(&every), ep.SetSockOpt(&idle) // which they all have
	ep.SocketOptions().SetKeepAlive(true)
	for {
		switch tcp.EndpointState(ep.State()) {
		case tcp.StateClose, tcp.StateError:
			select {
			case <-downEnded:
				return nil
			default:
				return errReset
			}
		}
		select {
		case <-gone:
		case <-downEnded:
			return nil
		}
	}
}

var errWouldBlock = errors.New("nothing to do now")

// copyFromGuest moves one chunk.
func (g *Gateway) copyFromGuest(ep tcpip.Endpoint, conn net.Conn, raw syscall.RawConn) error {
	chunk := g.chunks.get()
	defer g.chunks.put(chunk)
	into := tcpip.SliceWriter(chunk[:])
	result, err := ep.Read(&into, tcpip.ReadOptions{})
	switch err.(type) {
	case nil:
		g.counters.out(result.Count)
		return writeHost(conn, raw, chunk[:result.Count])
	case *tcpip.ErrWouldBlock:
		return errWouldBlock
	case *tcpip.ErrClosedForReceive:
		return io.EOF
	}
	return errReset
}

// writeHost writes all of data to conn; raw is nil where that is no socket.
func writeHost(conn net.Conn, raw syscall.RawConn, data []byte) error {
	if raw != nil {
		n, err := writeNow(raw, data)
		if n == len(data) {
			return err
		}
		data = data[n:]
	}
	_, err := conn.Write(data)
	return err
}

// toGuest moves the data of conn to the guest; nil is an orderly end, passed on.
// upEnded tells that the other direction has ended.
func (g *Gateway) toGuest(ep tcpip.Endpoint, queue *waiter.Queue, conn net.Conn, upEnded *atomic.Bool) error {
	entry, writable := waiter.NewChannelEntry(waiter.WritableEvents | waiter.EventErr | waiter.EventHUp)
	queue.EventRegister(&entry)
	defer queue.EventUnregister(&entry)
	source := g.newReader(conn)
	for {
		chunk, n, err := source.next()
		if n > 0 {
			g.counters.in(n)
			if errWrite := writeGuest(ep, writable, chunk[:n]); errWrite != nil {
				err = errWrite
			}
		}
		if chunk != nil {
			g.chunks.put(chunk)
		}
		switch {
		case errors.Is(err, io.EOF):
			if !upEnded.Load() && source.unconnected() {
				return errReset // the other direction was told, which tells one alone
			}
			if err := ep.Shutdown(tcpip.ShutdownWrite); err != nil {
				return errReset
			}
			return nil
		case err != nil:
			return err
		}
	}
}

// writeGuest writes all of data, at the guest's pace.
func writeGuest(ep tcpip.Endpoint, writable <-chan struct{}, data []byte) error {
	var payload bytes.Reader
	payload.Reset(data)
	for payload.Len() > 0 {
		_, err := ep.Write(&payload, tcpip.WriteOptions{})
		switch err.(type) {
		case nil:
		case *tcpip.ErrWouldBlock:
			<-writable
		default:
			return errReset
		}
	}
	return nil
}

// reader reads a connection of the host by chunks.
type reader struct {
	conn   net.Conn
	raw    syscall.RawConn // nil where conn is no socket
	chunks *chunks
}

func (g *Gateway) newReader(conn net.Conn) *reader {
	return &reader{conn: conn, raw: rawConn(conn), chunks: &g.chunks}
}

// read returns what has come, at most a chunk or one datagram; the chunk, if any,
// is the caller's to put back. It holds none while it waits.
func (r *reader) read() (chunk *[chunkSize]byte, n int, err error) {
	if r.raw == nil {
		chunk = r.chunks.get()
		n, err = r.conn.Read(chunk[:])
		return chunk, n, err
	}
	errWait := r.raw.Read(func(fd uintptr) bool {
		chunk = r.chunks.get()
		for {
			n, err = tryRead(fd, chunk[:])
			if !errors.Is(err, unix.EINTR) {
				break
			}
		}
		if errors.Is(err, unix.EAGAIN) {
			r.chunks.put(chunk)
			chunk = nil
			return false
		}
		return true
	})
	switch {
	case errWait != nil:
		return chunk, 0, errWait
	case err != nil:
		return chunk, 0, err
	}
	return chunk, n, nil
}

// unconnected tells whether a socket has lost its peer, as it has after a reset.
func (r *reader) unconnected() bool {
	if r.raw == nil {
		return false
	}
	var err error
	errRaw := r.raw.Control(func(fd uintptr) { _, err = unix.Getpeername(int(fd)) })
	return errRaw != nil || err != nil
}

// next is read for a stream.
func (r *reader) next() (chunk *[chunkSize]byte, n int, err error) {
	chunk, n, err = r.read()
	if err == nil && n == 0 {
		err = io.EOF
	}
	return chunk, n, err
}

// finish closes an endpoint whose two directions have ended, and waits until the
// guest has acknowledged that, for closeTimeout at most: the flow's place is taken
// until then.
func (g *Gateway) finish(ep tcpip.Endpoint, queue *waiter.Queue) {
	entry, ended := waiter.NewChannelEntry(waiter.EventHUp)
	queue.EventRegister(&entry)
	defer queue.EventUnregister(&entry)
	ep.Close()
	timeout := time.NewTimer(closeTimeout)
	defer timeout.Stop()
	// Not every change of state is an event.
	look := time.NewTicker(closeTimeout / 100)
	defer look.Stop()
	for {
		switch tcp.EndpointState(ep.State()) {
		case tcp.StateClose, tcp.StateError:
			return
		case tcp.StateTimeWait, tcp.StateFinWait2:
			// The guest has everything, and nothing on this link arrives late: its ports
			// are free to be used again. In FIN-WAIT-2 the guest's own end has not come,
			// or gVisor forgot that it has, as it does when it repeats the gateway's.
			ep.Abort()
			return
		}
		select {
		case <-ended:
		case <-look.C:
		case <-g.ctx.Done():
			ep.Abort()
			return
		case <-timeout.C:
			ep.Abort()
			return
		}
	}
}
