package shim_test

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync"

	"google.golang.org/grpc"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/agentlink"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/shim"
)

// machine is a shim.Hypervisor whose guest is a few goroutines: what the agent
// does on its ports, and a service that echoes.
type machine struct {
	// hang makes a guest that never does anything; refuse is Check's error;
	// dialled makes the guest dial instead of using the serial port; greet is
	// what it introduces itself with instead of the token.
	hang    bool
	refuse  error
	dialled bool
	greet   string

	off chan bootspec.End

	mu      sync.Mutex
	on      chan struct{} // closed when it is powered on
	spec    bootspec.Guest
	dev     shim.Devices
	service *echo
	session net.Conn
	up      chan struct{} // closed with each session, then replaced
	greeted []error
}

func newMachine() *machine {
	return &machine{off: make(chan bootspec.End, 1), service: newEcho(), up: make(chan struct{}), on: make(chan struct{})}
}

func (m *machine) Check(*bootspec.Spec) error { return m.refuse }

func (m *machine) Run(ctx context.Context, _ *bootspec.Spec, dev shim.Devices) bootspec.End {
	m.mu.Lock()
	m.dev = dev
	m.mu.Unlock()
	close(m.on)
	dev.Started(os.Getpid())
	alive, stop := context.WithCancel(ctx)
	var guest sync.WaitGroup
	if !m.hang {
		guest.Go(func() { m.boot(alive) })
	}
	var end bootspec.End
	select {
	case end = <-m.off:
	case <-ctx.Done():
		end = bootspec.End{Class: bootspec.EndKilled, Message: "power was cut", ExitCode: -1, Signal: 9}
	}
	stop()
	m.breakLink()
	guest.Wait()
	for _, f := range []*os.File{dev.Env, dev.Link, dev.Console, dev.Log, dev.Network} {
		_ = f.Close()
	}
	return end
}

func (m *machine) powerOff(end bootspec.End) { m.off <- end }

func (m *machine) ran() bool {
	select {
	case <-m.on:
		return true
	default:
		return false
	}
}

// say writes to the console and the VMM's log, once the machine is on.
func (m *machine) say(console, vmm string) {
	<-m.on
	m.mu.Lock()
	dev := m.dev
	m.mu.Unlock()
	_, _ = io.WriteString(dev.Console, console)
	_, _ = io.WriteString(dev.Log, vmm)
}

func (m *machine) guestSpec() bootspec.Guest {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.spec
}

// boot reads the environment and serves the link until ctx ends.
func (m *machine) boot(ctx context.Context) {
	env, err := net.FileConn(m.dev.Env)
	if err != nil {
		panic(err)
	}
	defer func() { _ = env.Close() }()
	defer context.AfterFunc(ctx, func() { _ = env.Close() })()
	frame, err := agentlink.ReadEnv(env)
	if err != nil {
		return
	}
	guest, err := bootspec.ParseGuest(frame)
	if err != nil {
		panic(err)
	}
	m.mu.Lock()
	m.spec = *guest
	m.mu.Unlock()
	var link net.Conn
	if m.dialled {
		_ = m.dev.Link.Close()
	} else {
		if link, err = net.FileConn(m.dev.Link); err != nil {
			panic(err)
		}
		defer func() { _ = link.Close() }()
	}
	for ctx.Err() == nil {
		if m.dialled {
			link = m.dial()
		} else if agentlink.ResyncGuest(ctx, link) != nil {
			return
		}
		m.serve(ctx, link, guest.Token)
	}
}

// dial connects a new link to the shim.
func (m *machine) dial() net.Conn {
	host, guest := net.Pipe()
	m.dev.Offer(host)
	return guest
}

// serve greets and, if it is welcome, serves one session on c.
func (m *machine) serve(ctx context.Context, c net.Conn, token string) {
	if m.greet != "" {
		token = m.greet
	}
	_, err := agentlink.Greet(c, token)
	m.mu.Lock()
	m.greeted = append(m.greeted, err)
	if err != nil || ctx.Err() != nil {
		m.mu.Unlock()
		return
	}
	session := &guestSession{Conn: c, done: make(chan struct{})}
	m.session = session
	close(m.up)
	m.up = make(chan struct{})
	m.mu.Unlock()

	server := grpc.NewServer(
		grpc.InitialWindowSize(1<<20), grpc.InitialConnWindowSize(8<<20),
		grpc.ForceServerCodecV2(bytesCodec{}), grpc.UnknownServiceHandler(m.service.handle))
	_ = server.Serve(&oneConn{conn: session})
	<-session.done
	server.Stop()
}

// breakLink ends the guest's end of the session, as an agent that restarts.
func (m *machine) breakLink() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.session != nil {
		_ = m.session.Close()
	}
}

// nextSession is closed when the next session begins.
func (m *machine) nextSession() <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.up
}

func (m *machine) greetings() []error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return append([]error(nil), m.greeted...)
}

// envAtEnd reports whether the host's end of iii.env is closed.
func (m *machine) envAtEnd() bool {
	c, err := net.FileConn(m.dev.Env)
	if err != nil {
		panic(err)
	}
	defer func() { _ = c.Close() }()
	_ = c.SetReadDeadline(past())
	_, err = c.Read(make([]byte, 1))
	return !errors.Is(err, os.ErrDeadlineExceeded)
}
