package boot

import (
	"fmt"
	"os"
	"slices"
	"strconv"
)

// monitorSlack is by how much a wake of the runtime's monitor may be late.
const monitorSlack = "4000000" // ns

// calmMonitor slows the monitor thread of the Go runtime down. As long as
// anything runs it wakes every 20 µs, also while a fork waits for its child's
// execve; on one emulated CPU each wake interrupts that child and costs two
// switches of address space: measured, a third of the time of an exec. What the
// monitor does, such as lending a blocked thread's right to run to others, may
// come some milliseconds later.
//
// The kernel lets any thread's timer slack be set from outside. The monitor is
// the first thread that the runtime starts, so the second by number. Threads that
// it starts inherit the slack, which agent/procs therefore resets before a fork.
func calmMonitor() error {
	entries, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return err
	}
	var threads []int
	for _, e := range entries {
		if id, err := strconv.Atoi(e.Name()); err == nil {
			threads = append(threads, id)
		}
	}
	if len(threads) < 2 {
		return fmt.Errorf("the runtime has %d threads, where is its monitor?", len(threads))
	}
	slices.Sort(threads)
	return os.WriteFile(fmt.Sprintf("/proc/%d/timerslack_ns", threads[1]), []byte(monitorSlack), 0)
}
