package netstack

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/egress"
)

// maxTCP bounds the TCP flows of a VM, those being opened and those being closed
// with them. Each costs a socket of the host.
const maxTCP = 1024

// handshakeTimeout is how long a guest may take to go on after its SYN was answered.
const handshakeTimeout = 10 * time.Second

// A class gives the flows of a VM their buffers: the more flows there are, the
// less each gets, so that a guest that opens all it may, asks for the smallest
// segments and reads nothing costs about 250 MiB (measured; half of that is what
// segments and chunks cost besides their data). The window is half of a buffer.
type class struct {
	upTo   int // so many flows
	buffer int // bytes, of each direction
}

// classes in the order of upTo. Read-only.
var classes = []class{{16, 1 << 20}, {64, 256 << 10}, {256, 128 << 10}, {maxTCP, 32 << 10}}

// tcpFlows opens flows for the guest's SYNs.
type tcpFlows struct {
	forwarders []*tcp.Forwarder // by class

	pending map[stack.TransportEndpointID]*opening // until their handshakes are over
	live    int
}

// opening is a connection that the guest asked for and that is not answered yet.
type opening struct {
	to     target
	quote  quote
	buffer int
}

func (g *Gateway) newTCP(s *stack.Stack) {
	g.tcp.pending = map[stack.TransportEndpointID]*opening{}
	for _, class := range classes {
		g.tcp.forwarders = append(g.tcp.forwarders, tcp.NewForwarder(s, class.buffer, maxTCP, g.open))
	}
	s.SetTransportProtocolHandler(tcp.ProtocolNumber, g.handleTCP)
}

// handleTCP takes a segment that belongs to no connection; false makes the stack
// answer it with a reset.
func (g *Gateway) handleTCP(id stack.TransportEndpointID, packet *stack.PacketBuffer) bool {
	flags := header.TCP(packet.TransportHeader().Slice()).Flags()
	if !flags.Contains(header.TCPFlagSyn) || flags.Contains(header.TCPFlagAck) || flags.Contains(header.TCPFlagRst) {
		return false
	}
	g.mu.Lock()
	_, pending := g.tcp.pending[id]
	g.mu.Unlock()
	if pending {
		return true // the guest asks again for what is on its way
	}
	dst := netip.AddrPortFrom(addrOf(id.LocalAddress), id.LocalPort)
	to, reason := g.decide(egress.TCP, dst)
	if reason != "" {
		g.denials.addr("tcp", dst, reason)
		if reason == closedPort {
			return false
		}
		g.sendUnreachable(prohibited(), quoteOf(packet))
		return true
	}
	slot, ok := g.reserveTCP()
	if !ok {
		g.denials.addr("tcp", netip.AddrPort{}, tooMany)
		return false
	}
	class := classes[slot]
	g.mu.Lock()
	g.tcp.pending[id] = &opening{to: to, quote: quoteOf(packet), buffer: class.buffer}
	g.mu.Unlock()
	// Not to be waited for before this goroutine, which reads the link, ends.
	g.running.Add(1)
	if !g.tcp.forwarders[slot].HandlePacket(id, packet) {
		g.forget(id) // malformed options
		g.releaseTCP()
		g.running.Done()
		return false
	}
	return true
}

// tooMany counts flows that a guest wanted beyond its limit.
const tooMany egress.Reason = "more flows than a VM may have"

// reserveTCP takes a flow's place, and tells its class; releaseTCP gives it back.
func (g *Gateway) reserveTCP() (slot int, ok bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for slot, class := range classes {
		if g.tcp.live < class.upTo {
			g.tcp.live++
			return slot, true
		}
	}
	return 0, false
}

func (g *Gateway) releaseTCP() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.tcp.live--
}

func (g *Gateway) forget(id stack.TransportEndpointID) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.tcp.pending, id)
}

// complete ends a request, with a reset or without. The forwarder ends it first: it
// drops the SYN of a connection that it has, and a place taken for that one would
// never be given back.
func (g *Gateway) complete(request *tcp.ForwarderRequest, reset bool) {
	id := request.ID()
	request.Complete(reset)
	g.forget(id)
}

// open runs one flow: first the host's side, then, if that stands, the guest's.
func (g *Gateway) open(request *tcp.ForwarderRequest) {
	defer g.running.Done()
	defer g.releaseTCP()
	id := request.ID()
	g.mu.Lock()
	o := g.tcp.pending[id]
	g.mu.Unlock()

	if o.to.dns {
		if ep, queue := g.accept(request, o); ep != nil {
			g.serveDNS(gonet.NewTCPConn(queue, ep))
			g.finish(ep, queue)
		}
		return
	}
	conn, err := g.dial(egress.TCP, o.to)
	if err != nil {
		g.complete(request, g.refuse(o, err))
		return
	}
	ep, queue := g.accept(request, o)
	if ep == nil {
		_ = conn.Close()
		return
	}
	g.counters.tcpFlows.Add(1)
	g.relay(ep, queue, conn)
}

// refuse tells the guest why there is no connection; true means by a reset.
func (g *Gateway) refuse(o *opening, err error) (reset bool) {
	switch {
	case g.ctx.Err() != nil:
		return false
	case errors.Is(err, errOwnAddress):
		g.denials.addr("tcp", o.to.dst, egress.HostAddress)
		g.sendUnreachable(prohibited(), o.quote)
		return false
	case errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.ECONNRESET):
		return true
	}
	g.lackOf(err)
	g.sendUnreachable(whyUnreachable(err), o.quote)
	return false
}

// lackOf logs, once in a while, that the host has no more of something.
func (g *Gateway) lackOf(err error) {
	if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOBUFS) || errors.Is(err, unix.ENOMEM) {
		if g.denials.first(denied{reason: "the host has no more sockets"}) {
			g.opts.Log.Warn("the host has no socket for the guest's flow", "err", err)
		}
	}
}

// accept answers the guest's SYN and waits until its handshake is over; nil means
// that the guest went away.
func (g *Gateway) accept(request *tcp.ForwarderRequest, o *opening) (tcpip.Endpoint, *waiter.Queue) {
	id := request.ID()
	queue := &waiter.Queue{}
	timeout := time.AfterFunc(handshakeTimeout, func() { g.abortHandshake(id) })
	ep, err := request.CreateEndpoint(queue)
	timeout.Stop()
	g.complete(request, err != nil)
	if err != nil {
		return nil, nil
	}
	ep.SocketOptions().SetSendBufferSize(int64(o.buffer), true)
	return ep, queue
}

// abortHandshake ends a handshake that the guest does not go on with. The stack
// alone would repeat its answer for two minutes.
func (g *Gateway) abortHandshake(id stack.TransportEndpointID) {
	network := header.IPv6ProtocolNumber
	if id.LocalAddress.Len() == header.IPv4AddressSize {
		network = header.IPv4ProtocolNumber
	}
	ep, ok := g.stack.FindTransportEndpoint(network, tcp.ProtocolNumber, id, nicID).(*tcp.Endpoint)
	if ok && tcp.EndpointState(ep.State()) == tcp.StateSynRecv {
		ep.Abort()
	}
}

// connect opens a connection to a port of the guest.
func (g *Gateway) connect(ctx context.Context, port uint16, buffer int) (tcpip.Endpoint, *waiter.Queue, error) {
	queue := &waiter.Queue{}
	ep, err := g.stack.NewEndpoint(tcp.ProtocolNumber, header.IPv4ProtocolNumber, queue)
	if err != nil {
		return nil, nil, errors.New(err.String())
	}
	ep.SocketOptions().SetSendBufferSize(int64(buffer), true)
	ep.SocketOptions().SetReceiveBufferSize(int64(buffer), true)
	// Not before: to have room is an event, too, and would look like a connection.
	entry, writable := waiter.NewChannelEntry(waiter.WritableEvents | waiter.EventErr | waiter.EventHUp)
	queue.EventRegister(&entry)
	defer queue.EventUnregister(&entry)
	if err = ep.Bind(tcpip.FullAddress{NIC: nicID, Addr: tcpipAddr(g.opts.Gateway4)}); err == nil {
		err = ep.Connect(tcpip.FullAddress{NIC: nicID, Addr: tcpipAddr(g.opts.Guest4.Addr()), Port: port})
	}
	if _, started := err.(*tcpip.ErrConnectStarted); started {
		select {
		case <-writable:
			err = ep.LastError()
		case <-ctx.Done():
			err = &tcpip.ErrAborted{}
		}
	}
	if err != nil {
		ep.Abort()
		return nil, nil, errors.New(err.String())
	}
	return ep, queue, nil
}

// abort closes a connection of the host with a reset.
func abort(conn net.Conn) {
	if lingering, ok := conn.(interface{ SetLinger(int) error }); ok {
		_ = lingering.SetLinger(0)
	}
	_ = conn.Close()
}
