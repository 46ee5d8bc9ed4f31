package shim

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
)

// HTTP/2's flow-control windows on the link: what may be under way unread, for
// one stream and for all together. The link of an emulated VM moves about
// 100 MB/s with a round trip of 1 to 2 ms.
const (
	streamWindow = 1 << 20
	connWindow   = 8 << 20

	// maxMessage is guest.v1's limit.
	maxMessage = 1 << 20

	// bufferSize is that of each connection's read and write buffer.
	bufferSize = 16 << 10

	// helloTimeout bounds the agent's first HTTP/2 frame.
	helloTimeout = 30 * time.Second

	// silence is how long the agent may say nothing, while a call is open,
	// before it is asked for a sign of life, and signTimeout how long that may
	// take. A guest that has halted or hangs tells nobody; one that is only slow,
	// emulated on a busy host and with a thousand programs of its own, answers.
	silence     = 30 * time.Second
	signTimeout = 90 * time.Second
)

// session is one HTTP/2 connection to the agent.
type session struct {
	client *grpc.ClientConn
	conn   *sessionConn
}

// newSession begins HTTP/2 on c, which was greeted. The caller closes it; c
// itself stays open.
func newSession(c net.Conn) (*session, error) {
	conn := &sessionConn{Conn: c, done: make(chan struct{})}
	var once sync.Once
	client, err := grpc.NewClient("passthrough:///agent",
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
			err := errors.New("the link to the agent broke")
			once.Do(func() { err = nil })
			if err != nil {
				return nil, err
			}
			return conn, nil
		}),
		// The greeting's token is the authentication, the link is a wire.
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithNoProxy(),
		grpc.WithIdleTimeout(0),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.DefaultConfig, MinConnectTimeout: helloTimeout}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: silence, Timeout: signTimeout}),
		grpc.WithInitialWindowSize(streamWindow),
		grpc.WithInitialConnWindowSize(connWindow),
		grpc.WithReadBufferSize(bufferSize),
		grpc.WithWriteBufferSize(bufferSize),
		grpc.WithDisableServiceConfig(),
		grpc.WithDisableRetry(),
		grpc.WithDefaultCallOptions(
			grpc.ForceCodecV2(rawCodec{}),
			grpc.MaxCallRecvMsgSize(maxMessage),
			grpc.MaxCallSendMsgSize(maxMessage),
			grpc.MaxRetryRPCBufferSize(0),
		),
	)
	if err != nil {
		return nil, err
	}
	client.Connect()
	return &session{client: client, conn: conn}, nil
}

// done is closed when HTTP/2 has given the connection up.
func (s *session) done() <-chan struct{} { return s.conn.done }

// close ends HTTP/2 and returns when nobody reads or writes the connection any
// more.
func (s *session) close() {
	_ = s.client.Close() // only says that it was closed before
	_ = s.conn.Close()
	s.conn.io.Wait()
}

// sessionConn is the connection as gRPC sees it: closing it ends gRPC's use
// alone, because a serial port cannot be opened again.
type sessionConn struct {
	net.Conn
	done chan struct{}

	mu     sync.Mutex
	closed bool
	io     sync.WaitGroup
}

// enter counts a reader or writer in, unless the connection is closed.
func (c *sessionConn) enter() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return false
	}
	c.io.Add(1)
	return true
}

func (c *sessionConn) isClosed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closed
}

func (c *sessionConn) Read(p []byte) (int, error) {
	if !c.enter() {
		return 0, net.ErrClosed
	}
	defer c.io.Done()
	n, err := c.Conn.Read(p)
	if err != nil && c.isClosed() {
		err = net.ErrClosed
	}
	return n, err
}

func (c *sessionConn) Write(p []byte) (int, error) {
	if !c.enter() {
		return 0, net.ErrClosed
	}
	defer c.io.Done()
	n, err := c.Conn.Write(p)
	if err != nil && c.isClosed() {
		err = net.ErrClosed
	}
	return n, err
}

// SetDeadline and its kin are ignored once the connection is closed: the next
// session sets its own.
func (c *sessionConn) SetDeadline(t time.Time) error {
	return c.unlessClosed(func() error { return c.Conn.SetDeadline(t) })
}

func (c *sessionConn) SetReadDeadline(t time.Time) error {
	return c.unlessClosed(func() error { return c.Conn.SetReadDeadline(t) })
}

func (c *sessionConn) SetWriteDeadline(t time.Time) error {
	return c.unlessClosed(func() error { return c.Conn.SetWriteDeadline(t) })
}

func (c *sessionConn) unlessClosed(set func() error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return net.ErrClosed
	}
	return set()
}

// Close wakes readers and writers and lets no more in.
func (c *sessionConn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil
	}
	c.closed = true
	close(c.done)
	// In the past: those inside return at once.
	return c.Conn.SetDeadline(time.Unix(1, 0))
}
