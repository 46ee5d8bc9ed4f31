//go:build !linux

package main

import (
	"fmt"
	"os"
)

// fakeShim has no counterpart on this system.
func fakeShim() int {
	_, _ = fmt.Fprintln(os.Stderr, "bench: fakes of VMs need Linux")
	return 2
}
