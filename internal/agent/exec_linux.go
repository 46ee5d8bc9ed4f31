package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	guestv1 "github.com/iii-hq/workers/sandbox-libkrun/api/guest/v1"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/agent/procs"
)

const (
	// killGrace is how long, after a kill, a pipe may stay open and the process
	// unreaped before the call ends without them.
	killGrace = time.Second
	// hangupGrace is how long, after the end of a terminal's program, nothing may
	// come before the call ends though somebody holds the terminal.
	hangupGrace = time.Second
)

// announceDelay is how long `started` waits for company. The message of a
// program that ends at once then leaves in one write with its output and exit,
// and a write to the link costs an emulated CPU more than most else here.
const announceDelay = 3 * time.Millisecond

type execStream = guestv1.AgentService_ExecServer

// Exec runs one program; see the .proto.
func (s *Service) Exec(stream execStream) error {
	start, err := receiveStart(stream)
	if err != nil {
		return err
	}
	cmd, limit, err := s.command(start)
	if err != nil {
		return err
	}
	if s.isStopping() {
		return errStopping(codes.FailedPrecondition)
	}
	begun := time.Now()
	process, err := s.cfg.Table.Start(cmd)
	if err != nil {
		return sendSpawnError(stream, err)
	}
	c := &call{service: s, stream: stream, process: process, begun: begun, pumped: make(chan error, 2), refused: make(chan error, 1)}
	if s.isStopping() {
		// Since the look above: its signals may have missed this process.
		c.kill()
		_ = process.Close()
		return errStopping(codes.FailedPrecondition)
	}
	return c.run(limit)
}

func receiveStart(stream execStream) (*guestv1.ExecStart, error) {
	msg, err := stream.Recv()
	if errors.Is(err, io.EOF) {
		return nil, status.Error(codes.InvalidArgument, "the client closed the call without a start")
	}
	if err != nil {
		return nil, err
	}
	start := msg.GetStart()
	if start == nil {
		return nil, status.Error(codes.InvalidArgument, "the first message is not a start")
	}
	return start, nil
}

// call is one running Exec.
type call struct {
	service *Service
	stream  execStream
	process *procs.Process
	begun   time.Time

	// sending orders the senders, of which a stream takes one at a time, and
	// guards announced.
	sending   sync.Mutex
	announced bool
	// deadlines guards the outputs' deadlines and what decides them: hungUp is set
	// when a terminal's program has ended, over when what comes is given up.
	deadlines    sync.Mutex
	hungUp, over bool

	// pumped gets one result per output pump, refused one from the receiver.
	pumped, refused chan error
	stdin           *stdin
}

// run returns when the exit was sent, or with the error that ended the call.
func (c *call) run(limit time.Duration) error {
	defer func() { _ = c.process.Close() }()
	c.stdin = newStdin(c.process)
	defer c.stdin.abandon()
	pumps := c.startPumps()
	// Not waited for: Recv returns when this handler has.
	go c.receive()

	timedOut, ended, err := c.wait(limit, pumps)
	if err != nil {
		return err
	}
	if c.service.isStopping() {
		return errStopping(codes.Unavailable)
	}
	exit := &guestv1.ExecExit{
		ExitCode:   int32(ended.Code),
		Signal:     uint32(ended.Signal),
		TimedOut:   timedOut,
		DurationMs: uint64(ended.At.Sub(c.begun).Milliseconds()),
	}
	return c.send(&guestv1.ExecResponse{Response: &guestv1.ExecResponse_Exit{Exit: exit}})
}

// wait returns when the process has ended and its output is at its end, or
// after a kill killGrace later, when an output that is still open is given up.
func (c *call) wait(limit time.Duration, pumps int) (timedOut bool, ended procs.Status, err error) {
	ctx := c.stream.Context()
	var timeUp, giveUp <-chan time.Time
	announce := time.NewTimer(announceDelay)
	defer announce.Stop()
	if limit > 0 {
		timer := time.NewTimer(limit)
		defer timer.Stop()
		timeUp = timer.C
	}
	exited, gone, refused, halted := c.process.Done(), ctx.Done(), c.refused, c.service.ended
	kill := func() {
		c.kill()
		if giveUp == nil {
			giveUp = time.After(killGrace)
		}
	}
	fail := func(cause error) {
		if cause != nil && err == nil {
			err = cause
			kill()
		}
	}
	for exited != nil || pumps > 0 {
		select {
		case <-announce.C:
			fail(c.announce())
		case <-exited:
			exited, ended = nil, c.process.Status()
			c.hangUp()
		case pumpErr := <-c.pumped:
			pumps--
			fail(pumpErr)
		case refusal := <-refused:
			refused = nil
			fail(refusal)
		case <-gone:
			gone = nil
			fail(status.FromContextError(ctx.Err()).Err())
		case <-timeUp:
			timeUp, timedOut = nil, true
			kill()
		case <-halted:
			halted = nil
			kill()
		case <-giveUp:
			c.endPumps()
			if exited != nil {
				// Killed, but stuck in the kernel; the table reaps it one day.
				exited, ended = nil, procs.Status{Code: 128 + int(syscall.SIGKILL), Signal: syscall.SIGKILL, At: time.Now()}
			}
			if err != nil {
				// Nobody waits for the rest of the output.
				return timedOut, ended, err
			}
		}
	}
	return timedOut, ended, err
}

func (c *call) kill() {
	err := c.process.Signal(syscall.SIGKILL)
	if err != nil && !errors.Is(err, os.ErrProcessDone) {
		c.service.cfg.Log.Warn("kill a process group", "pid", c.process.PID(), "error", err)
	}
}

// send sends msg, with `started` before the first one.
func (c *call) send(msg *guestv1.ExecResponse) error {
	c.sending.Lock()
	defer c.sending.Unlock()
	if err := c.sendStarted(); err != nil {
		return err
	}
	return c.stream.Send(msg)
}

// announce sends `started` unless a pump is just doing so, for which it does not
// wait: a client that does not read may hold the pump for ever.
func (c *call) announce() error {
	if !c.sending.TryLock() {
		return nil
	}
	defer c.sending.Unlock()
	return c.sendStarted()
}

func (c *call) sendStarted() error {
	if c.announced {
		return nil
	}
	c.announced = true
	started := &guestv1.ExecStarted{Pid: uint32(c.process.PID())}
	return c.stream.Send(&guestv1.ExecResponse{Response: &guestv1.ExecResponse_Started{Started: started}})
}

// startPumps copies each output to the stream and returns how many there are.
func (c *call) startPumps() int {
	go func() {
		c.pumped <- c.pump(c.process.Stdout, func(data []byte) *guestv1.ExecResponse {
			return &guestv1.ExecResponse{Response: &guestv1.ExecResponse_Stdout{Stdout: data}}
		})
	}()
	if c.process.Stderr == nil {
		return 1
	}
	go func() {
		c.pumped <- c.pump(c.process.Stderr, func(data []byte) *guestv1.ExecResponse {
			return &guestv1.ExecResponse{Response: &guestv1.ExecResponse_Stderr{Stderr: data}}
		})
	}()
	return 2
}

// hangUp makes the pump of a terminal stop once nothing comes any more. The kernel
// hangs a terminal up with the end of the program, which leads its session: others
// that hold it can write nothing more, but keep it from ending.
func (c *call) hangUp() {
	if !c.process.TTY() {
		return
	}
	c.deadlines.Lock()
	c.hungUp = true
	c.deadlines.Unlock()
	c.waitForMore()
}

// waitForMore gives the output of a terminal that was hung up time for more.
func (c *call) waitForMore() {
	c.deadlines.Lock()
	defer c.deadlines.Unlock()
	if c.hungUp && !c.over {
		_ = c.process.Stdout.SetReadDeadline(time.Now().Add(hangupGrace))
	}
}

// endPumps makes the pumps stop at what the pipes hold now.
func (c *call) endPumps() {
	c.deadlines.Lock()
	defer c.deadlines.Unlock()
	c.over = true
	past := time.Unix(1, 0)
	_ = c.process.Stdout.SetReadDeadline(past)
	if c.process.Stderr != nil {
		_ = c.process.Stderr.SetReadDeadline(past)
	}
}

// pump copies from until its end, or until its deadline and then what one more
// read finds. Its error is the stream's.
func (c *call) pump(from *os.File, message func([]byte) *guestv1.ExecResponse) error {
	buf, ok := c.service.buffers.Get().(*[maxChunk]byte)
	if !ok {
		buf = new([maxChunk]byte)
	}
	defer c.service.buffers.Put(buf)
	for last := false; !last; {
		n, err := from.Read(buf[:])
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			last = true
			n = readNow(from, buf[:])
		case err != nil:
			// End of file, EIO at the end of a terminal, or closed by us.
			last = true
		}
		if n > 0 {
			if err := c.send(message(buf[:n])); err != nil {
				return err
			}
			c.waitForMore()
		}
	}
	return nil
}

// readNow reads what is there, past the file's deadline, without waiting.
func readNow(f *os.File, buf []byte) int {
	if err := f.SetReadDeadline(time.Time{}); err != nil {
		return 0
	}
	conn, err := f.SyscallConn()
	if err != nil {
		return 0
	}
	n := 0
	if err := conn.Control(func(fd uintptr) { n, err = unix.Read(int(fd), buf) }); err != nil || n < 0 {
		return 0
	}
	return n
}

// receive takes the client's messages until it ends them or the handler
// returns. A message that breaks the rules ends the call.
func (c *call) receive() {
	if err := c.receiveAll(c.stream.Context()); err != nil {
		c.refused <- err
	}
}

func (c *call) receiveAll(ctx context.Context) error {
	for {
		msg, err := c.stream.Recv()
		if err != nil {
			if errors.Is(err, io.EOF) {
				c.stdin.end()
				return nil
			}
			// A client that is gone shows in the context too, unless it sent
			// something that gRPC refuses.
			return err
		}
		switch r := msg.GetRequest().(type) {
		case *guestv1.ExecRequest_Stdin:
			err = c.stdin.add(ctx, r.Stdin)
		case *guestv1.ExecRequest_StdinEof:
			c.stdin.end()
		case *guestv1.ExecRequest_Resize:
			err = c.resize(r.Resize)
		case *guestv1.ExecRequest_Signal:
			err = c.signal(r.Signal.GetNumber())
		case *guestv1.ExecRequest_Start:
			err = status.Error(codes.InvalidArgument, "a second start")
		default:
			err = status.Error(codes.InvalidArgument, "an empty message, or one of a newer protocol")
		}
		if err != nil {
			return err
		}
	}
}

func (c *call) resize(r *guestv1.Resize) error {
	size, err := terminalSize(r)
	if err != nil {
		return err
	}
	// A terminal that is already closed needs no size.
	_ = c.process.Resize(size)
	return nil
}

func (c *call) signal(number uint32) error {
	if number < 1 || number > 64 {
		return status.Errorf(codes.InvalidArgument, "signal %d: not 1 to 64", number)
	}
	err := c.process.Signal(syscall.Signal(number))
	if err != nil && !errors.Is(err, os.ErrProcessDone) {
		return status.Error(codes.Internal, fmt.Sprintf("signal %d: %v", number, err))
	}
	return nil
}
