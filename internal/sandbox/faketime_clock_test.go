package sandbox_test

import (
	"context"
	"testing"
	"time"

	guestv1 "github.com/iii-hq/workers/sandbox-libkrun/api/guest/v1"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/sandbox"
)

func (v *fakeVM) SetTime(ctx context.Context, req *guestv1.SetTimeRequest) (*guestv1.SetTimeResponse, error) {
	v.mu.Lock()
	v.clocks = append(v.clocks, time.Unix(0, req.GetUnixNanos()))
	v.mu.Unlock()
	return &guestv1.SetTimeResponse{}, v.wait(ctx)
}

// clocksSet is how often SetTime was called, and whether that was with the time that
// it is now.
func (v *fakeVM) clocksSet() (times int, now bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	times = len(v.clocks)
	return times, times > 0 && v.clocks[times-1].Equal(time.Now())
}

// A guest knows nothing of a host that slept, or whose clock was set: it is told,
// once, and an agent that hangs keeps nobody else from being told.
func TestClocks_FollowTheHosts(t *testing.T) {
	hangs, answers := &fakeVM{}, &fakeVM{fast: true}
	faked(t, nil, func(t *testing.T, m *sandbox.Manager) {
		create(t, m)
		create(t, m)
		m.MoveClock(999 * time.Millisecond)
		pass(10 * time.Second)
		if n, _ := answers.clocksSet(); n != 0 {
			t.Errorf("set %d times though the clock hardly moved", n)
		}
		for i, moved := range []time.Duration{time.Hour, -time.Hour} {
			m.MoveClock(moved)
			pass(10 * time.Second)
			for name, v := range map[string]*fakeVM{"hangs": hangs, "answers": answers} {
				if n, now := v.clocksSet(); n != i+1 || !now {
					t.Errorf("moved by %v: the one that %s was set %d times, to the time it is: %v", moved, name, n, now)
				}
			}
			pass(50 * time.Second)
		}
		if n, _ := answers.clocksSet(); n != 2 {
			t.Errorf("set %d times in the end", n)
		}
	}, hangs, answers)
}
