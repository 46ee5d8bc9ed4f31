package krun

import (
	"fmt"
	"syscall"
)

// Error is what a call of libkrun answered with.
type Error struct {
	// Call is the C function.
	Call string
	// Errno is its result, negated. ENOSYS also stands for a function that the
	// loaded library does not have.
	Errno syscall.Errno
	// Meaning says what is known to cause it; empty when nothing is.
	Meaning string
}

func (e *Error) Error() string {
	text := fmt.Sprintf("%s: %v (errno %d)", e.Call, e.Errno, int(e.Errno))
	if e.Meaning != "" {
		text += ": " + e.Meaning
	}
	return text
}

// Unwrap lets errors.Is find the errno.
func (e *Error) Unwrap() error { return e.Errno }
