package vm

import (
	"context"
	"os"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
)

// Driver starts the process that is one VM. The production driver is
// shimdriver.Driver; vmtest has one with the agent in-process.
// Its methods may be called concurrently.
type Driver interface {
	// Prepare fills in what the VMM needs: spec.VMM, the VMM's part, and the
	// upper disk, made at spec.Upper.Path inside spec.Dir, which exists. An
	// error says what is missing on this host and how to get it. Whatever it
	// made in spec.Dir is removed with the directory by the caller.
	Prepare(ctx context.Context, spec *bootspec.Spec) error

	// Start launches the VM and returns once its shim listens on spec.Socket;
	// the guest is then still booting. ctx bounds the call alone, never the VM.
	// lock is the open, flocked lock file of the machine directory: the VM's
	// process keeps a duplicate for as long as it lives; the caller still owns
	// and closes its own.
	// On error nothing is left running, and where the shim told why, the error
	// is a bootspec.End.
	Start(ctx context.Context, spec *bootspec.Spec, lock *os.File) (Process, error)
}

// Process is a started VM.
type Process interface {
	// PID is the shim's process id, or 0 where there is no process.
	PID() int
	// Done is closed when the VM and everything it ran on the host are gone.
	Done() <-chan struct{}
	// End tells how it ended; valid once Done is closed.
	End() bootspec.End
	// Kill ends the VM without asking the guest. It returns at once; wait for
	// Done. Safe at any time, also after the end.
	Kill() error
	// Release lets a Detached VM outlive this process; Done and End stay usable
	// while this process lives.
	Release() error
}
