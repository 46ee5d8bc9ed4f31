package vmassets

import (
	"context"
	"runtime"
	"time"
)

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

// CarrierPackage is npmPackage.
type CarrierPackage struct {
	Name, Version, SHA256 string
	Members               map[string]string
}

// SetupPair is SetupLibkrun with other packages, on any system.
func SetupPair(ctx context.Context, o Options, packages ...CarrierPackage) (*Libkrun, error) {
	var list []npmPackage
	for _, p := range packages {
		list = append(list, npmPackage{name: p.Name, version: p.Version, sha256: p.SHA256, members: p.Members})
	}
	return setupPair(ctx, &o, list, "notice of the tests\n")
}

// PairDir is where SetupPair puts the pair, PairNames what it is called.
func PairDir(root string) string            { return libkrunDir(root) }
func PairNames() (library, firmware string) { return pairNames(runtime.GOOS) }
func CheckLibrary(path, arch string) error  { return checkLibrary(path, arch) }
func MissingLibraries(n, d []string, c string) (missing, packages []string) {
	return missingLibraries(n, d, c)
}

// Lean is lean.
func Lean(ko []byte) []byte { return lean(ko) }
