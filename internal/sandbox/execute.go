package sandbox

import (
	"context"
	"errors"
	"fmt"
	"syscall"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/guest"
)

// execute is Sandbox.Exec on the agent that client calls.
func execute(ctx context.Context, client *guest.Client, cmd guest.Command, streams guest.IO) (guest.Result, error) {
	result, err := client.Exec(ctx, cmd, streams)
	var local *guest.StreamError
	if errors.As(err, &local) {
		return result, local
	}
	if err != nil {
		return result, fault.GuestFailed(err)
	}
	if result.TimedOut {
		return result, fault.ExecTimedOut(cmd.Timeout)
	}
	if result.SpawnError != nil {
		return unstarted(cmd, streams, result)
	}
	return result, nil
}

// unstarted renders a spawn error as the contract has it: a shell's words on
// stderr for a missing or forbidden program, an error for anything else.
func unstarted(cmd guest.Command, streams guest.IO, result guest.Result) (guest.Result, error) {
	var reason string
	switch result.SpawnError.Errno {
	case syscall.ENOENT, syscall.ENOTDIR:
		reason = "not found"
	case syscall.EACCES:
		reason = "permission denied"
	default:
		return result, fault.StartFailed(result.SpawnError)
	}
	if streams.Stderr != nil {
		if _, err := fmt.Fprintf(streams.Stderr, "exec: %s: %s\n", cmd.Argv[0], reason); err != nil {
			return result, err
		}
	}
	return result, nil
}
