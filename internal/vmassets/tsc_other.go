//go:build !(linux && amd64)

package vmassets

import (
	"errors"
	"time"
)

// measureTSC has nothing to measure here: machine microvm and its need of the
// rate are of x86-64.
func measureTSC(time.Duration) (float64, error) {
	return 0, errors.New("only known on Linux on x86-64")
}
