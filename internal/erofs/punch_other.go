//go:build !linux

package erofs

import (
	"errors"
	"os"
)

// punchHole is for Linux only; the caller writes zeros instead.
func punchHole(*os.File, int64, int64) error { return errors.ErrUnsupported }
