package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"google.golang.org/grpc"

	guestv1 "github.com/iii-hq/workers/sandbox-libkrun/api/guest/v1"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/agentlink"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
)

// playVMM is this test program in QEMU's place. What it plays is the VM's id up
// to the first '-'.
func playVMM(args []string) int {
	console, link, env := os.NewFile(3, "console"), os.NewFile(4, "link"), os.NewFile(5, "env")
	part, _, _ := strings.Cut(strings.TrimPrefix(args[1], "guest="), "-")
	switch part {
	case "refuse":
		_, _ = fmt.Fprintln(os.Stderr, "qemu: this option is unknown")
		return 1
	case "panic":
		_, _ = fmt.Fprint(console, "Kernel panic - not syncing: no init\r\n")
		return 0
	case "peek":
		return peek(args, console)
	case "hang":
		_, _ = fmt.Fprint(console, "nothing happens\r\n")
		never := make(chan os.Signal, 1)
		signal.Notify(never, syscall.SIGUSR2) // who waits for a signal is not deadlocked
		<-never
	}
	if err := playGuest(console, link, env); err != nil {
		_, _ = fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// peek tells on the console what the confined VMM can reach: the word behind
// each path is "ok" or the error.
func peek(args []string, console io.Writer) int {
	for _, arg := range args {
		path, ok := strings.CutPrefix(arg, "if=none,id=upper,format=raw,file=")
		if !ok {
			continue
		}
		upper, _, _ := strings.Cut(path, ",")
		for _, probe := range []struct {
			name string
			try  func() error
		}{
			{"write the upper", func() error { return tryOpen(upper, os.O_RDWR) }},
			{"read the spec", func() error { return tryOpen(strings.TrimSuffix(upper, "upper.ext4")+"spec.json", os.O_RDONLY) }},
			{"make a file", func() error { return tryOpen(upper+".new", os.O_CREATE|os.O_WRONLY) }},
			{"read the system", func() error { return tryOpen("/etc/passwd", os.O_RDONLY) }},
			{"write the system", func() error { return tryOpen("/etc/passwd", os.O_WRONLY) }},
			{"bind a TCP port", bindTCP},
			{"dump its memory", canDump},
		} {
			result := "ok"
			if err := probe.try(); err != nil {
				result = "no"
			}
			_, _ = fmt.Fprintf(console, "%s: %s\r\n", probe.name, result)
		}
	}
	return 0
}

// bindTCP makes a socket as C programs do: Go's own use MPTCP, which Landlock
// does not know yet.
func bindTCP() error {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	if err != nil {
		return err
	}
	defer func() { _ = syscall.Close(fd) }()
	return syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}})
}

func canDump() error {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_CORE, &limit); err != nil || limit.Cur > 0 {
		return err
	}
	return errors.New("the limit is 0")
}

func tryOpen(path string, flags int) error {
	file, err := os.OpenFile(path, flags, 0o600)
	if err == nil {
		_ = file.Close()
	}
	return err
}

// playGuest is an agent that can do nothing but shut down.
func playGuest(console io.Writer, link, env *os.File) error {
	frame, err := agentlink.ReadEnv(env)
	if err != nil {
		return err
	}
	guest, err := bootspec.ParseGuest(frame)
	if err != nil {
		return err
	}
	_, _ = fmt.Fprintf(console, "environment: %q\r\n", guest.Env)
	conn, err := net.FileConn(link)
	if err != nil {
		return err
	}
	if err := agentlink.ResyncGuest(context.Background(), conn); err != nil {
		return err
	}
	if _, err := agentlink.Greet(conn, guest.Token); err != nil {
		return err
	}
	server := grpc.NewServer()
	agent := &agent{off: make(chan struct{})}
	guestv1.RegisterAgentServiceServer(server, agent)
	go func() { _ = server.Serve(&oneConn{conn: conn}) }()
	<-agent.off
	server.GracefulStop()
	return nil
}

type agent struct {
	guestv1.UnimplementedAgentServiceServer
	off chan struct{}
}

func (a *agent) Hello(context.Context, *guestv1.HelloRequest) (*guestv1.HelloResponse, error) {
	return &guestv1.HelloResponse{ProtocolVersion: agentlink.ProtocolVersion, AgentVersion: "test"}, nil
}

func (a *agent) Shutdown(context.Context, *guestv1.ShutdownRequest) (*guestv1.ShutdownResponse, error) {
	close(a.off)
	return &guestv1.ShutdownResponse{}, nil
}

// oneConn is a listener with one connection.
type oneConn struct{ conn net.Conn }

func (l *oneConn) Accept() (net.Conn, error) {
	if l.conn == nil {
		return nil, io.EOF
	}
	c := l.conn
	l.conn = nil
	return c, nil
}

func (l *oneConn) Close() error   { return nil }
func (l *oneConn) Addr() net.Addr { return &net.UnixAddr{Name: "guest", Net: "unix"} }
