package proc

import (
	"os"
	"syscall"
)

// WriteProgram writes an executable file, for its owner alone, that may be run
// as soon as this returns, whatever else this process starts meanwhile. After
// os.WriteFile that can fail with ETXTBSY: a child forked while the file was
// open for writing has it open too until it executes its own program.
//
// Starting processes waits for it, so data should be small. A file that exists
// is written over and keeps its mode.
func WriteProgram(path string, data []byte) error {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	return os.WriteFile(path, data, 0o700) //nolint:gosec // a program, for this user alone
}
