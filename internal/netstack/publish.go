package netstack

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
)

// maxPublished bounds the published ports of a VM.
const maxPublished = 64

// errClosed tells that the gateway has ended.
var errClosed = errors.New("the VM's network has ended")

// Forward is one published port.
type Forward struct {
	// Host is the loopback address and port of the host that accepts.
	Host netip.AddrPort
	// Guest is the TCP port of the guest that is connected to.
	Guest uint16
}

// published is a port that is listened on.
type published struct {
	forward  Forward
	listener net.Listener
	ctx      context.Context //nolint:containedctx // it is the port's lifetime, not a call's
	end      context.CancelFunc
	flows    sync.WaitGroup
}

// Publish listens on a loopback address of the host, port 0 for any free one, and
// connects what it accepts to a TCP port of the guest, by IPv4. It returns the
// address that it listens on. Whether anything listens in the guest is found at
// each connection anew: one that is refused is reset. Host addresses other than
// loopback are refused.
func (g *Gateway) Publish(host netip.AddrPort, guestPort uint16) (netip.AddrPort, error) {
	switch {
	case !host.Addr().IsLoopback() || host.Addr().Zone() != "":
		return netip.AddrPort{}, fmt.Errorf("publish on %s: a VM's ports are published on the host's loopback alone, use 127.0.0.1", host)
	case guestPort == 0:
		return netip.AddrPort{}, errors.New("publish port 0 of the guest: name a port from 1 to 65535")
	}
	var config net.ListenConfig
	listener, err := config.Listen(g.ctx, "tcp", host.String())
	if err != nil {
		if g.ctx.Err() != nil {
			err = errClosed
		}
		return netip.AddrPort{}, fmt.Errorf("publish on %s: %w", host, err)
	}
	bound := netip.AddrPortFrom(host.Addr(), uint16(listener.Addr().(*net.TCPAddr).Port)) //nolint:errcheck // a TCP listener has a TCPAddr
	p := &published{forward: Forward{Host: bound, Guest: guestPort}, listener: listener}
	p.ctx, p.end = context.WithCancel(g.ctx)

	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case g.ctx.Err() != nil:
		err = errClosed
	case len(g.published) >= maxPublished:
		err = fmt.Errorf("%d ports are published already, end one first", maxPublished)
	}
	if err != nil {
		p.end()
		return netip.AddrPort{}, errors.Join(fmt.Errorf("publish on %s: %w", host, err), listener.Close())
	}
	g.published[bound] = p
	g.running.Go(func() { g.serve(p) })
	return bound, nil
}

// Unpublish stops listening on an address that Publish returned, resets its
// connections and returns when they are gone. Unknown addresses are an error.
func (g *Gateway) Unpublish(host netip.AddrPort) error {
	g.mu.Lock()
	p := g.published[host]
	delete(g.published, host)
	g.mu.Unlock()
	if p == nil {
		return fmt.Errorf("nothing is published on %s", host)
	}
	p.end()
	err := p.listener.Close()
	p.flows.Wait()
	if err != nil && !errors.Is(err, net.ErrClosed) {
		return fmt.Errorf("end publishing on %s: %w", host, err)
	}
	return nil
}

// Published lists the published ports by host address.
func (g *Gateway) Published() []Forward {
	g.mu.Lock()
	defer g.mu.Unlock()
	all := make([]Forward, 0, len(g.published))
	for _, p := range g.published {
		all = append(all, p.forward)
	}
	slices.SortFunc(all, func(a, b Forward) int {
		return cmp.Or(a.Host.Addr().Compare(b.Host.Addr()), cmp.Compare(a.Host.Port(), b.Host.Port()))
	})
	return all
}

// serve accepts connections for one port until it is unpublished.
func (g *Gateway) serve(p *published) {
	stop := context.AfterFunc(p.ctx, func() { _ = p.listener.Close() })
	defer stop()
	p.flows.Add(1) // so that Unpublish waits for connections that begin now
	defer p.flows.Done()
	for {
		conn, err := p.listener.Accept()
		if err != nil {
			if p.ctx.Err() != nil {
				return
			}
			// A host without sockets has them again when one of these is closed.
			g.lackOf(err)
			if !pause(p.ctx) {
				return
			}
			continue
		}
		slot, ok := g.reserveTCP()
		if !ok {
			g.denials.addr("tcp", p.forward.Host, tooMany)
			abort(conn)
			continue
		}
		p.flows.Add(1)
		g.running.Go(func() {
			defer p.flows.Done()
			defer g.releaseTCP()
			g.forward(p, conn, classes[slot].buffer)
		})
	}
}

// forward runs one connection to a published port.
func (g *Gateway) forward(p *published, conn net.Conn, buffer int) {
	stop := context.AfterFunc(p.ctx, func() { abort(conn) })
	defer stop()
	ep, queue, err := g.connect(p.ctx, p.forward.Guest, buffer)
	if err != nil {
		abort(conn)
		return
	}
	g.counters.tcpFlows.Add(1)
	g.relay(ep, queue, conn)
}
