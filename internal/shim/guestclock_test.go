package shim_test

import (
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	guestv1 "github.com/iii-hq/workers/sandbox-libkrun/api/guest/v1"
)

// told is the time that the guest was told last.
func (v *vm) told() time.Time {
	v.t.Helper()
	select {
	case body := <-v.machine.service.times:
		var req guestv1.SetTimeRequest
		if err := proto.Unmarshal(body, &req); err != nil {
			v.t.Fatal(err)
		}
		return time.Unix(0, req.GetUnixNanos())
	case <-time.After(patience):
		v.t.Fatal("the guest was not told the time")
		return time.Time{}
	}
}

// A guest knows nothing of a host that slept, or whose clock was set.
func TestGuestIsToldThatTheClockMoved(t *testing.T) {
	t.Parallel()
	v := newVM(t)
	moved := make(chan struct{})
	v.clockMoved = moved
	v.start()
	// Without a link there is nobody to be told, and nothing to wait for.
	v.until("it runs", running)
	for range 2 {
		before := time.Now()
		moved <- struct{}{}
		if got := v.told(); got.Before(before.Round(0)) || got.After(time.Now().Round(0)) {
			t.Errorf("it was told %v", got)
		}
	}
	// One that refuses is asked again.
	v.machine.service.refuseTimes.Store(true)
	moved <- struct{}{}
	v.told()
	v.machine.service.refuseTimes.Store(false)
	moved <- struct{}{}
	v.told()
}
