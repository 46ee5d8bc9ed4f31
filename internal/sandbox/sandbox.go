// Package sandbox creates and uses sandboxes: a fresh VM from an image, programs
// and files in it, and its end.
//
// Manager serves the contract's functions: it holds all sandboxes of one adapter
// in memory, admits and bounds what is asked of them, and ends them when they
// are idle, stopped, or the adapter ends. Keeper serves the command line.
package sandbox

import (
	"bytes"
	"context"
	"io"
	"strings"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/cleanup"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/guest"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
)

// Defaults and limits of a sandbox (contract: create).
const (
	DefaultCPUs        = 1
	DefaultMemoryMiB   = 512
	MinMemoryMiB       = 64
	MaxMemoryMiB       = 1 << 20
	MaxCPUs            = 255
	DefaultIdleTimeout = 300 * time.Second
)

// stopGrace is the time programs have between SIGTERM and SIGKILL when their
// sandbox stops; stopTimeout bounds the whole stop.
const (
	stopGrace   = 200 * time.Millisecond
	stopTimeout = 15 * time.Second
)

// Sandbox is a running VM. Its methods may be called concurrently. Whoever made
// or opened it ends with Stop, or with Close after Keep.
type Sandbox struct {
	ID, Name, Image string
	machine         *vm.Machine
}

// Exec runs a program and returns when it has ended, see guest.Client.Exec. One
// that is not there or may not be executed is a result, not an error: exit code
// 127 or 126 with a line on stderr. One that cannot be started for another reason
// is S300 (contract: exec).
func (s *Sandbox) Exec(ctx context.Context, cmd guest.Command, streams guest.IO) (guest.Result, error) {
	return execute(ctx, s.machine.Guest(), cmd, streams)
}

// StepError tells at which step of a Run it failed, in the contract's words.
type StepError struct {
	Step string
	Err  error
}

func (e *StepError) Error() string { return e.Err.Error() }

// Unwrap returns the step's error.
func (e *StepError) Unwrap() error { return e.Err }

// Run writes a program into the sandbox and runs it (contract: run). cmd's Argv
// is filled in; its other fields hold. Errors are of type *StepError.
func (s *Sandbox) Run(ctx context.Context, p Program, cmd guest.Command, streams guest.IO) (guest.Result, error) {
	interpreter, path := Interpreter(p.Lang)
	if err := s.WriteFile(ctx, path, bytes.NewReader(p.Code)); err != nil {
		return guest.Result{}, &StepError{stepCode, err}
	}
	cmd.Argv = append([]string{interpreter, path}, p.Args...)
	result, err := s.Exec(ctx, cmd, streams)
	if err != nil {
		return result, &StepError{stepExec, err}
	}
	return result, nil
}

// WriteFile replaces a file of the guest, mode 0644, making its parents.
func (s *Sandbox) WriteFile(ctx context.Context, path string, content io.Reader) error {
	if !strings.HasPrefix(path, "/") {
		path = "/" + path
	}
	_, err := s.machine.Guest().WriteFile(ctx, path, guest.WriteOptions{Mode: 0o644, Parents: true}, content)
	return err
}

// Published are the ports of the host that lead into the sandbox.
func (s *Sandbox) Published(ctx context.Context) ([]PublishedPort, error) {
	status, err := s.machine.Status(ctx)
	return status.Published, err
}

// Keep lets the sandbox outlive this process: later commands find it by id or
// name until it is stopped or idle for its time. Only for one created with Keep.
func (s *Sandbox) Keep() error {
	return s.machine.Release(vm.Label{Name: s.Name, Image: s.Image})
}

// Close lets go of the sandbox without ending it, if it was kept; one that was
// not dies with this process.
func (s *Sandbox) Close() error { return s.machine.Close() }

// Stop ends the sandbox and removes all of it. It is bounded, works after ctx
// has ended, and may be called again.
func (s *Sandbox) Stop(ctx context.Context) error {
	ctx, cancel := cleanup.Context(ctx, stopTimeout)
	defer cancel()
	return s.machine.Stop(ctx, stopGrace)
}
