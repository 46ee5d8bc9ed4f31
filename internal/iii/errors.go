package iii

import (
	"errors"
	"fmt"
)

// Codes that an Error may carry; the engine and its functions have more.
const (
	// CodeInvocationFailed is that of a handler's error.
	CodeInvocationFailed = "invocation_failed"
	// CodeFunctionNotFound: nobody offers the function in that namespace.
	CodeFunctionNotFound = "function_not_found"
	// CodeInvocationStopped: the worker that was answering is gone.
	CodeInvocationStopped = "invocation_stopped"
	// CodeNotFound is configuration::get's for an entry that is not there.
	CodeNotFound = "NOT_FOUND"
	// CodeUnknown stands for the code of an error that has none.
	CodeUnknown = "UNKNOWN"
)

// Codes of refused registrations.
const (
	codeWorkerConflict   = "WORKER_NAMESPACE_CONFLICT"
	codeFunctionConflict = "FUNCTION_NAMESPACE_CONFLICT"
)

var (
	// ErrClosed means that the client is closed, or closing.
	ErrClosed = errors.New("the connection to the engine is closed")
	// ErrTimeout means that no result came in the time of the call. The function may have
	// run, may run still, and its result will be dropped.
	ErrTimeout = errors.New("no result came in time")
	// ErrDisconnected means that the connection was lost while the call was out. The engine
	// forgets such calls, so no result can come; the function may have run.
	ErrDisconnected = errors.New("the connection to the engine was lost during the call")
	// ErrTooLarge means that the message is larger than MaxMessage. A channel has no limit.
	ErrTooLarge = errors.New("the message is too large: use a channel")
	// ErrBusy means that a call of ours is refused because too many, or too large ones, are
	// being answered.
	ErrBusy = errors.New("the worker is answering too many calls: call again later")
	// ErrPanicked means that the handler of a call panicked; the log has more.
	ErrPanicked = errors.New("internal error: the function panicked")
	// ErrNotJSON means that a handler's result is not JSON.
	ErrNotJSON = errors.New("internal error: the result is not JSON")
	// ErrNoChannel means that the engine knows no channel by that reference, or swept it
	// because an end stayed unconnected for five minutes.
	ErrNoChannel = errors.New("there is no such channel: it may be older than five minutes")
	// ErrStalled means that the other end of a channel let the idle time pass.
	ErrStalled = errors.New("the other end of the channel stalled")
	// ErrChannelLost means that a channel ended otherwise than by its writer's close.
	ErrChannelLost = errors.New("the channel was lost")
)

// An Error is an error as it travels to the caller of a function.
type Error struct {
	// Code is a word for programs.
	Code string
	// Message is for people, or for programs by agreement.
	Message string
	// Stacktrace may be "".
	Stacktrace string
}

func (e *Error) Error() string { return e.Code + ": " + e.Message }

// RejectedError tells that the engine refused the worker for good: connecting
// again would not help.
type RejectedError struct {
	// Code is the engine's, such as WORKER_NAMESPACE_CONFLICT.
	Code string
	// Name and Namespace are what was asked for, Owner the id of the worker that
	// has it; "" where the engine does not say.
	Name, Namespace, Owner string
}

func (e *RejectedError) Error() string {
	if e.Code == codeWorkerConflict {
		return fmt.Sprintf("a worker named %q is connected already in namespace %q (id %s): stop it or choose another III_WORKER_NAME", e.Name, e.Namespace, e.Owner)
	}
	return fmt.Sprintf("the engine refuses this worker: %s", e.Code)
}
