package shim

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/agentlink"
)

// link is the one way to the agent: at most one session at a time, and who
// waits for one.
type link struct {
	log   *slog.Logger
	state *state
	token string

	mu      sync.Mutex
	busy    bool     // a connection is greeted or served
	current *session // nil while there is none
	changed chan struct{}
	failure error // why the last attempt failed; nil after a success

	complaints int
}

// A guest whose sessions fail again and again is made to wait.
const (
	minBackoff    = 10 * time.Millisecond
	maxBackoff    = time.Second
	maxComplaints = 20
)

func newLink(log *slog.Logger, state *state, token string) *link {
	return &link{log: log, state: state, token: token, changed: make(chan struct{})}
}

// serveSerial runs sessions on a serial port, one after the other, until ctx
// ends or the VMM has closed its end.
func (l *link) serveSerial(ctx context.Context, c net.Conn) {
	var last error
	for delay := minBackoff; ; delay = min(2*delay, maxBackoff) {
		err := agentlink.ResyncHost(ctx, c)
		if err == nil {
			if last != nil {
				l.complain("it broke and was made anew", last)
			}
			if !l.claim() {
				l.complain("the agent's port and its connection are both in use: the port is refused", nil)
				return
			}
			err = l.session(ctx, c)
			l.release()
		}
		// A port that is at its end has no other session.
		if ctx.Err() != nil || isBroken(err) {
			return
		}
		last = err
		if pause(ctx, delay) != nil {
			return
		}
	}
}

// offer serves a connection that the guest dialled, unless there is one. It
// returns when the connection is closed.
func (l *link) offer(ctx context.Context, c net.Conn) {
	defer func() { _ = c.Close() }()
	if !l.claim() {
		l.complain("a second link was refused", nil)
		return
	}
	defer l.release()
	if err := l.session(ctx, c); err != nil && ctx.Err() == nil {
		l.complain("it broke", err)
	}
}

// complain logs what a guest did, but not for ever: it may do it on purpose.
func (l *link) complain(what string, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.complaints++
	if l.complaints <= maxComplaints {
		l.log.Warn("link to the agent", "what", what, "error", err, "last_of_these", l.complaints == maxComplaints)
	}
}

func (l *link) claim() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.busy {
		return false
	}
	l.busy = true
	return true
}

func (l *link) release() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.busy = false
}

// session greets the agent and serves calls until HTTP/2 or ctx ends.
func (l *link) session(ctx context.Context, c net.Conn) error {
	// A guest that says nothing must not outlive ctx.
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	err := agentlink.Welcome(c, l.token, time.Now())
	stop()
	if err != nil {
		l.fail(err)
		return err
	}
	s, err := newSession(c)
	if err != nil {
		return err
	}
	defer s.close()
	l.set(s)
	defer l.set(nil)
	l.state.running()
	select {
	case <-s.done():
		return errors.New("the HTTP/2 session ended")
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (l *link) fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failure = err
}

func (l *link) set(s *session) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.current = s
	l.failure = nil
	close(l.changed)
	l.changed = make(chan struct{})
}

// lastFailure is why the last attempt to greet the agent failed.
func (l *link) lastFailure() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.failure
}

// now returns the session; nil while there is none.
func (l *link) now() *session {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.current
}

// wait returns the session, when there is one; nil when the VM or ctx ended
// before.
func (l *link) wait(ctx context.Context) *session {
	for {
		l.mu.Lock()
		s, changed := l.current, l.changed
		l.mu.Unlock()
		if s != nil {
			return s
		}
		select {
		case <-changed:
		case <-l.state.ended:
			return nil
		case <-ctx.Done():
			return nil
		}
	}
}
