package vmtest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"

	"google.golang.org/grpc"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/agent"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/agent/procs"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/agentlink"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/shim"
)

// fakeMachine is a shim.Hypervisor: one guest without a machine around it.
type fakeMachine struct {
	fake *Fake
	dev  shim.Devices
}

// Check finds nothing missing.
func (*fakeMachine) Check(*bootspec.Spec) error { return nil }

// Run is the guest's life: what the agent's boot does, then the agent.
func (m *fakeMachine) Run(ctx context.Context, spec *bootspec.Spec, dev shim.Devices) bootspec.End {
	m.dev = dev
	dev.Started(os.Getpid())
	table := procs.Open(procs.OwnOnly)
	end, err := m.guest(ctx, spec, table)
	// Power is off: nothing of the guest goes on.
	table.SignalAll(syscall.SIGKILL)
	_ = table.Wait(context.WithoutCancel(ctx))
	for _, file := range []*os.File{dev.Env, dev.Link, dev.Console, dev.Log, dev.Network} {
		_ = file.Close()
	}
	switch {
	case end != nil:
		return *end
	case ctx.Err() != nil:
		return bootspec.End{Class: bootspec.EndKilled, Message: "its power was cut", ExitCode: -1, Signal: int(syscall.SIGKILL)}
	case err != nil:
		return bootspec.End{Class: bootspec.EndCrashed, Message: err.Error(), ExitCode: 1}
	}
	return bootspec.End{Class: bootspec.EndGuest, Message: "the guest powered off"}
}

// guest returns nil and nil when it has powered off, or the end that a hook
// chose, or what went wrong.
func (m *fakeMachine) guest(ctx context.Context, _ *bootspec.Spec, table *procs.Table) (*bootspec.End, error) {
	if end := m.step(ctx, StepStart); end != nil {
		return end, nil
	}
	env, link, err := m.wires()
	if err != nil {
		return nil, err
	}
	cut := func() { _, _ = env.Close(), link.Close() }
	defer cut()
	defer context.AfterFunc(ctx, cut)()
	frame, err := agentlink.ReadEnv(env)
	if err != nil {
		return nil, err
	}
	config, err := bootspec.ParseGuest(frame)
	if err != nil {
		return nil, err
	}
	if end := m.step(ctx, StepEnv); end != nil {
		return end, nil
	}
	if err := agentlink.ResyncGuest(ctx, link); err != nil {
		return nil, err
	}
	if end := m.step(ctx, StepLink); end != nil {
		return end, nil
	}
	token := config.Token
	if m.fake.Token != "" {
		token = m.fake.Token
	}
	if _, err := agentlink.Greet(link, token); err != nil {
		return nil, err
	}
	if end := m.step(ctx, StepServe); end != nil {
		return end, nil
	}
	return nil, m.serve(ctx, link, config, table)
}

// step prints the step on the console and calls the hook.
func (m *fakeMachine) step(ctx context.Context, step Step) *bootspec.End {
	_, _ = fmt.Fprintf(m.dev.Console, "fake: %s\r\n", step)
	if m.fake.StepHook == nil {
		return nil
	}
	return m.fake.StepHook(ctx, step)
}

// wires makes connections of the guest's ends.
func (m *fakeMachine) wires() (env, link net.Conn, err error) {
	if env, err = net.FileConn(m.dev.Env); err != nil {
		return nil, nil, err
	}
	if link, err = net.FileConn(m.dev.Link); err != nil {
		return nil, nil, errors.Join(err, env.Close())
	}
	return env, link, nil
}

// serve runs the agent on the link until it has shut down, or the link breaks.
func (m *fakeMachine) serve(ctx context.Context, link net.Conn, config *bootspec.Guest, table *procs.Table) error {
	service := agent.New(agent.Config{Log: m.fake.Log, Version: "vmtest", Table: table, Env: config.Env})
	serving, stop := context.WithCancel(ctx)
	defer stop()
	var stopper sync.WaitGroup
	defer stopper.Wait()
	defer stop()
	stopper.Go(func() {
		select {
		case <-service.Done():
			stop()
		case <-serving.Done():
		}
	})
	lis := newOneConn(link)
	services := []func(grpc.ServiceRegistrar){service.Register}
	if !m.fake.Old {
		services = append(services, agent.NewFiles(m.fake.Log).Register)
	}
	err := agent.Serve(serving, lis, services...)
	select {
	case <-service.Done():
		return nil
	default:
		return errors.Join(err, errors.New("the link broke"))
	}
}

// oneConn is a listener that gives out one connection and then waits for its
// end.
type oneConn struct {
	conn   net.Conn
	first  sync.Once
	closed chan struct{}
	once   sync.Once
}

func newOneConn(conn net.Conn) *oneConn { return &oneConn{conn: conn, closed: make(chan struct{})} }

func (l *oneConn) Accept() (conn net.Conn, err error) {
	l.first.Do(func() { conn = closing{l.conn, l} })
	if conn != nil {
		return conn, nil
	}
	<-l.closed
	return nil, io.EOF
}

func (l *oneConn) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

func (l *oneConn) Addr() net.Addr { return l.conn.LocalAddr() }

// closing ends the listener with its connection.
type closing struct {
	net.Conn
	l *oneConn
}

func (c closing) Close() error { return errors.Join(c.l.Close(), c.Conn.Close()) }
