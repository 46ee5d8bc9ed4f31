package vmassets

import (
	"errors"
	"fmt"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// tscTries readings are taken at either end; the one with the shortest time
	// between the counter's values before and after the clock's is used.
	tscTries = 16
	// tscSlack is how long the best reading may take; it is at most the error of
	// where in it the clock was read, so of the whole 75 millionths over tscWindow.
	tscSlack = 1500 * time.Nanosecond
)

// rdtsc reads the time-stamp counter, in order with the instructions around it.
func rdtsc() uint64

// reading is one look at counter and clock at the same time.
type reading struct {
	counter, width uint64
	clock          int64 // ns
}

// read looks at counter and clock. The clock is the one that no time service
// corrects, since the guest's will not be corrected either.
func read() (reading, error) {
	best := reading{width: 1 << 62}
	for range tscTries {
		var ts unix.Timespec
		before := rdtsc()
		if err := unix.ClockGettime(unix.CLOCK_MONOTONIC_RAW, &ts); err != nil {
			return reading{}, err
		}
		after := rdtsc()
		if after < before {
			return reading{}, errors.New("the counter ran backwards")
		}
		if width := after - before; width < best.width {
			best = reading{counter: before + width/2, width: width, clock: ts.Nano()}
		}
	}
	return best, nil
}

// measureTSC compares the counter with the clock over the time window.
func measureTSC(window time.Duration) (float64, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	start, err := read()
	if err != nil {
		return 0, err
	}
	<-time.After(window)
	end, err := read()
	if err != nil {
		return 0, err
	}
	if end.counter <= start.counter || end.clock <= start.clock {
		return 0, errors.New("the counter or the clock stood still")
	}
	perNano := float64(end.counter-start.counter) / float64(end.clock-start.clock)
	if took := time.Duration(float64(max(start.width, end.width)) / perNano); took > tscSlack {
		return 0, fmt.Errorf("one reading took %v, longer than %v: the host is too busy to measure it", took, tscSlack)
	}
	return perNano * 1e6, nil
}
