package main

import (
	"errors"
	"fmt"
	"math"

	"golang.org/x/sys/unix"
)

func dup2(from, to int) error { return unix.Dup3(from, to, 0) }

// closeOnExec marks all open files above 2. Linux before 5.11 cannot; the
// adapter then has done it.
func closeOnExec() error {
	err := unix.CloseRange(3, math.MaxInt32, unix.CLOSE_RANGE_CLOEXEC)
	if err == nil || errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EINVAL) {
		return nil
	}
	return fmt.Errorf("close_range: %w", err)
}
