package netstack_test

import (
	"encoding/binary"
	"net/netip"
	"sync"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/netstack"
)

// raw is a hostile guest: it writes frames byte by byte.
type raw struct {
	*wire
	t      testing.TB
	frames chan []byte
	id     uint16
}

func startRaw(t testing.TB, w *world, change func(*netstack.Options)) *raw {
	t.Helper()
	r := &raw{wire: start(t, w, change), t: t, frames: make(chan []byte, 1<<16)}
	var reading sync.WaitGroup
	reading.Go(func() {
		defer close(r.frames)
		_ = readFrames(r.conn, netstack.Stream, func(frame []byte) {
			select {
			case r.frames <- append([]byte(nil), frame...):
			default:
			}
		})
	})
	t.Cleanup(func() {
		_ = r.conn.Close()
		reading.Wait()
	})
	return r
}

func (r *raw) send(frame []byte) {
	r.t.Helper()
	if _, err := r.conn.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(frame))), frame...)); err != nil {
		r.t.Fatal(err)
	}
}

// expect waits for a frame that f wants, and drops those before it.
func (r *raw) expect(what string, f func(frame []byte) bool) []byte {
	r.t.Helper()
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	for {
		select {
		case frame, ok := <-r.frames:
			if !ok {
				r.t.Fatalf("%s: the link ended", what)
			}
			if f(frame) {
				return frame
			}
		case <-deadline.C:
			r.t.Fatalf("%s: not within %v", what, patience)
		}
	}
}

// barrier returns when the gateway has read all that was sent before, and tells
// what it sent meanwhile.
func (r *raw) barrier() (before [][]byte) {
	r.t.Helper()
	r.id++
	id := r.id
	r.send(echo4(guest4.Addr(), gateway4, id, nil))
	r.expect("an echo of the gateway", func(frame []byte) bool {
		if icmp := icmp4Of(frame); icmp != nil && icmp.Type() == header.ICMPv4EchoReply && icmp.Ident() == id {
			return true
		}
		before = append(before, frame)
		return false
	})
	return before
}

func icmp4Of(frame []byte) header.ICMPv4 {
	ip := header.IPv4(frame[header.EthernetMinimumSize:])
	if header.Ethernet(frame).Type() != header.IPv4ProtocolNumber || !ip.IsValid(len(ip)) || ip.TransportProtocol() != header.ICMPv4ProtocolNumber {
		return nil
	}
	return header.ICMPv4(ip.Payload())
}

func icmp6Of(frame []byte) header.ICMPv6 {
	ip := header.IPv6(frame[header.EthernetMinimumSize:])
	if header.Ethernet(frame).Type() != header.IPv6ProtocolNumber || !ip.IsValid(len(ip)) || ip.TransportProtocol() != header.ICMPv6ProtocolNumber {
		return nil
	}
	return header.ICMPv6(ip.Payload())
}

func tcpOf(frame []byte) header.TCP {
	packet := frame[header.EthernetMinimumSize:]
	switch header.Ethernet(frame).Type() {
	case header.IPv4ProtocolNumber:
		if ip := header.IPv4(packet); ip.IsValid(len(ip)) && ip.TransportProtocol() == header.TCPProtocolNumber {
			return header.TCP(ip.Payload())
		}
	case header.IPv6ProtocolNumber:
		if ip := header.IPv6(packet); ip.IsValid(len(ip)) && ip.TransportProtocol() == header.TCPProtocolNumber {
			return header.TCP(ip.Payload())
		}
	}
	return nil
}

func ether(proto tcpip.NetworkProtocolNumber, packet []byte) []byte {
	frame := make([]byte, header.EthernetMinimumSize, header.EthernetMinimumSize+len(packet))
	header.Ethernet(frame).Encode(&header.EthernetFields{
		SrcAddr: tcpip.LinkAddress(guestMAC), DstAddr: tcpip.LinkAddress(gatewayMAC), Type: proto,
	})
	return append(frame, packet...)
}

// ip makes a frame with one IP packet.
func ip(src, dst netip.Addr, proto tcpip.TransportProtocolNumber, payload []byte) []byte {
	if dst.Is4() {
		return ip4(src, dst, proto, payload, nil)
	}
	packet := make([]byte, header.IPv6MinimumSize, header.IPv6MinimumSize+len(payload))
	header.IPv6(packet).Encode(&header.IPv6Fields{
		PayloadLength: uint16(len(payload)), TransportProtocol: proto, HopLimit: 64, SrcAddr: tcpipAddr(src), DstAddr: tcpipAddr(dst),
	})
	return ether(header.IPv6ProtocolNumber, append(packet, payload...))
}

func ip4(src, dst netip.Addr, proto tcpip.TransportProtocolNumber, payload []byte, change func(*header.IPv4Fields)) []byte {
	fields := header.IPv4Fields{
		TotalLength: uint16(header.IPv4MinimumSize + len(payload)), TTL: 64, Protocol: uint8(proto), SrcAddr: tcpipAddr(src), DstAddr: tcpipAddr(dst),
	}
	if change != nil {
		change(&fields)
	}
	packet := make([]byte, header.IPv4MinimumSize, header.IPv4MinimumSize+len(payload))
	h := header.IPv4(packet)
	h.Encode(&fields)
	h.SetChecksum(0)
	h.SetChecksum(^h.CalculateChecksum())
	return ether(header.IPv4ProtocolNumber, append(packet, payload...))
}

func segment(src, dst netip.AddrPort, flags header.TCPFlags, seq, ack uint32) []byte {
	b := make([]byte, header.TCPMinimumSize)
	h := header.TCP(b)
	h.Encode(&header.TCPFields{
		SrcPort: src.Port(), DstPort: dst.Port(), SeqNum: seq, AckNum: ack, DataOffset: header.TCPMinimumSize, Flags: flags, WindowSize: 65535,
	})
	sum := header.PseudoHeaderChecksum(header.TCPProtocolNumber, tcpipAddr(src.Addr()), tcpipAddr(dst.Addr()), uint16(len(b)))
	h.SetChecksum(^h.CalculateChecksum(sum))
	return b
}

// source is the guest's address in dst's family, with a port.
func source(dst netip.Addr, port uint16) netip.AddrPort {
	if dst.Is4() {
		return netip.AddrPortFrom(guest4.Addr(), port)
	}
	return netip.AddrPortFrom(guest6.Addr(), port)
}

func syn(dst netip.AddrPort, port uint16) []byte {
	src := source(dst.Addr(), port)
	return ip(src.Addr(), dst.Addr(), header.TCPProtocolNumber, segment(src, dst, header.TCPFlagSyn, 1000, 0))
}

func datagram(src, dst netip.AddrPort, payload []byte) []byte {
	b := make([]byte, header.UDPMinimumSize, header.UDPMinimumSize+len(payload))
	h := header.UDP(b)
	size := uint16(header.UDPMinimumSize + len(payload))
	h.Encode(&header.UDPFields{SrcPort: src.Port(), DstPort: dst.Port(), Length: size})
	sum := header.PseudoHeaderChecksum(header.UDPProtocolNumber, tcpipAddr(src.Addr()), tcpipAddr(dst.Addr()), size)
	h.SetChecksum(^h.CalculateChecksum(checksum.Checksum(payload, sum)))
	return append(b, payload...)
}

func udpFrame(dst netip.AddrPort, port uint16, payload string) []byte {
	src := source(dst.Addr(), port)
	return ip(src.Addr(), dst.Addr(), header.UDPProtocolNumber, datagram(src, dst, []byte(payload)))
}

func echo4(src, dst netip.Addr, id uint16, payload []byte) []byte {
	icmp := append(make(header.ICMPv4, header.ICMPv4MinimumSize), payload...)
	icmp.SetType(header.ICMPv4Echo)
	icmp.SetIdent(id)
	icmp.SetChecksum(^checksum.Checksum(icmp, 0))
	return ip(src, dst, header.ICMPv4ProtocolNumber, icmp)
}

func echo6(src, dst netip.Addr, id uint16) []byte {
	icmp := make(header.ICMPv6, header.ICMPv6EchoMinimumSize)
	icmp.SetType(header.ICMPv6EchoRequest)
	icmp.SetIdent(id)
	icmp.SetChecksum(header.ICMPv6Checksum(header.ICMPv6ChecksumParams{Header: icmp, Src: tcpipAddr(src), Dst: tcpipAddr(dst)}))
	return ip(src, dst, header.ICMPv6ProtocolNumber, icmp)
}

func arpRequest(sender, target netip.Addr) []byte {
	b := make([]byte, header.ARPSize)
	h := header.ARP(b)
	h.SetIPv4OverEthernet()
	h.SetOp(header.ARPRequest)
	copy(h.HardwareAddressSender(), guestMAC)
	copy(h.ProtocolAddressSender(), sender.AsSlice())
	copy(h.ProtocolAddressTarget(), target.AsSlice())
	frame := ether(header.ARPProtocolNumber, b)
	copy(frame, []byte{255, 255, 255, 255, 255, 255})
	return frame
}

func solicit(src, target netip.Addr) []byte {
	icmp := make(header.ICMPv6, header.ICMPv6NeighborSolicitMinimumSize)
	if !src.IsUnspecified() {
		icmp = append(append(icmp, 1, 1), guestMAC...) // the option with the source's MAC address
	}
	icmp.SetType(header.ICMPv6NeighborSolicit)
	ns := header.NDPNeighborSolicit(icmp.MessageBody())
	ns.SetTargetAddress(tcpipAddr(target))
	dst := addrOf(header.SolicitedNodeAddr(tcpipAddr(target)))
	icmp.SetChecksum(header.ICMPv6Checksum(header.ICMPv6ChecksumParams{Header: icmp, Src: tcpipAddr(src), Dst: tcpipAddr(dst)}))
	frame := ip(src, dst, header.ICMPv6ProtocolNumber, icmp)
	header.IPv6(frame[header.EthernetMinimumSize:]).SetHopLimit(255)
	return frame
}

func addrOf(a tcpip.Address) netip.Addr {
	addr, _ := netip.AddrFromSlice(a.AsSlice())
	return addr
}
