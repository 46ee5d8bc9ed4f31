package sandbox

import (
	"context"
	"sync"
	"time"
)

// stall ends a transfer that makes no progress.
type stall struct {
	cancel context.CancelCauseFunc

	mu    sync.Mutex
	timer *time.Timer
	over  bool
}

// newStall returns a guard that is not set. The caller calls stop.
func newStall(cancel context.CancelCauseFunc) *stall { return &stall{cancel: cancel} }

// within lets the transfer end with err unless within or stop is called again
// before limit is over.
func (s *stall) within(limit time.Duration, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.over {
		return
	}
	if s.timer != nil {
		s.timer.Stop()
	}
	s.timer = time.AfterFunc(limit, func() { s.cancel(err) })
}

// stop unsets the guard for good.
func (s *stall) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.over = true
	if s.timer != nil {
		s.timer.Stop()
	}
}
