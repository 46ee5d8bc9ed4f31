package agent

import (
	"context"
	"os"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/agent/procs"
)

// maxPending is how many bytes of stdin wait in the agent for a program that does
// not read, beside as many that are being written to it; behind them, HTTP/2's
// window holds the client back. Signals and sizes overtake what waits here.
const maxPending = 256 << 10

// endOfFile is the character that a terminal's line discipline takes for the
// end of input, unless the program has changed it.
const endOfFile = "\x04"

// stdin carries the client's data to the program without blocking the receiver
// of signals and sizes.
type stdin struct {
	to  *os.File
	tty bool

	mu      sync.Mutex
	pending []byte
	eof     bool
	dead    bool
	running bool
	// room is closed and replaced when pending was taken.
	room chan struct{}
}

func newStdin(p *procs.Process) *stdin {
	return &stdin{to: p.Stdin, tty: p.TTY(), room: make(chan struct{})}
}

// add queues data, waiting for room until ctx ends. Data for a program that has
// closed its stdin is dropped. The error is the client's fault.
func (in *stdin) add(ctx context.Context, data []byte) error {
	if len(data) > maxChunk {
		return status.Errorf(codes.InvalidArgument, "a stdin chunk of %d bytes: at most %d", len(data), maxChunk)
	}
	for {
		in.mu.Lock()
		switch {
		case in.dead:
			in.mu.Unlock()
			return nil
		case in.eof:
			in.mu.Unlock()
			return status.Error(codes.InvalidArgument, "stdin after stdin_eof")
		case len(in.pending) == 0 || len(in.pending)+len(data) <= maxPending:
			in.pending = append(in.pending, data...)
			in.wake()
			in.mu.Unlock()
			return nil
		}
		room := in.room
		in.mu.Unlock()
		select {
		case <-room:
		case <-ctx.Done():
			return nil
		}
	}
}

// end closes the program's stdin behind what is queued. Idempotent.
func (in *stdin) end() {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.eof || in.dead {
		return
	}
	in.eof = true
	if !in.running && len(in.pending) == 0 && !in.tty {
		_ = in.to.Close()
		return
	}
	in.wake()
}

// abandon drops what is queued and lets a blocked writer end once the file is
// closed.
func (in *stdin) abandon() {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.giveUp()
}

func (in *stdin) giveUp() {
	in.dead, in.pending = true, nil
	in.free()
}

func (in *stdin) free() {
	close(in.room)
	in.room = make(chan struct{})
}

// wake starts the writer, which ends when nothing is left; the caller holds mu.
// Not waited for: closing the file ends it.
func (in *stdin) wake() {
	if !in.running {
		in.running = true
		go in.write()
	}
}

// write moves the queue to the program until it is empty.
func (in *stdin) write() {
	var spare []byte
	lineStart := true
	for {
		data, more := in.take(spare)
		if !more {
			return
		}
		if data == nil {
			in.finish(lineStart)
			return
		}
		if _, err := in.to.Write(data); err != nil {
			// The program has closed its stdin, or the call is over.
			in.mu.Lock()
			in.giveUp()
			in.mu.Unlock()
			return
		}
		lineStart = data[len(data)-1] == '\n'
		spare = data[:0]
	}
}

// take swaps the queue for spare. It returns no data and true when the end is
// to be written, false when there is nothing to do.
func (in *stdin) take(spare []byte) (data []byte, more bool) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if len(in.pending) == 0 {
		if in.eof && !in.dead {
			return nil, true
		}
		in.running = false
		return nil, false
	}
	data, in.pending = in.pending, spare
	in.free()
	return data, true
}

// finish tells the program that stdin has ended. A terminal cannot be closed for
// reading alone: its end-of-file character is typed, twice behind an unfinished
// line, which the first one only hands over.
func (in *stdin) finish(lineStart bool) {
	if !in.tty {
		_ = in.to.Close()
		return
	}
	text := endOfFile
	if !lineStart {
		text += endOfFile
	}
	_, _ = in.to.WriteString(text)
}
