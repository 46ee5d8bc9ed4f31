// Package netstack is the network of one VM: a gateway in user space that ends
// the guest's flows and opens them again as sockets of the host, as far as the
// egress policy allows. Nothing of the guest's packets reaches the host's network
// but the payload of TCP and UDP, and DNS questions asked in its stead.
//
// The link carries Ethernet frames (QEMU's stream netdev, libkrun's unixstream
// and unixgram); gVisor's stack answers ARP and neighbour discovery, puts IP
// fragments together and speaks TCP with the guest. What a frame may be is
// decided before the stack sees it (inspect), where a flow may lead when it is
// opened (decide), and a socket that turns out to end at the host is closed
// before it carries anything (dial).
package netstack

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/network/arp"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/cleanup"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/egress"
)

// nicID names the one interface of the stack.
const nicID tcpip.NICID = 1

// timeWait bounds how long the stack remembers a connection that the gateway ended
// first; finish ends it sooner.
const timeWait = time.Second

// synRetries bounds how often the gateway repeats a SYN of its own, to a published
// port of a guest that says nothing: 7 seconds.
const synRetries = 2

// Gateway is the running network of one VM. It is safe for concurrent use.
type Gateway struct {
	opts      Options
	hostPorts map[uint16]bool
	link      *link
	stack     *stack.Stack
	checker   *egress.Checker
	host      *hostAddrs
	denials   *denials
	dns       *dnsServer
	counters  counters
	chunks    chunks

	ctx     context.Context //nolint:containedctx // it is the gateway's lifetime, not a call's
	end     context.CancelFunc
	running sync.WaitGroup // all goroutines but the stack's
	once    sync.Once
	err     error // of the first Close

	mu        sync.Mutex
	tcp       tcpFlows
	udp       map[stack.TransportEndpointID]*udpFlow
	published map[netip.AddrPort]*published
}

// Start runs the gateway until Close, or until the link ends. On error the link
// is closed.
func Start(opts Options) (_ *Gateway, err error) {
	var undo cleanup.Stack
	defer func() { err = undo.RunOnError(err) }()
	var closeLink func() error
	if opts.Link != nil {
		closeLink = opts.Link.Close
		undo.Add(func() error { return closeLink() })
	}
	if err := opts.validate(); err != nil {
		return nil, fmt.Errorf("network: %w", err)
	}
	if opts.Dial == nil {
		opts.Dial = (&net.Dialer{Control: forbidBroadcast}).DialContext
	}
	opts.Log = opts.Log.With("vm", opts.ID)
	checker, err := egress.New(opts.Policy)
	if err != nil {
		return nil, fmt.Errorf("network policy: %w", err)
	}
	host, err := newHostAddrs(opts.HostAddrs, checker, opts.Log)
	if err != nil {
		return nil, err
	}
	g := &Gateway{
		opts:      opts,
		hostPorts: map[uint16]bool{},
		link:      newLink(opts),
		checker:   checker,
		host:      host,
		denials:   newDenials(opts.Log),
		counters:  counters{start: time.Now()},
		udp:       map[stack.TransportEndpointID]*udpFlow{},
		published: map[netip.AddrPort]*published{},
	}
	closeLink = g.link.close // which has taken it over
	for _, port := range opts.Policy.HostPorts {
		g.hostPorts[port] = true
	}
	g.ctx, g.end = context.WithCancel(context.Background())
	undo.Add(func() error { g.end(); return nil })
	g.dns = newDNSServer(g)
	if g.stack, err = g.newStack(); err != nil {
		return nil, err
	}
	g.running.Go(func() { g.linkEnded(g.link.write()) })
	g.running.Go(func() { g.linkEnded(g.link.read(g.receive)) })
	return g, nil
}

// newStack makes gVisor's stack, with the gateway's addresses, to take packets to
// any other address as well.
func (g *Gateway) newStack() (*stack.Stack, error) {
	s := stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{arp.NewProtocol, ipv4.NewProtocol, ipv6.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol, icmp.NewProtocol4, icmp.NewProtocol6},
	})
	largest := classes[0].buffer
	sack, retries, wait := tcpip.TCPSACKEnabled(true), tcpip.TCPSynRetriesOption(synRetries), tcpip.TCPTimeWaitTimeoutOption(timeWait)
	moderate := tcpip.TCPModerateReceiveBufferOption(false)
	// Its timers are for losses on the way, and cost a wake-up for each segment.
	recovery := tcpip.TCPRecovery(0)
	for _, option := range []tcpip.SettableTransportProtocolOption{
		&sack, &retries, &wait, &moderate, &recovery,
		&tcpip.TCPSendBufferSizeRangeOption{Min: 4 << 10, Default: 32 << 10, Max: largest},
		&tcpip.TCPReceiveBufferSizeRangeOption{Min: 4 << 10, Default: 32 << 10, Max: largest},
	} {
		if err := s.SetTransportProtocolOption(tcp.ProtocolNumber, option); err != nil {
			s.Destroy()
			return nil, fmt.Errorf("set a TCP option of the stack: %s", err)
		}
	}
	g.newTCP(s)
	s.SetTransportProtocolHandler(udp.ProtocolNumber, g.handleUDP)
	if err := g.newNIC(s); err != nil {
		s.Destroy()
		return nil, fmt.Errorf("set up the stack's interface: %s", err)
	}
	return s, nil
}

func (g *Gateway) newNIC(s *stack.Stack) tcpip.Error {
	if err := s.CreateNIC(nicID, g.link); err != nil {
		return err
	}
	// To answer for any destination, as from any destination.
	if err := s.SetPromiscuousMode(nicID, true); err != nil {
		return err
	}
	if err := s.SetSpoofing(nicID, true); err != nil {
		return err
	}
	addresses := []tcpip.ProtocolAddress{{
		Protocol:          header.IPv4ProtocolNumber,
		AddressWithPrefix: tcpip.AddressWithPrefix{Address: tcpipAddr(g.opts.Gateway4), PrefixLen: g.opts.Guest4.Bits()},
	}}
	if g.opts.Gateway6.IsValid() {
		addresses = append(addresses, tcpip.ProtocolAddress{
			Protocol:          header.IPv6ProtocolNumber,
			AddressWithPrefix: tcpip.AddressWithPrefix{Address: tcpipAddr(g.opts.Gateway6), PrefixLen: g.opts.Guest6.Bits()},
		})
	}
	for _, address := range addresses {
		if err := s.AddProtocolAddress(nicID, address, stack.AddressProperties{}); err != nil {
			return err
		}
	}
	s.SetRouteTable([]tcpip.Route{
		{Destination: header.IPv4EmptySubnet, NIC: nicID},
		{Destination: header.IPv6EmptySubnet, NIC: nicID},
	})
	return nil
}

// receive takes one frame of the guest.
func (g *Gateway) receive(frame []byte) {
	v := g.opts.inspect(frame)
	switch {
	case v.deliver:
		g.link.inject(frame)
	case v.reason != "":
		g.denials.addr(protocolName(v.proto), netip.AddrPortFrom(v.dst, 0), v.reason)
		if v.answer {
			g.refuseFrame(frame)
		}
	}
}

func protocolName(proto tcpip.TransportProtocolNumber) string {
	switch proto {
	case header.TCPProtocolNumber:
		return "tcp"
	case header.UDPProtocolNumber:
		return "udp"
	case header.ICMPv4ProtocolNumber, header.ICMPv6ProtocolNumber:
		return "icmp"
	}
	return fmt.Sprintf("ip protocol %d", proto)
}

// linkEnded begins the end of everything when one direction of the link is over.
func (g *Gateway) linkEnded(err error) {
	if g.ctx.Err() != nil {
		return
	}
	if !ended(err) {
		g.opts.Log.Warn("the link to the guest's network broke", "err", err)
	}
	g.endAll()
	_ = g.link.close()
}

// endAll ends every flow and published port. From here on nothing but what runs
// already starts anything.
func (g *Gateway) endAll() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.end()
}

// pause waits a moment, for what may be over then; false means that ctx ended.
func pause(ctx context.Context) bool {
	timer := time.NewTimer(100 * time.Millisecond)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// onEnd calls f when the gateway ends, unless the function that it returns is
// called before.
func (g *Gateway) onEnd(f func()) (stop func() bool) { return context.AfterFunc(g.ctx, f) }

// Close ends all flows and published ports, closes the link, and returns when
// nothing of the gateway runs any more. Further calls do nothing but wait.
func (g *Gateway) Close() error {
	g.once.Do(func() {
		g.endAll()
		if err := g.link.close(); err != nil && !errors.Is(err, net.ErrClosed) {
			g.err = fmt.Errorf("close the link to the guest's network: %w", err)
		}
		g.abortFlows()
		g.stack.Destroy()
	})
	return g.err
}

// abortFlows ends what the gateway's goroutines wait for in the stack, until there
// are none: a handshake may begin while others are being ended.
func (g *Gateway) abortFlows() {
	done := make(chan struct{})
	go func() {
		g.running.Wait()
		close(done)
	}()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		for _, ep := range g.stack.RegisteredEndpoints() {
			ep.Abort()
		}
		select {
		case <-done:
			return
		case <-tick.C:
		}
	}
}

// Done is closed when the link has ended or Close was called.
func (g *Gateway) Done() <-chan struct{} { return g.ctx.Done() }

// Stats are totals since Start, of payload alone: TCP data, UDP data, DNS. What
// acknowledges, keeps alive or looks for neighbours does not count.
type Stats struct {
	// BytesIn came into the guest, BytesOut left it. They do not count DNS.
	BytesIn, BytesOut uint64
	// TCPFlows and UDPFlows were opened, DNSQueries asked.
	TCPFlows, UDPFlows, DNSQueries uint64
	// Denied counts what the policy denied: flows, names, packets that lie about
	// their source.
	Denied uint64
	// Live is how many flows are open.
	Live int
	// Idle is the time since the last payload either way, or since Start, by the
	// monotonic clock.
	Idle time.Duration
}

// Stats returns the totals so far.
func (g *Gateway) Stats() Stats {
	g.mu.Lock()
	live := g.tcp.live + len(g.udp)
	g.mu.Unlock()
	return Stats{
		BytesIn:    g.counters.bytesIn.Load(),
		BytesOut:   g.counters.bytesOut.Load(),
		TCPFlows:   g.counters.tcpFlows.Load(),
		UDPFlows:   g.counters.udpFlows.Load(),
		DNSQueries: g.counters.dnsQueries.Load(),
		Denied:     g.denials.total.Load(),
		Live:       live,
		Idle:       g.counters.since() - time.Duration(g.counters.last.Load()),
	}
}
