package shim

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
)

// detach is the byte on the lifeline that releases a detached VM.
const detach = 'D'

// owner watches whom the VM belongs to: the launcher at the other end of the
// lifeline, and after its release nobody but the idle time-out.
type owner struct {
	log      *slog.Logger
	state    *state
	kill     context.CancelCauseFunc
	detached bool
	idle     time.Duration
	// network is set before the VM runs; nil where it has none.
	network *network

	// released is closed when the launcher has released the VM.
	released    chan struct{}
	releaseOnce sync.Once
	// left is closed when the launcher is gone.
	left chan struct{}
}

func newOwner(log *slog.Logger, state *state, spec *bootspec.Spec, kill context.CancelCauseFunc) *owner {
	return &owner{
		log: log, state: state, kill: kill,
		detached: spec.Lifetime == bootspec.Detached, idle: spec.IdleTimeout(),
		released: make(chan struct{}), left: make(chan struct{}),
	}
}

// end kills the VM for a reason.
func (o *owner) end(reason string) {
	o.kill(bootspec.End{Class: bootspec.EndKilled, Message: reason, ExitCode: -1})
}

// gone reports whether nobody is left who would remove the VM's files.
func (o *owner) gone() bool {
	for _, c := range []chan struct{}{o.released, o.left} {
		select {
		case <-c:
			return true
		default:
		}
	}
	return false
}

// watchLifeline returns at the lifeline's end of file, or when it is closed.
func (o *owner) watchLifeline(lifeline *os.File) {
	if lifeline == nil {
		return
	}
	b := make([]byte, 1)
	for {
		n, err := lifeline.Read(b)
		if n == 1 {
			o.signal(b[0])
		}
		switch {
		case err == nil:
		case errors.Is(err, os.ErrClosed):
			return // the VM ended first
		default:
			o.hungUp()
			return
		}
	}
}

func (o *owner) hungUp() {
	select {
	case <-o.released:
	default:
		close(o.left)
		o.end("its launcher is gone")
	}
}

func (o *owner) signal(b byte) {
	switch {
	case b != detach:
		o.log.Warn("unknown byte on the lifeline", "byte", b)
	case !o.detached:
		o.log.Warn("the launcher wants to release a VM that is tied to it: ignored")
	default:
		o.releaseOnce.Do(func() {
			o.state.touch() // the idle time begins now
			close(o.released)
			o.log.Info("released by the launcher", "idle_timeout", o.idle)
		})
	}
}

// watchIdle ends a released VM that was idle for its time. It returns then, or
// with ctx.
func (o *owner) watchIdle(ctx context.Context) {
	if o.idle <= 0 {
		return
	}
	select {
	case <-ctx.Done():
		return
	case <-o.released:
	}
	for {
		if o.network != nil {
			o.state.touchAt(time.Now().Add(-o.network.gateway.Stats().Idle))
		}
		idle, wait := o.state.closeIfIdle(o.idle)
		if idle {
			o.end(fmt.Sprintf("it was idle for %v", o.idle))
			return
		}
		if pause(ctx, wait) != nil {
			return
		}
	}
}
