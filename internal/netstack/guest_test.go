package netstack_test

import (
	"context"
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/channel"
	"gvisor.dev/gvisor/pkg/tcpip/link/ethernet"
	"gvisor.dev/gvisor/pkg/tcpip/network/arp"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/netstack"
)

// guest is a machine on the other end of a link: a stack of its own, which finds
// the gateway by ARP and neighbour discovery.
type guest struct {
	*wire
	stack *stack.Stack
}

func boot(t testing.TB, w *world, change func(*netstack.Options)) *guest {
	t.Helper()
	mtu, framing := 0, netstack.Stream
	wire := start(t, w, func(o *netstack.Options) {
		if change != nil {
			change(o)
		}
		mtu, framing = o.MTU, o.Framing
	})
	g := &guest{wire: wire}
	g.stack = stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{arp.NewProtocol, ipv4.NewProtocol, ipv6.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol, icmp.NewProtocol4, icmp.NewProtocol6},
	})
	sack := tcpip.TCPSACKEnabled(true)
	g.stack.SetTransportProtocolOption(tcp.ProtocolNumber, &sack)
	ch := channel.New(1024, uint32(mtu)+header.EthernetMinimumSize, tcpip.LinkAddress(guestMAC))
	must := func(err tcpip.Error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(g.stack.CreateNIC(1, ethernet.New(ch)))
	for _, prefix := range []netip.Prefix{guest4, guest6} {
		proto := ipv4.ProtocolNumber
		if prefix.Addr().Is6() {
			proto = ipv6.ProtocolNumber
		}
		must(g.stack.AddProtocolAddress(1, tcpip.ProtocolAddress{Protocol: proto, AddressWithPrefix: tcpip.AddressWithPrefix{
			Address: tcpipAddr(prefix.Addr()), PrefixLen: prefix.Bits(),
		}}, stack.AddressProperties{}))
	}
	g.stack.SetRouteTable([]tcpip.Route{
		{Destination: header.IPv4EmptySubnet, Gateway: tcpipAddr(gateway4), NIC: 1},
		{Destination: header.IPv6EmptySubnet, Gateway: tcpipAddr(gateway6), NIC: 1},
	})
	ctx, cancel := context.WithCancel(context.Background())
	var pumps sync.WaitGroup
	pumps.Go(func() { sendFrames(ctx, ch, wire.conn, framing) })
	pumps.Go(func() {
		_ = readFrames(wire.conn, framing, func(frame []byte) {
			packet := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(frame)})
			ch.InjectInbound(0, packet)
			packet.DecRef()
		})
	})
	t.Cleanup(func() {
		cancel()
		_ = wire.conn.Close()
		pumps.Wait()
		g.stack.Destroy()
	})
	return g
}

func sendFrames(ctx context.Context, ch *channel.Endpoint, conn net.Conn, framing netstack.Framing) {
	var buf []byte
	for {
		packet := ch.ReadContext(ctx)
		if packet == nil {
			return
		}
		buf = buf[:0]
		if framing == netstack.Stream {
			buf = binary.BigEndian.AppendUint32(buf, uint32(packet.Size()))
		}
		for _, part := range packet.AsSlices() {
			buf = append(buf, part...)
		}
		packet.DecRef()
		if _, err := conn.Write(buf); err != nil {
			return
		}
	}
}

func readFrames(conn net.Conn, framing netstack.Framing, deliver func([]byte)) error {
	buf := make([]byte, 1<<17)
	have := 0
	for {
		n, err := conn.Read(buf[have:])
		if err != nil {
			return err
		}
		if framing == netstack.Datagram {
			deliver(buf[:n])
			continue
		}
		have += n
		at := 0
		for have-at >= 4 {
			end := at + 4 + int(binary.BigEndian.Uint32(buf[at:]))
			if end > have {
				break
			}
			deliver(buf[at+4 : end])
			at = end
		}
		have = copy(buf, buf[at:have])
	}
}

func full(dst netip.AddrPort) (tcpip.FullAddress, tcpip.NetworkProtocolNumber) {
	proto := ipv4.ProtocolNumber
	if dst.Addr().Is6() {
		proto = ipv6.ProtocolNumber
	}
	return tcpip.FullAddress{NIC: 1, Addr: tcpipAddr(dst.Addr()), Port: dst.Port()}, proto
}

// tcp connects to dst.
func (g *guest) tcp(t testing.TB, dst string) (*gonet.TCPConn, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	addr, proto := full(netip.MustParseAddrPort(dst))
	return gonet.DialContextTCP(ctx, g.stack, addr, proto)
}

func (g *guest) mustTCP(t testing.TB, dst string) *gonet.TCPConn {
	t.Helper()
	conn, err := g.tcp(t, dst)
	if err != nil {
		t.Fatalf("connect to %s: %v\n%s", dst, err, g.logs)
	}
	return conn
}

// reaches fails the test unless dst can be connected to.
func (g *guest) reaches(t testing.TB, dst string) {
	t.Helper()
	_ = g.mustTCP(t, dst).Close()
}

func (g *guest) udp(t testing.TB, dst string) *gonet.UDPConn {
	t.Helper()
	addr, proto := full(netip.MustParseAddrPort(dst))
	conn, err := gonet.DialUDP(g.stack, nil, &addr, proto)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// echo is a server that returns what it gets, and ends when the client does.
func echo(conn *net.TCPConn) {
	_, _ = io.Copy(conn, conn)
	_ = conn.CloseWrite()
}
