package netstack

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/egress"
)

// dialTimeout bounds how long a destination that says nothing is waited for. It
// is somewhat less than a guest's own patience (Linux: 127 s).
const dialTimeout = 60 * time.Second

// errOwnAddress tells that a socket turned out to end at the host itself.
var errOwnAddress = errors.New("the destination is the host itself")

// target is where a flow of the guest leads.
type target struct {
	// dns is the gateway's own DNS server; hostPort a port of the host's loopback;
	// else dst is dialled.
	dns      bool
	hostPort bool
	dst      netip.AddrPort
}

// decide tells where a flow to dst leads, or why nowhere.
func (g *Gateway) decide(proto egress.Protocol, dst netip.AddrPort) (target, egress.Reason) {
	addr := dst.Addr()
	switch {
	case addr == g.opts.Gateway4 || addr == g.opts.Gateway6:
		switch {
		case dst.Port() == dnsPort:
			return target{dns: true, dst: dst}, ""
		case proto == egress.TCP && g.hostPorts[dst.Port()]:
			return target{hostPort: true, dst: dst}, ""
		}
		return target{}, closedPort
	case g.opts.Guest4.Contains(addr.Unmap()), g.opts.Guest6.Contains(addr):
		return target{}, ownNetwork
	}
	g.host.refresh()
	if err := g.checker.Allow(proto, dst); err != nil {
		return target{}, reasonOf(err)
	}
	return target{dst: dst}, ""
}

func reasonOf(err error) egress.Reason {
	var denial *egress.Denial
	if errors.As(err, &denial) {
		return denial.Reason
	}
	return egress.NotAllowed
}

// forbidBroadcast undoes what package net does to each socket: the host's kernel,
// which knows its broadcast addresses better than any list, refuses them then.
func forbidBroadcast(_, _ string, socket syscall.RawConn) error {
	var err error
	errControl := socket.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_BROADCAST, 0)
	})
	return errors.Join(errControl, err)
}

// dial opens the host's side of a flow.
func (g *Gateway) dial(proto egress.Protocol, to target) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(g.ctx, dialTimeout)
	defer cancel()
	if to.hostPort {
		port := strconv.Itoa(int(to.dst.Port()))
		conn, err := g.opts.Dial(ctx, string(proto), net.JoinHostPort("127.0.0.1", port))
		if err != nil && ctx.Err() == nil {
			if conn6, err6 := g.opts.Dial(ctx, string(proto), net.JoinHostPort("::1", port)); err6 == nil {
				return conn6, nil
			}
		}
		return conn, err
	}
	conn, err := g.opts.Dial(ctx, string(proto), netip.AddrPortFrom(to.dst.Addr().Unmap(), to.dst.Port()).String())
	if err != nil {
		return nil, err
	}
	if isOwn(conn) && !g.checker.MayBeHost(proto, to.dst) {
		_ = conn.Close()
		return nil, errOwnAddress
	}
	return conn, nil
}
