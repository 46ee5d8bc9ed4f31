package boot

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/agentlink"
)

const (
	// clockSlack is how far the clock may be off the host's before it is set at
	// a greeting.
	clockSlack = 10 * time.Millisecond
	// retryPause is how long to wait after a session that could not be opened.
	retryPause = 100 * time.Millisecond
	// linkNotice is how often the wait for the first session is told of.
	linkNotice = 10 * time.Second
)

// link is a way to the shim. Only one session exists at a time: connect is
// called again when the last one was closed.
type link interface {
	// connect opens a session, up to but without the greeting. It ends soon
	// after ctx does.
	connect(ctx context.Context) (net.Conn, error)
}

// listener yields sessions of a link that the shim has welcomed. It implements
// net.Listener.
type listener struct {
	link  link
	token string
	log   *slog.Logger
	// stop ends what stopped tells of.
	stop    context.CancelFunc
	stopped <-chan struct{}
	opened  chan opened
	// ended is told of every session's end.
	ended chan struct{}

	mu      sync.Mutex
	waiting *opened
}

// opened is a session or why there will be none.
type opened struct {
	conn net.Conn
	err  error
}

// listen opens the first session and, as each ends, the next, in the background
// until Close.
func listen(l link, token string, log *slog.Logger) *listener {
	ctx, cancel := context.WithCancel(context.Background())
	s := &listener{link: l, token: token, log: log, stop: cancel, stopped: ctx.Done(), opened: make(chan opened), ended: make(chan struct{}, 1)}
	go s.run(ctx)
	return s
}

func (s *listener) run(ctx context.Context) {
	for {
		conn, err := s.open(ctx)
		select {
		case s.opened <- opened{conn, err}:
		case <-ctx.Done():
			if conn != nil {
				_ = conn.Close()
			}
			return
		}
		if err != nil {
			return
		}
		select {
		case <-s.ended:
		case <-ctx.Done():
			return
		}
	}
}

// open returns a welcomed session. It tries until ctx ends or the shim refuses.
func (s *listener) open(ctx context.Context) (net.Conn, error) {
	for {
		conn, err := s.link.connect(ctx)
		if err == nil {
			if err = s.greet(conn); err == nil {
				return &session{Conn: conn, ended: s.ended}, nil
			}
			_ = conn.Close()
		}
		if ctx.Err() != nil {
			return nil, net.ErrClosed
		}
		if errors.Is(err, agentlink.ErrRefused) {
			return nil, err
		}
		s.log.Warn("link to the shim, trying again", "error", err)
		select {
		case <-time.After(retryPause):
		case <-ctx.Done():
		}
	}
}

func (s *listener) greet(conn net.Conn) error {
	now, err := agentlink.Greet(conn, s.token)
	if err != nil {
		return err
	}
	if off := time.Until(now); off.Abs() > clockSlack {
		if err := SetClock(now); err != nil {
			s.log.Warn("set the clock", "error", err)
		}
	}
	return nil
}

// first waits for the first session, which the next Accept returns. It says now
// and then that it waits: the console is all that a boot without link leaves.
func (s *listener) first(ctx context.Context) error {
	tell := time.NewTicker(linkNotice)
	defer tell.Stop()
	for {
		select {
		case o := <-s.opened:
			s.mu.Lock()
			defer s.mu.Unlock()
			s.waiting = &o
			return o.err
		case <-tell.C:
			s.log.Warn("waiting for the shim's answer on the link")
		case <-ctx.Done():
			return errors.New("the shim does not answer: is it alive, and the port connected?")
		}
	}
}

// Accept returns the next session once the last one was closed. Its error is
// the shim's refusal, after which there is nobody to talk to, or net.ErrClosed.
func (s *listener) Accept() (net.Conn, error) {
	s.mu.Lock()
	waiting := s.waiting
	s.waiting = nil
	s.mu.Unlock()
	if waiting != nil {
		return waiting.conn, waiting.err
	}
	select {
	case o := <-s.opened:
		return o.conn, o.err
	case <-s.stopped:
		return nil, net.ErrClosed
	}
}

// Close ends Accept. A session that is open stays open.
func (s *listener) Close() error {
	s.stop()
	return nil
}

// Addr is a name only.
func (s *listener) Addr() net.Addr { return addr{} }

// session tells the listener when it is closed.
type session struct {
	net.Conn
	once  sync.Once
	ended chan<- struct{}
}

// Close ends the session; the next one may then begin.
func (s *session) Close() error {
	err := net.ErrClosed
	s.once.Do(func() {
		err = s.Conn.Close()
		s.ended <- struct{}{}
	})
	return err
}

// addr is the address of both ends of every link.
type addr struct{}

// Network names the kind of the link.
func (addr) Network() string { return "link" }

// String names the link.
func (addr) String() string { return "shim" }
