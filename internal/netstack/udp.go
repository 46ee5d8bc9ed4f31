package netstack

import (
	"errors"
	"math"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/egress"
)

const (
	// maxUDP bounds the UDP flows of a VM; one more ends the one that was idle the
	// longest.
	maxUDP = 256
	// udpIdle ends a flow without datagrams either way. RFC 4787 asks for at least
	// two minutes.
	udpIdle = 2 * time.Minute
)

// A udpFlow is a socket of the host that stands for one pair of a guest's port
// and a destination. What others send to it is not received.
type udpFlow struct {
	id    stack.TransportEndpointID
	net   tcpip.NetworkProtocolNumber
	conn  net.Conn
	raw   syscall.RawConn // nil where conn is no socket
	quote quote           // of its first datagram
	used  atomic.Int64    // when it last carried something, in nanoseconds since the start
}

// handleUDP takes a datagram of the guest.
func (g *Gateway) handleUDP(id stack.TransportEndpointID, packet *stack.PacketBuffer) bool {
	var payload []byte
	if packet.Data().Size() > 0 { // an empty view is none
		view := packet.Data().AsRange().ToView()
		defer view.Release()
		payload = view.AsSlice()
	}

	g.mu.Lock()
	flow := g.udp[id]
	g.mu.Unlock()
	if flow == nil {
		dst := netip.AddrPortFrom(addrOf(id.LocalAddress), id.LocalPort)
		to, reason := g.decide(egress.UDP, dst)
		switch {
		case reason == closedPort:
			g.denials.addr("udp", dst, reason)
			g.sendUnreachable(portUnreachable(), quoteOf(packet))
			return true
		case reason != "":
			g.denials.addr("udp", dst, reason)
			if !unanswered(dst.Addr()) {
				g.sendUnreachable(prohibited(), quoteOf(packet))
			}
			return true
		case to.dns:
			g.answerDatagram(id, packet.NetworkProtocolNumber, payload)
			return true
		}
		if flow = g.openUDP(id, packet, to); flow == nil {
			return true
		}
	}
	g.counters.out(len(payload))
	flow.used.Store(int64(g.counters.since()))
	if err := flow.send(payload); err != nil && !errors.Is(err, net.ErrClosed) {
		g.sendUnreachable(whyUnreachable(err), quoteOf(packet))
	}
	return true
}

// unanswered are destinations that no ICMP error is sent about (RFC 1122, 3.2.2).
func unanswered(dst netip.Addr) bool {
	return dst.IsMulticast() || dst == netip.AddrFrom4([4]byte{255, 255, 255, 255})
}

// openUDP makes the flow of a datagram; nil after telling the guest why there is
// none.
func (g *Gateway) openUDP(id stack.TransportEndpointID, packet *stack.PacketBuffer, to target) *udpFlow {
	conn, err := g.dial(egress.UDP, to)
	if err != nil {
		if errors.Is(err, errOwnAddress) {
			g.denials.addr("udp", to.dst, egress.HostAddress)
			err = unix.EACCES
		}
		g.lackOf(err)
		g.sendUnreachable(whyUnreachable(err), quoteOf(packet))
		return nil
	}
	flow := &udpFlow{id: id, net: packet.NetworkProtocolNumber, conn: conn, quote: quoteOf(packet)}
	if socket, ok := conn.(syscall.Conn); ok {
		flow.raw, _ = socket.SyscallConn()
	}
	g.mu.Lock()
	if len(g.udp) >= maxUDP {
		g.evictUDP()
	}
	g.udp[id] = flow
	g.mu.Unlock()
	g.counters.udpFlows.Add(1)
	g.running.Go(func() { g.fromHost(flow) })
	return flow
}

// evictUDP ends the flow that was idle the longest.
func (g *Gateway) evictUDP() {
	var oldest *udpFlow
	for _, flow := range g.udp {
		if oldest == nil || flow.used.Load() < oldest.used.Load() {
			oldest = flow
		}
	}
	delete(g.udp, oldest.id)
	_ = oldest.conn.Close()
}

// send sends one datagram to the host's network, or loses it where the socket has
// no room.
func (f *udpFlow) send(payload []byte) (err error) {
	for range 2 { // the first error may be that of an earlier datagram
		if err = f.trySend(payload); err == nil || errors.Is(err, unix.EAGAIN) {
			return nil
		}
	}
	return err
}

func (f *udpFlow) trySend(payload []byte) (err error) {
	if f.raw == nil {
		_, err = f.conn.Write(payload)
		return err
	}
	errRaw := f.raw.Write(func(fd uintptr) bool {
		_, err = unix.Write(int(fd), payload)
		return true
	})
	return errors.Join(errRaw, err)
}

// fromHost passes a flow's datagrams to the guest until it is idle or closed.
func (g *Gateway) fromHost(flow *udpFlow) {
	stop := g.onEnd(func() { _ = flow.conn.Close() })
	defer stop()
	defer func() {
		_ = flow.conn.Close()
		g.mu.Lock()
		if g.udp[flow.id] == flow {
			delete(g.udp, flow.id)
		}
		g.mu.Unlock()
	}()
	source := g.newReader(flow.conn)
	for {
		idle := g.counters.since() - time.Duration(flow.used.Load())
		if idle >= udpIdle {
			return
		}
		_ = flow.conn.SetReadDeadline(time.Now().Add(udpIdle - idle))
		chunk, n, err := source.read()
		if err == nil {
			flow.used.Store(int64(g.counters.since()))
			g.counters.in(n)
			g.sendDatagram(flow.id, flow.net, chunk[:n])
		}
		if chunk != nil {
			g.chunks.put(chunk)
		}
		switch {
		case err == nil, errors.Is(err, os.ErrDeadlineExceeded):
		case errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.ENETUNREACH):
			g.sendUnreachable(whyUnreachable(err), flow.quote)
		default:
			return
		}
	}
}

// sendDatagram sends the guest a datagram in the name of the other end of id.
func (g *Gateway) sendDatagram(id stack.TransportEndpointID, network tcpip.NetworkProtocolNumber, payload []byte) {
	route, err := g.stack.FindRoute(nicID, id.LocalAddress, id.RemoteAddress, network, false)
	if err != nil {
		return
	}
	defer route.Release()
	packet := stack.NewPacketBuffer(stack.PacketBufferOptions{
		ReserveHeaderBytes: header.UDPMinimumSize + int(route.MaxHeaderLength()),
		Payload:            buffer.MakeWithData(payload),
	})
	defer packet.DecRef()
	packet.TransportProtocolNumber = udp.ProtocolNumber
	size := uint16(header.UDPMinimumSize + len(payload))
	datagram := header.UDP(packet.TransportHeader().Push(header.UDPMinimumSize))
	datagram.Encode(&header.UDPFields{SrcPort: id.LocalPort, DstPort: id.RemotePort, Length: size})
	sum := datagram.CalculateChecksum(checksum.Combine(
		header.PseudoHeaderChecksum(udp.ProtocolNumber, id.LocalAddress, id.RemoteAddress, size),
		packet.Data().Checksum(),
	))
	if sum != math.MaxUint16 { // which would become 0, "no checksum"
		sum = ^sum
	}
	datagram.SetChecksum(sum)
	_ = route.WritePacket(stack.NetworkHeaderParams{Protocol: udp.ProtocolNumber, TTL: route.DefaultTTL()}, packet)
}
