package shim

import (
	"testing"
	"testing/synctest"
	"time"
)

// A host that sleeps is one whose wall clock has moved more than time has passed.
func TestHostClockNoticesThatItMoved(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		clock := newHostClock()
		time.Sleep(time.Hour) //nolint:forbidigo // of fake time: it passes for both
		if clock.moved() {
			t.Error("it moved by itself")
		}
		for by, want := range map[time.Duration]bool{
			999 * time.Millisecond: false, -999 * time.Millisecond: false, time.Second: true, -time.Hour: true, 8 * time.Hour: true,
		} {
			clock := newHostClock()
			clock.wall = clock.wall.Add(-by)
			if clock.moved() != want {
				t.Errorf("moved by %v: want %v", by, want)
			}
			if clock.moved() {
				t.Errorf("moved by %v: told twice", by)
			}
		}
	})
}
