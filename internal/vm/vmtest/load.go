package vmtest

import (
	"os"
	"strconv"
	"testing"
	"time"
)

// soakEnv makes the suite's long parts longer: all do the whole load, calls,
// programs and reconnections that many times.
const soakEnv = "VMTEST_SOAK"

// lightEnv, where set, makes them short.
const lightEnv = "VMTEST_LIGHT"

// Load is how much the suite's long parts do.
type Load struct {
	// Streams are the sizes, in bytes, of what goes through one stream, each way.
	Streams []int64
	// Calls and Programs are how many calls without a stream, and how many
	// programs, are made on one link.
	Calls, Programs int
	// Reconnects is how often a client of a kept VM is killed.
	Reconnects int
}

// WholeLoad is what a VM has to bear.
func WholeLoad() Load {
	return Load{Streams: []int64{1 << 20, 64 << 20, 512 << 20}, Calls: 20_000, Programs: 500, Reconnects: 50}
}

// SmallLoad is for VMs on which the whole takes too long for every day.
func SmallLoad() Load {
	return Load{Streams: []int64{1 << 20, 64 << 20}, Calls: 20_000, Programs: 500, Reconnects: 20}
}

// lightLoad is for a machine that emulates a machine: each part runs, in minutes.
func lightLoad() Load {
	return Load{Streams: []int64{1 << 20, 16 << 20}, Calls: 2000, Programs: 50, Reconnects: 5}
}

// load is the environment's, or what VMTEST_SOAK or VMTEST_LIGHT ask for.
func (e *Env) load(t testing.TB) Load {
	t.Helper()
	text := os.Getenv(soakEnv)
	switch {
	case text != "":
	case os.Getenv(lightEnv) != "":
		return lightLoad()
	case len(e.Load.Streams) == 0:
		return SmallLoad()
	default:
		return e.Load
	}
	times, err := strconv.Atoi(text)
	if err != nil || times < 1 {
		t.Fatalf("%s=%s: want how many times, at least 1", soakEnv, text)
	}
	load := WholeLoad()
	load.Calls, load.Programs, load.Reconnects = load.Calls*times, load.Programs*times, load.Reconnects*times
	return load
}

// slowest is the throughput, in bytes a second, below which a stream counts as
// stuck: that of an emulated guest in an emulated machine on a busy host.
const slowest = 256 << 10

// streamTime bounds a stream of so many bytes.
func (e *Env) streamTime(size int64) time.Duration {
	return e.Patience + time.Duration(size/slowest)*time.Second
}
