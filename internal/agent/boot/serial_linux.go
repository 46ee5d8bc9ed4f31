package boot

import (
	"context"
	"net"
	"sync"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/agentlink"
)

// serialLink is a link over a virtio-console port, which stays open for the
// VM's life and carries one session after the other.
type serialLink struct {
	port *port
}

func (l *serialLink) connect(ctx context.Context) (net.Conn, error) {
	if err := agentlink.ResyncGuest(ctx, l.port); err != nil {
		return nil, err
	}
	return &serialSession{port: l.port}, nil
}

// serialSession is a net.Conn whose Close leaves the port open but makes sure
// that no reader or writer of the session is left on it.
type serialSession struct {
	port *port

	reading, writing sync.Mutex
	// mu guards closed, and the deadlines against one set after Close.
	mu     sync.Mutex
	closed bool
}

// Read returns io.EOF when the host end is disconnected.
func (s *serialSession) Read(b []byte) (int, error) {
	s.reading.Lock()
	defer s.reading.Unlock()
	if s.isClosed() {
		return 0, net.ErrClosed
	}
	return s.port.File.Read(b)
}

func (s *serialSession) Write(b []byte) (int, error) {
	s.writing.Lock()
	defer s.writing.Unlock()
	if s.isClosed() {
		return 0, net.ErrClosed
	}
	return s.port.Write(b)
}

func (s *serialSession) isClosed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}

// Close returns when no Read or Write of this session is under way any more.
func (s *serialSession) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return net.ErrClosed
	}
	s.closed = true
	err := s.port.SetDeadline(time.Unix(1, 0))
	s.mu.Unlock()
	if err != nil {
		return err
	}
	s.reading.Lock()
	defer s.reading.Unlock()
	s.writing.Lock()
	defer s.writing.Unlock()
	return s.port.SetDeadline(time.Time{})
}

func (s *serialSession) deadline(set func() error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return net.ErrClosed
	}
	return set()
}

func (s *serialSession) SetDeadline(t time.Time) error {
	return s.deadline(func() error { return s.port.SetDeadline(t) })
}

func (s *serialSession) SetReadDeadline(t time.Time) error {
	return s.deadline(func() error { return s.port.SetReadDeadline(t) })
}

func (s *serialSession) SetWriteDeadline(t time.Time) error {
	return s.deadline(func() error { return s.port.SetWriteDeadline(t) })
}

func (s *serialSession) LocalAddr() net.Addr  { return addr{} }
func (s *serialSession) RemoteAddr() net.Addr { return addr{} }
