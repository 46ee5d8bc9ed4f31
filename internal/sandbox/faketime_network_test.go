package sandbox_test

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/sandbox"
)

// What goes through its network keeps a sandbox; one whose shim does not answer
// has no say.
func TestReaper_CountsTheNetwork(t *testing.T) {
	var last atomic.Pointer[time.Time]
	busy := &fakeVM{networkIdle: func() (time.Duration, error) { return time.Since(*last.Load()), nil }}
	faked(t, nil, func(t *testing.T, m *sandbox.Manager) {
		for range 2 {
			req := sandbox.CreateRequest{Image: "python", Network: true, IdleTimeoutSecs: new(uint64(20))}
			if _, err := m.Create(t.Context(), req); err != nil {
				t.Fatal(err)
			}
		}
		for range 10 {
			now := time.Now()
			last.Store(&now)
			pass(15 * time.Second)
		}
		if n := len(m.List()); n != 1 {
			t.Errorf("%d sandboxes, want the one with a busy network", n)
		}
		pass(35 * time.Second)
		if n := len(m.List()); n != 0 {
			t.Errorf("%d sandboxes after the network fell silent", n)
		}
	}, busy, &fakeVM{})
}
