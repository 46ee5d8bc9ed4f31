package guest_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	guestv1 "github.com/iii-hq/workers/sandbox-libkrun/api/guest/v1"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/agentlink"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/guest"
)

// stub is an agent whose answers a test scripts.
type stub struct {
	guestv1.UnimplementedAgentServiceServer
	hello    *guestv1.HelloResponse
	exec     func(guestv1.AgentService_ExecServer) error
	shutdown atomic.Uint32
}

func (s *stub) Hello(context.Context, *guestv1.HelloRequest) (*guestv1.HelloResponse, error) {
	return s.hello, nil
}

func (s *stub) Exec(stream guestv1.AgentService_ExecServer) error { return s.exec(stream) }

func (s *stub) Shutdown(_ context.Context, r *guestv1.ShutdownRequest) (*guestv1.ShutdownResponse, error) {
	s.shutdown.Store(r.GetGraceMs())
	return &guestv1.ShutdownResponse{}, nil
}

func (s *stub) SetTime(context.Context, *guestv1.SetTimeRequest) (*guestv1.SetTimeResponse, error) {
	return nil, status.Error(codes.Unavailable, "the vm ended")
}

func client(t *testing.T, s *stub) *guest.Client {
	t.Helper()
	listener := bufconn.Listen(1 << 20)
	server := grpc.NewServer()
	guestv1.RegisterAgentServiceServer(server, s)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	conn, err := grpc.NewClient("passthrough:///stub", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = conn.Close()
		server.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return guest.New(conn)
}

func bounded(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func exit(e *guestv1.ExecExit) *guestv1.ExecResponse {
	return &guestv1.ExecResponse{Response: &guestv1.ExecResponse_Exit{Exit: e}}
}

func stdout(data string) *guestv1.ExecResponse {
	return &guestv1.ExecResponse{Response: &guestv1.ExecResponse_Stdout{Stdout: []byte(data)}}
}

func TestHello(t *testing.T) {
	t.Parallel()
	c := client(t, &stub{hello: &guestv1.HelloResponse{
		ProtocolVersion: agentlink.ProtocolVersion, AgentVersion: "1.2.3", KernelRelease: "6.1", KernelMs: 1500, AgentMs: 1 << 63, Warnings: []string{"w"},
	}})
	info, err := c.Hello(bounded(t), "test")
	if err != nil {
		t.Fatal(err)
	}
	if info.AgentVersion != "1.2.3" || info.KernelRelease != "6.1" || info.KernelTime != 1500*time.Millisecond || len(info.Warnings) != 1 {
		t.Errorf("info is %+v", info)
	}
	if info.AgentTime < 0 {
		t.Errorf("a guest's absurd number became %v", info.AgentTime)
	}
}

func TestHelloOfAnotherProtocolNamesBoth(t *testing.T) {
	t.Parallel()
	c := client(t, &stub{hello: &guestv1.HelloResponse{ProtocolVersion: 77, AgentVersion: "9.9"}})
	_, err := c.Hello(bounded(t), "0.2.1")
	var skew *guest.VersionError
	if !errors.As(err, &skew) {
		t.Fatalf("error is %v", err)
	}
	for _, part := range []string{"77", "9.9", "0.2.1", "one build"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q lacks %q", err, part)
		}
	}
}

func TestErrorsSayWhoHasToAct(t *testing.T) {
	t.Parallel()
	c := client(t, &stub{})
	_, err := c.SetTime(bounded(t), time.Now())
	if !unavailable(err) || !strings.Contains(err.Error(), "the vm ended") || strings.Contains(err.Error(), "rpc error") {
		t.Errorf("error is %v", err)
	}
	cause := errors.New("the user left")
	ctx, cancel := context.WithCancelCause(bounded(t))
	cancel(cause)
	if _, err := c.SetTime(ctx, time.Now()); !errors.Is(err, cause) || unavailable(err) {
		t.Errorf("after a cancel: %v", err)
	}
}

func TestShutdownClampsTheGrace(t *testing.T) {
	t.Parallel()
	s := &stub{}
	c := client(t, s)
	for give, want := range map[time.Duration]uint32{-1: 0, time.Nanosecond: 1, time.Hour: 60_000} {
		if err := c.Shutdown(bounded(t), give); err != nil {
			t.Fatal(err)
		}
		if got := s.shutdown.Load(); got != want {
			t.Errorf("grace %v became %d ms, want %d", give, got, want)
		}
	}
}

func TestExecSendsEverythingAndReturnsTheResult(t *testing.T) {
	t.Parallel()
	c := client(t, &stub{exec: func(stream guestv1.AgentService_ExecServer) error {
		first, err := stream.Recv()
		if err != nil {
			return err
		}
		start := first.GetStart()
		got := string(bytes.Join(start.GetArgv(), []byte(" "))) + "|" + string(bytes.Join(start.GetEnv(), []byte(" "))) + "|" + string(start.GetWorkdir())
		if got != "sh -c \xff|A=1 B=2|/tmp" || start.GetTimeoutMs() != 1501 || start.GetTty().GetRows() != 25 || start.GetTty().GetCols() != 80 {
			return status.Errorf(codes.InvalidArgument, "start is %v", start)
		}
		if err := stream.Send(stdout("out")); err != nil {
			return err
		}
		if err := stream.Send(&guestv1.ExecResponse{Response: &guestv1.ExecResponse_Stderr{Stderr: []byte("err")}}); err != nil {
			return err
		}
		return stream.Send(exit(&guestv1.ExecExit{ExitCode: 143, Signal: 15, TimedOut: true, DurationMs: 1500}))
	}})
	var out, errs bytes.Buffer
	result, err := c.Exec(bounded(t), guest.Command{
		Argv: []string{"sh", "-c", "\xff"}, Env: []string{"A=1", "B=2"}, Workdir: "/tmp",
		Timeout: 1500*time.Millisecond + 1, TTY: &guest.Size{Rows: 25, Cols: 80},
	}, guest.IO{Stdout: &out, Stderr: &errs})
	if err != nil {
		t.Fatal(err)
	}
	want := guest.Result{ExitCode: 143, Signal: 15, TimedOut: true, Duration: 1500 * time.Millisecond}
	if result != want || out.String() != "out" || errs.String() != "err" {
		t.Errorf("%+v %q %q", result, &out, &errs)
	}
}

func TestSpawnErrorIsAResult(t *testing.T) {
	t.Parallel()
	c := client(t, &stub{exec: func(stream guestv1.AgentService_ExecServer) error {
		return stream.Send(exit(&guestv1.ExecExit{ExitCode: 127, SpawnError: &guestv1.SpawnError{Errno: 2, What: "program", Message: "nope"}}))
	}})
	result, err := c.Exec(bounded(t), guest.Command{Argv: []string{"x"}}, guest.IO{})
	if err != nil || result.ExitCode != 127 || result.SpawnError == nil || result.SpawnError.Errno != syscall.ENOENT {
		t.Errorf("%+v, %v", result, err)
	}
}

// echo sends back all stdin and ends at its end.
func echo(stream guestv1.AgentService_ExecServer) error {
	for {
		msg, err := stream.Recv()
		if err != nil {
			return err
		}
		switch r := msg.GetRequest().(type) {
		case *guestv1.ExecRequest_Stdin:
			if len(r.Stdin) > 64<<10 {
				return status.Error(codes.InvalidArgument, "chunk too long")
			}
			if err := stream.Send(&guestv1.ExecResponse{Response: &guestv1.ExecResponse_Stdout{Stdout: r.Stdin}}); err != nil {
				return err
			}
		case *guestv1.ExecRequest_StdinEof:
			return stream.Send(exit(&guestv1.ExecExit{}))
		}
	}
}

func TestStdinIsChunkedAndEnds(t *testing.T) {
	t.Parallel()
	c := client(t, &stub{exec: echo})
	data := bytes.Repeat([]byte("0123456789abcdef"), 1<<20)
	sum := sha256.New()
	if _, err := c.Exec(bounded(t), guest.Command{Argv: []string{"cat"}}, guest.IO{Stdin: bytes.NewReader(data), Stdout: sum}); err != nil {
		t.Fatal(err)
	}
	if want := sha256.Sum256(data); !bytes.Equal(sum.Sum(nil), want[:]) {
		t.Error("the data changed on its way")
	}
	if _, err := c.Exec(bounded(t), guest.Command{Argv: []string{"cat"}}, guest.IO{}); err != nil {
		t.Errorf("no stdin: %v", err)
	}
}

func TestStuckStdinDoesNotHoldTheCall(t *testing.T) {
	t.Parallel()
	c := client(t, &stub{exec: func(stream guestv1.AgentService_ExecServer) error {
		return stream.Send(exit(&guestv1.ExecExit{ExitCode: 3}))
	}})
	stuck, w := io.Pipe()
	defer func() { _ = w.Close() }()
	result, err := c.Exec(bounded(t), guest.Command{Argv: []string{"true"}}, guest.IO{Stdin: stuck})
	if err != nil || result.ExitCode != 3 {
		t.Errorf("%+v, %v", result, err)
	}
}

func TestUnreadStdinDoesNotHoldTheCall(t *testing.T) {
	t.Parallel()
	full := make(chan struct{})
	c := client(t, &stub{exec: func(stream guestv1.AgentService_ExecServer) error {
		<-full
		return stream.Send(exit(&guestv1.ExecExit{ExitCode: 3}))
	}})
	result, err := c.Exec(bounded(t), guest.Command{Argv: []string{"true"}}, guest.IO{Stdin: &endless{full: full}})
	if err != nil || result.ExitCode != 3 {
		t.Errorf("%+v, %v", result, err)
	}
}

// endless is a reader without end that closes full when it is read for the second
// time: what it gave the first time is on its way then.
type endless struct {
	reads int
	full  chan struct{}
}

func (e *endless) Read(p []byte) (int, error) {
	if e.reads++; e.reads == 2 {
		close(e.full)
	}
	return len(p), nil
}

func TestFailedStdinEndsTheProgram(t *testing.T) {
	t.Parallel()
	gone := make(chan struct{})
	c := client(t, &stub{exec: func(stream guestv1.AgentService_ExecServer) error {
		<-stream.Context().Done()
		close(gone)
		return nil
	}})
	broken := errors.New("disk on fire")
	_, err := c.Exec(bounded(t), guest.Command{Argv: []string{"cat"}}, guest.IO{Stdin: io.MultiReader(strings.NewReader("x"), errReader{broken})})
	if !errors.Is(err, broken) {
		t.Errorf("error is %v", err)
	}
	await(t, gone)
}

type errReader struct{ err error }

func (r errReader) Read([]byte) (int, error) { return 0, r.err }

func await(t *testing.T, c <-chan struct{}) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(20 * time.Second):
		t.Fatal("it did not happen")
	}
}

type fullDisk struct{}

func (fullDisk) Write([]byte) (int, error) { return 0, syscall.ENOSPC }

func TestFailedWriterEndsTheProgram(t *testing.T) {
	t.Parallel()
	gone := make(chan struct{})
	c := client(t, &stub{exec: func(stream guestv1.AgentService_ExecServer) error {
		defer close(gone)
		for stream.Send(stdout("data")) == nil {
		}
		return nil
	}})
	_, err := c.Exec(bounded(t), guest.Command{Argv: []string{"yes"}}, guest.IO{Stdout: fullDisk{}})
	if !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "stdout") {
		t.Errorf("error is %v", err)
	}
	await(t, gone)
}

func TestCancelReturnsItsCauseAtOnce(t *testing.T) {
	t.Parallel()
	running, gone := make(chan struct{}), make(chan struct{})
	c := client(t, &stub{exec: func(stream guestv1.AgentService_ExecServer) error {
		close(running)
		<-stream.Context().Done()
		close(gone)
		return nil
	}})
	cause := errors.New("the user left")
	ctx, cancel := context.WithCancelCause(bounded(t))
	go func() {
		<-running
		cancel(cause)
	}()
	_, err := c.Exec(ctx, guest.Command{Argv: []string{"sleep"}}, guest.IO{})
	if !errors.Is(err, cause) {
		t.Errorf("error is %v", err)
	}
	await(t, gone)
}

func TestEndWithoutExitIsAnError(t *testing.T) {
	t.Parallel()
	c := client(t, &stub{exec: func(stream guestv1.AgentService_ExecServer) error { return stream.Send(stdout("half")) }})
	if _, err := c.Exec(bounded(t), guest.Command{Argv: []string{"x"}}, guest.IO{}); err == nil || !strings.Contains(err.Error(), "without telling") {
		t.Errorf("error is %v", err)
	}
}

func TestSizesAndSignalsArrive(t *testing.T) {
	t.Parallel()
	c := client(t, &stub{exec: func(stream guestv1.AgentService_ExecServer) error {
		var size *guestv1.Resize
		var number uint32
		for size == nil || number == 0 {
			msg, err := stream.Recv()
			if err != nil {
				return err
			}
			if r := msg.GetResize(); r != nil {
				size = r
			}
			number += msg.GetSignal().GetNumber()
		}
		return stream.Send(exit(&guestv1.ExecExit{ExitCode: int32(size.GetRows() + size.GetCols() + number)}))
	}})
	sizes, signals := make(chan guest.Size, 1), make(chan int, 1)
	sizes <- guest.Size{Rows: 50, Cols: 100}
	signals <- 15
	close(sizes)
	close(signals)
	result, err := c.Exec(bounded(t), guest.Command{Argv: []string{"x"}}, guest.IO{Resize: sizes, Signals: signals})
	if err != nil || result.ExitCode != 165 {
		t.Errorf("%+v, %v", result, err)
	}
}

func TestTooLongCommandIsRefused(t *testing.T) {
	t.Parallel()
	c := client(t, &stub{exec: func(guestv1.AgentService_ExecServer) error { return nil }})
	got, err := c.Exec(bounded(t), guest.Command{Argv: []string{"echo", strings.Repeat("x", 1<<20)}}, guest.IO{})
	if err != nil || got.ExitCode != 126 || got.SpawnError == nil || got.SpawnError.Errno != syscall.E2BIG || !strings.Contains(got.SpawnError.Message, "stdin") {
		t.Errorf("%+v, %v", got, err)
	}
}

// unavailable reports whether err says that the guest is gone.
func unavailable(err error) bool {
	var e *guest.Error
	return errors.As(err, &e) && e.Code == codes.Unavailable
}
