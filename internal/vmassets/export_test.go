package vmassets

import "time"

// TSCHost lets tests describe a host to TSCKHz: the contents of the files it
// reads and what it would measure.
type TSCHost struct {
	CPUInfo, ClockSource, BootID, Exact string // paths
	Measure                             func(time.Duration) (float64, error)
}

// KHz is TSCKHz on that host.
func (h TSCHost) KHz(dir string) (int, error) {
	return tscHost{cpuinfo: h.CPUInfo, clocksource: h.ClockSource, bootID: h.BootID, exact: h.Exact, measure: h.Measure}.khz(dir)
}
