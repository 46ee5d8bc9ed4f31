package proc

import (
	"errors"
	"fmt"
	"os"
	"syscall"
)

// ErrGone tells that the process has ended, even if its id is in use again.
var ErrGone = errors.New("process is gone")

// Identity names one process for ever, unlike its id alone.
type Identity struct {
	PID int `json:"pid"`
	// Birth is when it started, in a form that only this host during this boot
	// understands.
	Birth string `json:"birth"`
}

// Identify returns the identity of the process that has pid now. The caller
// knows that it is the one meant: its own child, not yet reaped. ErrGone when
// there is none.
func Identify(pid int) (Identity, error) {
	birth, err := birthOf(pid)
	if err != nil {
		return Identity{}, err
	}
	return Identity{PID: pid, Birth: birth}, nil
}

// Alive reports whether that very process still runs; one that cannot be looked
// at counts as gone.
func (id Identity) Alive() bool {
	birth, err := birthOf(id.PID)
	return err == nil && birth == id.Birth
}

// Kill sends SIGKILL to that very process; ErrGone when it has ended. It uses a
// process handle where the kernel has one (pidfd, Linux 5.3): taken before the
// birth is compared, it cannot come to mean another process.
func (id Identity) Kill() error {
	if id.PID <= 1 {
		return fmt.Errorf("kill process %d: %w", id.PID, ErrGone)
	}
	p, err := os.FindProcess(id.PID)
	if err != nil {
		return fmt.Errorf("kill process %d: %w", id.PID, err)
	}
	defer func() { _ = p.Release() }()
	if !id.Alive() {
		return fmt.Errorf("kill process %d: %w", id.PID, ErrGone)
	}
	err = p.Signal(syscall.SIGKILL)
	if errors.Is(err, os.ErrProcessDone) {
		err = ErrGone
	}
	if err != nil {
		return fmt.Errorf("kill process %d: %w", id.PID, err)
	}
	return nil
}
