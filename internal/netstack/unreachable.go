package netstack

import (
	"errors"
	"net"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

// unreachable is why a packet did not arrive, as ICMP says it.
type unreachable struct{ code4, code6 byte }

// The codes of destination unreachable (RFC 792 and 1812; RFC 4443).
func networkUnreachable() unreachable { return unreachable{0, 0} }
func hostUnreachable() unreachable    { return unreachable{1, 3} }
func portUnreachable() unreachable    { return unreachable{3, 4} }
func prohibited() unreachable         { return unreachable{13, 1} }

// whyUnreachable translates an error of a socket of the host. Time-outs and what
// the host itself lacks mean that the destination is not reached from here.
func whyUnreachable(err error) unreachable {
	var timeout net.Error
	switch {
	case errors.Is(err, unix.ECONNREFUSED):
		return portUnreachable()
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return prohibited()
	case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EADDRNOTAVAIL), errors.Is(err, unix.EAFNOSUPPORT), errors.Is(err, unix.ENETDOWN):
		return networkUnreachable()
	case errors.As(err, &timeout) && timeout.Timeout():
		return hostUnreachable()
	}
	return hostUnreachable()
}

// quote is what an ICMP error repeats of the packet that it is about: the IP
// header and the first 8 bytes behind it, by which the guest finds the socket.
type quote []byte

func quoteOf(packet *stack.PacketBuffer) quote {
	network, transport := packet.NetworkHeader().Slice(), packet.TransportHeader().Slice()
	// Without fragment and extension headers: a quote is of one plain packet.
	base := header.IPv4MinimumSize
	if packet.NetworkProtocolNumber == header.IPv6ProtocolNumber {
		base = header.IPv6MinimumSize
	}
	q := append(quote{}, network[:base]...)
	if base == header.IPv6MinimumSize {
		q[6] = byte(packet.TransportProtocolNumber)
	}
	return append(q, transport[:min(8, len(transport))]...)
}

// sendUnreachable sends the guest an ICMP error, as the router that knows.
func (g *Gateway) sendUnreachable(why unreachable, q quote) {
	if header.IPVersion(q) == header.IPv4Version {
		g.link.send(outgoing{raw: g.icmp4(why.code4, q)})
	} else {
		g.link.send(outgoing{raw: g.icmp6(why.code6, q)})
	}
}

// ethernet begins a frame to the guest with room for size bytes behind it.
func (g *Gateway) ethernet(proto tcpip.NetworkProtocolNumber, size int) (frame, rest []byte) {
	frame = make([]byte, header.EthernetMinimumSize+size)
	header.Ethernet(frame).Encode(&header.EthernetFields{SrcAddr: g.link.local, DstAddr: g.link.guest, Type: proto})
	return frame, frame[header.EthernetMinimumSize:]
}

func (g *Gateway) icmp4(code byte, q quote) []byte {
	const headers = header.IPv4MinimumSize + header.ICMPv4MinimumSize
	frame, packet := g.ethernet(header.IPv4ProtocolNumber, headers+len(q))
	ip := header.IPv4(packet)
	ip.Encode(&header.IPv4Fields{
		TotalLength: uint16(len(packet)), TTL: 64, Protocol: uint8(header.ICMPv4ProtocolNumber),
		SrcAddr: tcpipAddr(g.opts.Gateway4), DstAddr: header.IPv4(q).SourceAddress(),
	})
	ip.SetChecksum(^ip.CalculateChecksum())
	icmp := header.ICMPv4(packet[header.IPv4MinimumSize:])
	copy(icmp[header.ICMPv4MinimumSize:], q)
	icmp.SetType(header.ICMPv4DstUnreachable)
	icmp.SetCode(header.ICMPv4Code(code))
	icmp.SetChecksum(^checksum.Checksum(icmp, 0))
	return frame
}

func (g *Gateway) icmp6(code byte, q quote) []byte {
	const headers = header.IPv6MinimumSize + header.ICMPv6DstUnreachableMinimumSize
	frame, packet := g.ethernet(header.IPv6ProtocolNumber, headers+len(q))
	src, dst := tcpipAddr(g.opts.Gateway6), header.IPv6(q).SourceAddress()
	header.IPv6(packet).Encode(&header.IPv6Fields{
		PayloadLength:     uint16(len(packet) - header.IPv6MinimumSize),
		TransportProtocol: header.ICMPv6ProtocolNumber,
		HopLimit:          64,
		SrcAddr:           src, DstAddr: dst,
	})
	icmp := header.ICMPv6(packet[header.IPv6MinimumSize:])
	copy(icmp[header.ICMPv6DstUnreachableMinimumSize:], q)
	icmp.SetType(header.ICMPv6DstUnreachable)
	icmp.SetCode(header.ICMPv6Code(code))
	icmp.SetChecksum(header.ICMPv6Checksum(header.ICMPv6ChecksumParams{Header: icmp, Src: src, Dst: dst}))
	return frame
}

// refuseFrame answers a frame that inspect denied.
func (g *Gateway) refuseFrame(frame []byte) {
	packet := frame[header.EthernetMinimumSize:]
	base := header.IPv6MinimumSize
	if header.IPVersion(packet) == header.IPv4Version {
		base = header.IPv4MinimumSize
	}
	g.sendUnreachable(prohibited(), packet[:min(len(packet), base+8)])
}
