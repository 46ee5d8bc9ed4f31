//go:build linux

package agent_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	guestv1 "github.com/iii-hq/workers/sandbox-libkrun/api/guest/v1"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/agent"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/agent/procs"
)

const patience = 60 * time.Second

// rig is a service behind a real HTTP/2 connection.
type rig struct {
	guestv1.AgentServiceClient
	service *agent.Service
	table   *procs.Table
	conn    *grpc.ClientConn
	// served is closed when Serve has returned, which stop makes it do.
	served chan struct{}
	stop   context.CancelFunc
}

func newRig(t *testing.T, change func(*agent.Config)) *rig {
	t.Helper()
	table := procs.Open(procs.OwnOnly)
	cfg := agent.Config{
		Log:     slog.New(slog.DiscardHandler),
		Version: "1.2.3",
		Table:   table,
		Env:     []string{"PATH=/bin", "BASE=base", "PATH=" + procs.DefaultPath},
	}
	if change != nil {
		change(&cfg)
	}
	lis, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	conn, err := grpc.NewClient("unix:"+lis.Addr().String(),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithInitialWindowSize(1<<20), grpc.WithInitialConnWindowSize(8<<20))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	r := &rig{service: agent.New(cfg), table: table, conn: conn, served: make(chan struct{}), stop: cancel}
	r.AgentServiceClient = guestv1.NewAgentServiceClient(conn)
	go func() {
		defer close(r.served)
		if err := agent.Serve(ctx, lis, r.service.Register); err != nil {
			t.Errorf("serve: %v", err)
		}
	}()
	t.Cleanup(func() {
		_ = conn.Close()
		cancel()
		await(t, r.served, "the end of Serve")
		if err := table.Wait(bounded(t)); err != nil {
			t.Errorf("processes are left: %v", err)
		}
	})
	return r
}

func bounded(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

func await[T any](t *testing.T, c <-chan T, what string) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(patience):
		t.Fatalf("timed out waiting for %s", what)
		panic("unreachable")
	}
}

// session is one Exec under way.
type session struct {
	t      *testing.T
	stream guestv1.AgentService_ExecClient
	cancel context.CancelFunc
}

func sh(script string) *guestv1.ExecStart {
	return &guestv1.ExecStart{Argv: [][]byte{[]byte("sh"), []byte("-c"), []byte(script)}}
}

// exec opens the call and sends start.
func (r *rig) exec(t *testing.T, start *guestv1.ExecStart) *session {
	t.Helper()
	ctx, cancel := context.WithCancel(bounded(t))
	t.Cleanup(cancel)
	stream, err := r.Exec(ctx)
	if err != nil {
		t.Fatal(err)
	}
	s := &session{t, stream, cancel}
	if err := s.send(&guestv1.ExecRequest{Request: &guestv1.ExecRequest_Start{Start: start}}); err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *session) send(msg *guestv1.ExecRequest) error { return s.stream.Send(msg) }

func (s *session) stdin(data []byte) error {
	return s.send(&guestv1.ExecRequest{Request: &guestv1.ExecRequest_Stdin{Stdin: data}})
}

func (s *session) eof() error {
	return s.send(&guestv1.ExecRequest{Request: &guestv1.ExecRequest_StdinEof{StdinEof: &guestv1.StdinEOF{}}})
}

func (s *session) signal(n uint32) error {
	return s.send(&guestv1.ExecRequest{Request: &guestv1.ExecRequest_Signal{Signal: &guestv1.Signal{Number: n}}})
}

// until reads stdout until it has all of want, failing on anything else.
func (s *session) until(want string) {
	s.t.Helper()
	got := ""
	for len(got) < len(want) {
		msg, err := s.stream.Recv()
		if err != nil {
			s.t.Fatalf("after stdout %q: %v", got, err)
		}
		got += string(msg.GetStdout())
	}
	if got != want {
		s.t.Fatalf("stdout %.200q, want %q", got, want)
	}
}

// outcome is a whole Exec.
type outcome struct {
	pid            uint32
	stdout, stderr string
	exit           *guestv1.ExecExit
}

// finish reads to the end of the call and checks the order of the messages.
func (s *session) finish() (o outcome, err error) {
	s.t.Helper()
	for {
		msg, err := s.stream.Recv()
		if errors.Is(err, io.EOF) {
			if o.exit == nil {
				s.t.Error("the call ended without an exit")
			}
			return o, nil
		}
		if err != nil {
			return o, err
		}
		if o.exit != nil {
			s.t.Errorf("a message after the exit: %v", msg)
		}
		switch r := msg.GetResponse().(type) {
		case *guestv1.ExecResponse_Started:
			if o.pid != 0 || o.stdout+o.stderr != "" {
				s.t.Error("started is not the first message")
			}
			o.pid = r.Started.GetPid()
		case *guestv1.ExecResponse_Stdout:
			o.stdout += string(r.Stdout)
		case *guestv1.ExecResponse_Stderr:
			o.stderr += string(r.Stderr)
		case *guestv1.ExecResponse_Exit:
			o.exit = r.Exit
		}
	}
}

// run executes start without stdin.
func (r *rig) run(t *testing.T, start *guestv1.ExecStart) outcome {
	t.Helper()
	s := r.exec(t, start)
	if err := s.stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	o, err := s.finish()
	if err != nil {
		t.Fatal(err)
	}
	return o
}
