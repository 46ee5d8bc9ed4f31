package netstack

import (
	"bytes"
	"net/netip"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/egress"
)

// Reasons of the gateway's own to drop a frame.
const (
	spoofed      egress.Reason = "a source address that is not the guest's"
	withOptions  egress.Reason = "IP options, as for source routing"
	otherTraffic egress.Reason = "a protocol that does not leave the VM"
	ownNetwork   egress.Reason = "an address of the VM's own network"
	closedPort   egress.Reason = "a port of the gateway that is not open"
	tinySegments egress.Reason = "TCP segments smaller than any host has"
)

// minMSS is the least maximum segment size that a guest may ask for, the one that
// hosts have without asking (RFC 9293, 3.7.1). Each segment that is on its way
// costs the gateway some 700 bytes besides its data.
const minMSS = header.TCPDefaultMSS

// verdict is what becomes of a frame. The zero value is to drop it: it is
// malformed, or of a kind that guests send without harm or hope.
type verdict struct {
	// deliver it to the stack.
	deliver bool
	// reason is set when it is denied, with where it wanted to go.
	reason egress.Reason
	proto  tcpip.TransportProtocolNumber
	dst    netip.Addr
	// answer the denial with an ICMP error.
	answer bool
}

func deny(reason egress.Reason, proto tcpip.TransportProtocolNumber, dst netip.Addr) verdict {
	return verdict{reason: reason, proto: proto, dst: dst}
}

// refuse is deny with an answer.
func refuse(reason egress.Reason, proto tcpip.TransportProtocolNumber, dst netip.Addr) verdict {
	return verdict{reason: reason, proto: proto, dst: dst, answer: true}
}

// inspect judges a frame of the guest by itself. What it lets through is from the
// guest's own addresses and is ARP or neighbour discovery for the gateway, ICMP
// to the gateway, or TCP or UDP, perhaps in fragments, whose destinations are
// judged where flows are opened.
func (o *Options) inspect(frame []byte) verdict {
	if len(frame) < header.EthernetMinimumSize {
		return verdict{}
	}
	eth := header.Ethernet(frame)
	if string(eth.SourceAddress()) != string(o.GuestMAC) {
		return deny(spoofed, 0, netip.Addr{})
	}
	dst := eth.DestinationAddress()
	if string(dst) != string(o.GatewayMAC) && !header.IsMulticastEthernetAddress(dst) && dst != header.EthernetBroadcastAddress {
		return verdict{}
	}
	packet := frame[header.EthernetMinimumSize:]
	switch eth.Type() {
	case header.ARPProtocolNumber:
		return o.inspectARP(packet)
	case header.IPv4ProtocolNumber:
		return o.inspect4(packet)
	case header.IPv6ProtocolNumber:
		return o.inspect6(packet)
	}
	return verdict{}
}

func (o *Options) inspectARP(packet []byte) verdict {
	arp := header.ARP(packet)
	if len(packet) < header.ARPSize || !arp.IsValid() {
		return verdict{}
	}
	sender, _ := netip.AddrFromSlice(arp.ProtocolAddressSender())
	if !bytes.Equal(arp.HardwareAddressSender(), o.GuestMAC) || sender != o.Guest4.Addr() && !sender.IsUnspecified() {
		return deny(spoofed, 0, sender)
	}
	target, _ := netip.AddrFromSlice(arp.ProtocolAddressTarget())
	return verdict{deliver: arp.Op() == header.ARPRequest && target == o.Gateway4}
}

func (o *Options) inspect4(packet []byte) verdict {
	ip := header.IPv4(packet)
	if len(packet) < header.IPv4MinimumSize || !ip.IsValid(len(packet)) {
		return verdict{}
	}
	src, dst := addrOf(ip.SourceAddress()), addrOf(ip.DestinationAddress())
	proto := ip.TransportProtocol()
	switch {
	case src != o.Guest4.Addr():
		return deny(spoofed, proto, dst)
	case int(ip.HeaderLength()) > header.IPv4MinimumSize:
		if dst.IsMulticast() {
			return verdict{} // IGMP: the guest's kernel joins groups
		}
		return deny(withOptions, proto, dst)
	case dst.IsMulticast():
		return deny(egress.Multicast, proto, dst)
	case dst == src:
		return verdict{}
	case dst.IsLoopback():
		return refuse(egress.HostLoopback, proto, dst)
	}
	switch proto {
	case header.TCPProtocolNumber:
		return inspectTCP(ip.Payload(), int(ip.FragmentOffset()), ip.More(), dst)
	case header.UDPProtocolNumber:
		return verdict{deliver: true}
	case header.ICMPv4ProtocolNumber:
		if ip.FragmentOffset() > 0 {
			return verdict{deliver: dst == o.Gateway4}
		}
		icmp := header.ICMPv4(ip.Payload())
		if len(icmp) < header.ICMPv4MinimumSize || icmp.Type() != header.ICMPv4Echo {
			return verdict{} // answers, and errors, which are never answered
		}
		if dst == o.Gateway4 {
			return verdict{deliver: true}
		}
	}
	if ip.FragmentOffset() > 0 {
		return deny(otherTraffic, proto, dst)
	}
	return refuse(otherTraffic, proto, dst)
}

func (o *Options) inspect6(packet []byte) verdict {
	ip := header.IPv6(packet)
	if !o.Guest6.IsValid() || len(packet) < header.IPv6MinimumSize || !ip.IsValid(len(packet)) {
		return verdict{}
	}
	src, dst := addrOf(ip.SourceAddress()), addrOf(ip.DestinationAddress())
	proto := ip.TransportProtocol()
	payload := ip.Payload()
	if src != o.Guest6.Addr() {
		if src.IsUnspecified() || src.IsLinkLocalUnicast() {
			return verdict{deliver: proto == header.ICMPv6ProtocolNumber && o.discovery(payload)}
		}
		return deny(spoofed, proto, dst)
	}
	fragment, offset, more := false, 0, false
	if proto == tcpip.TransportProtocolNumber(header.IPv6FragmentHeader) {
		if len(payload) < header.IPv6FragmentHeaderSize {
			return verdict{}
		}
		h := header.IPv6Fragment(payload)
		proto, fragment, offset, more = h.TransportProtocol(), true, 8*int(h.FragmentOffset()), h.More()
		payload = payload[header.IPv6FragmentHeaderSize:]
	}
	switch {
	case proto == header.ICMPv6ProtocolNumber && !fragment && o.discovery(payload):
		return verdict{deliver: true}
	case dst == src:
		return verdict{}
	case dst.IsMulticast():
		if proto == 0 || proto == header.ICMPv6ProtocolNumber {
			return verdict{} // multicast listener reports, router solicitations
		}
		return deny(egress.Multicast, proto, dst)
	case dst.IsLoopback():
		return refuse(egress.HostLoopback, proto, dst)
	}
	switch proto {
	case header.TCPProtocolNumber:
		return inspectTCP(payload, offset, more, dst)
	case header.UDPProtocolNumber:
		return verdict{deliver: true}
	case header.ICMPv6ProtocolNumber:
		if offset > 0 {
			return verdict{deliver: dst == o.Gateway6}
		}
		icmp := header.ICMPv6(payload)
		if len(icmp) < header.ICMPv6MinimumSize || icmp.Type() != header.ICMPv6EchoRequest {
			return verdict{}
		}
		if dst == o.Gateway6 {
			return verdict{deliver: true}
		}
	case 0, 43, 60: // hop-by-hop and destination options, routing (RFC 8200)
		return deny(withOptions, proto, dst)
	}
	if fragment {
		return deny(otherTraffic, proto, dst)
	}
	return refuse(otherTraffic, proto, dst)
}

// inspectTCP judges the TCP of a packet, or of a fragment of one: where it begins
// there, and whether more follow. What is said in a SYN has to be seen in one piece
// (RFC 3128).
func inspectTCP(payload []byte, offset int, more bool, dst netip.Addr) verdict {
	if offset > 0 {
		return verdict{deliver: offset >= header.TCPMinimumSize}
	}
	segment := header.TCP(payload)
	if len(segment) < header.TCPMinimumSize {
		return verdict{}
	}
	if !segment.Flags().Contains(header.TCPFlagSyn) {
		return verdict{deliver: true}
	}
	end := int(segment.DataOffset())
	switch {
	case more, end < header.TCPMinimumSize, end > len(segment):
		return verdict{}
	case header.ParseSynOptions(segment.Options(), false).MSS < minMSS:
		return refuse(tinySegments, header.TCPProtocolNumber, dst)
	}
	return verdict{deliver: true}
}

// discovery tells whether an ICMPv6 message is neighbour discovery that the
// gateway has an answer to or can learn from: never a router's.
func (o *Options) discovery(payload []byte) bool {
	icmp := header.ICMPv6(payload)
	if len(icmp) < header.ICMPv6NeighborSolicitMinimumSize {
		return false
	}
	switch icmp.Type() {
	case header.ICMPv6NeighborSolicit:
		return addrOf(header.NDPNeighborSolicit(icmp.MessageBody()).TargetAddress()) == o.Gateway6
	case header.ICMPv6NeighborAdvert:
		return true
	}
	return false
}

func addrOf(a tcpip.Address) netip.Addr {
	addr, _ := netip.AddrFromSlice(a.AsSlice())
	return addr
}

func tcpipAddr(addr netip.Addr) tcpip.Address { return tcpip.AddrFromSlice(addr.AsSlice()) }
