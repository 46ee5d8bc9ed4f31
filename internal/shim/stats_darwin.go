package shim

import (
	"os"

	"golang.org/x/sys/unix"

	shimv1 "github.com/iii-hq/workers/sandbox-libkrun/api/shim/v1"
)

// measure knows only the space of the upper: macOS tells the rest through
// libproc alone, which needs cgo.
func measure(_ int, upper string) (*shimv1.StatsResponse, error) {
	var st unix.Stat_t
	if err := unix.Stat(upper, &st); err != nil {
		return nil, &os.PathError{Op: "stat", Path: upper, Err: err}
	}
	return &shimv1.StatsResponse{UpperBytes: uint64(st.Blocks) * 512}, nil
}
