package guest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"syscall"
	"time"

	"google.golang.org/protobuf/proto"

	guestv1 "github.com/iii-hq/workers/sandbox-libkrun/api/guest/v1"
)

// chunkSize is the most stdin one message carries (api/proto/guest/v1).
const chunkSize = 64 << 10

// maxStart is the most that a start may take: a message is at most 1 MiB.
const maxStart = 1<<20 - 64

// exitNotStarted is the exit code of a program that could not be started though it
// is there, as shells have it.
const exitNotStarted = 126

// exitSlack is how long after its time limit a program's exit may be reported:
// the kill, a pipe held open (1 s) and a slow emulated CPU. Later than that the
// guest hangs.
const exitSlack = 20 * time.Second

// Command is a program to run in the guest.
type Command struct {
	// Argv is the program and its arguments. A program without '/' is searched
	// in the PATH of the resulting environment.
	Argv []string
	// Env is laid over the guest's environment, KEY=value; the last of a key
	// wins.
	Env []string
	// Workdir is where it runs; empty means "/".
	Workdir string
	// Timeout is how long it may run before its process group is killed; 0
	// means no limit.
	Timeout time.Duration
	// TTY, where set, gives the program a terminal of this size for stdin,
	// stdout and stderr; all output is then stdout.
	TTY *Size
}

// Size is a terminal's size in character cells.
type Size struct {
	Rows, Cols uint16
}

// IO connects a program. All fields are optional.
type IO struct {
	// Stdin is read until io.EOF, which closes the program's stdin; nil is an
	// empty stdin. Another error of it ends the program and the call. It stays
	// the caller's: Exec returns when the program has ended even while a Read
	// is blocked, and the goroutine in that Read ends, dropping what it got,
	// when the Read returns. A caller that needs it gone closes its reader.
	Stdin io.Reader
	// Stdout and Stderr get the output, nil discards it. They are called from
	// one goroutine. A slow one slows the program down and no other call; an
	// error of it ends the program and the call.
	Stdout, Stderr io.Writer
	// Resize gives the terminal new sizes. Like Signals it may be closed or
	// simply no longer be written to; nobody reads it after Exec has returned.
	Resize <-chan Size
	// Signals are sent to the program's process group, by Linux number. They
	// keep their place among the bytes of stdin: one sent behind data that the
	// program does not read waits with it. Cancelling the context never waits.
	Signals <-chan int
}

// Result is how a program ended.
type Result struct {
	// ExitCode is its exit code, or 128 + Signal; 126 or 127 with SpawnError.
	ExitCode int
	// Signal ended it; 0 when none did.
	Signal int
	// TimedOut tells that Command.Timeout ended it.
	TimedOut bool
	// Duration is the wall time from its start to its end, measured in the
	// guest.
	Duration time.Duration
	// SpawnError is set when nothing was started.
	SpawnError *SpawnError
}

// SpawnError is why a program could not be started.
type SpawnError struct {
	// Errno is the guest's, a Linux number.
	Errno syscall.Errno
	// What failed: "program", "workdir", "terminal" or "fork".
	What string
	// Message is one line for a person.
	Message string
}

func (e *SpawnError) Error() string { return e.Message }

// Exec runs cmd and returns when it has ended and its output was written; a
// background child that keeps the output open keeps the call open, unless that is
// a terminal. A program
// that cannot be started, fails, is killed or runs out of time is a Result, not
// an error. When ctx ends, the program's process group is killed and ctx's
// cause returned at once.
func (c *Client) Exec(ctx context.Context, cmd Command, with IO) (Result, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(context.Canceled)
	if cmd.Timeout > 0 {
		guard := time.AfterFunc(cmd.Timeout+exitSlack, func() {
			cancel(fmt.Errorf("the guest did not report the program's end within %v of its time limit: it hangs", exitSlack))
		})
		defer guard.Stop()
	}
	start := startMessage(cmd)
	if n := proto.Size(start); n > maxStart {
		// The kernel's answer to about as much.
		return Result{ExitCode: exitNotStarted, SpawnError: &SpawnError{
			Errno: syscall.E2BIG, What: "program",
			Message: fmt.Sprintf("command line and environment have %d bytes, more than %d: pass the data on stdin or in a file", n, maxStart),
		}}, nil
	}
	stream, err := c.api.Exec(ctx)
	if err != nil {
		return Result{}, callError(ctx, "exec", err)
	}
	in := &input{stream: stream}
	in.send(&guestv1.ExecRequest{Request: &guestv1.ExecRequest_Start{Start: start}})
	if with.Stdin == nil {
		in.sendEOF()
	} else {
		// Not waited for: see IO.Stdin.
		go in.copyStdin(ctx, cancel, with.Stdin)
	}
	var controls sync.WaitGroup
	defer controls.Wait()
	// Runs before the Wait, which it lets end.
	defer cancel(context.Canceled)
	controls.Go(func() { in.forward(ctx, with.Resize, with.Signals) })

	result, err := receive(stream, with)
	if err != nil {
		var local *StreamError
		if errors.As(err, &local) || errors.Is(err, errNoEnd) {
			return Result{}, fmt.Errorf("exec: %w", err)
		}
		return Result{}, callError(ctx, "exec", err)
	}
	return result, nil
}

func startMessage(cmd Command) *guestv1.ExecStart {
	start := &guestv1.ExecStart{
		Argv:      byteSlices(cmd.Argv),
		Env:       byteSlices(cmd.Env),
		Workdir:   []byte(cmd.Workdir),
		TimeoutMs: uint64(ceilMilliseconds(max(cmd.Timeout, 0))),
	}
	if cmd.TTY != nil {
		start.Tty = cmd.TTY.message()
	}
	return start
}

func (s Size) message() *guestv1.Resize {
	return &guestv1.Resize{Rows: uint32(s.Rows), Cols: uint32(s.Cols)}
}

func byteSlices(list []string) [][]byte {
	out := make([][]byte, len(list))
	for i, s := range list {
		out[i] = []byte(s)
	}
	return out
}

// StreamError is a fault of the caller's own reader or writer: nothing is wrong
// with the guest.
type StreamError struct {
	// Op is "read stdin", "write stdout" or "write stderr".
	Op  string
	Err error
}

func (e *StreamError) Error() string { return e.Op + ": " + e.Err.Error() }

// Unwrap returns the reader's or writer's error.
func (e *StreamError) Unwrap() error { return e.Err }

// errNoEnd is a fault of the agent.
var errNoEnd = errors.New("the agent ended the call without telling how the program ended")

// receive copies output until the exit.
func receive(stream guestv1.AgentService_ExecClient, with IO) (Result, error) {
	for {
		msg, err := stream.Recv()
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = errNoEnd
			}
			return Result{}, err
		}
		switch r := msg.GetResponse().(type) {
		case *guestv1.ExecResponse_Stdout:
			err = write(with.Stdout, "stdout", r.Stdout)
		case *guestv1.ExecResponse_Stderr:
			err = write(with.Stderr, "stderr", r.Stderr)
		case *guestv1.ExecResponse_Exit:
			return exitResult(r.Exit), nil
		}
		if err != nil {
			return Result{}, err
		}
	}
}

func write(w io.Writer, name string, data []byte) error {
	if w == nil {
		return nil
	}
	if _, err := w.Write(data); err != nil {
		return &StreamError{Op: "write " + name, Err: err}
	}
	return nil
}

func exitResult(exit *guestv1.ExecExit) Result {
	r := Result{
		ExitCode: int(exit.GetExitCode()),
		Signal:   int(exit.GetSignal()),
		TimedOut: exit.GetTimedOut(),
		Duration: milliseconds(exit.GetDurationMs()),
	}
	if s := exit.GetSpawnError(); s != nil {
		r.SpawnError = &SpawnError{Errno: syscall.Errno(s.GetErrno()), What: s.GetWhat(), Message: s.GetMessage()}
	}
	return r
}

// input is the sending half of an Exec stream.
type input struct {
	// mu orders the senders: a gRPC stream takes one at a time.
	mu     sync.Mutex
	stream guestv1.AgentService_ExecClient
}

// send reports whether the stream still takes messages. Why it does not is
// known to the receiving half alone.
func (in *input) send(msg *guestv1.ExecRequest) bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.stream.Send(msg) == nil
}

func (in *input) sendEOF() bool {
	return in.send(&guestv1.ExecRequest{Request: &guestv1.ExecRequest_StdinEof{StdinEof: &guestv1.StdinEOF{}}})
}

func (in *input) copyStdin(ctx context.Context, cancel context.CancelCauseFunc, stdin io.Reader) {
	buf := make([]byte, chunkSize)
	for {
		n, err := stdin.Read(buf)
		if ctx.Err() != nil {
			return
		}
		if n > 0 {
			// Send may keep the bytes after it has returned.
			data := bytes.Clone(buf[:n])
			if !in.send(&guestv1.ExecRequest{Request: &guestv1.ExecRequest_Stdin{Stdin: data}}) {
				return
			}
		}
		if errors.Is(err, io.EOF) {
			in.sendEOF()
			return
		}
		if err != nil {
			cancel(&StreamError{Op: "read stdin", Err: err})
			return
		}
	}
}

// forward sends sizes and signals until ctx ends.
func (in *input) forward(ctx context.Context, sizes <-chan Size, signals <-chan int) {
	for {
		var msg *guestv1.ExecRequest
		select {
		case <-ctx.Done():
			return
		case size, ok := <-sizes:
			if !ok {
				sizes = nil
				continue
			}
			msg = &guestv1.ExecRequest{Request: &guestv1.ExecRequest_Resize{Resize: size.message()}}
		case number, ok := <-signals:
			if !ok {
				signals = nil
				continue
			}
			msg = &guestv1.ExecRequest{Request: &guestv1.ExecRequest_Signal{Signal: &guestv1.Signal{Number: uint32(number)}}}
		}
		if !in.send(msg) {
			return
		}
	}
}
