package netstack_test

import (
	"io"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/egress"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/netstack"
)

// The same SYN again and again, also while it is being refused: every place is
// given back, and the gateway can be closed, as the test's end shows.
func TestSYNsWithoutEnd(t *testing.T) {
	t.Parallel()
	w := newWorld()
	w.fail("tcp", "203.0.113.5:80", unix.ECONNREFUSED)
	r := startRaw(t, w, nil)
	frame := syn(netip.MustParseAddrPort("203.0.113.5:80"), 1000)
	for range 100_000 {
		r.send(frame)
	}
	r.barrier()
	eventually(t, "the places are free again", func() bool { return r.Stats().Live == 0 })
}

// segmentWith is a segment that begins a sequence, with options.
func segmentWith(src, dst netip.AddrPort, flags header.TCPFlags, ack uint32, options ...byte) []byte {
	b := append(make([]byte, header.TCPMinimumSize), options...)
	h := header.TCP(b)
	h.Encode(&header.TCPFields{
		SrcPort: src.Port(), DstPort: dst.Port(), SeqNum: 1000, AckNum: ack, DataOffset: uint8(len(b)), Flags: flags, WindowSize: 65535,
	})
	sum := header.PseudoHeaderChecksum(header.TCPProtocolNumber, tcpipAddr(src.Addr()), tcpipAddr(dst.Addr()), uint16(len(b)))
	h.SetChecksum(^h.CalculateChecksum(sum))
	return b
}

func mss(size uint16) []byte { return []byte{header.TCPOptionMSS, 4, byte(size >> 8), byte(size)} }

// A guest that asks for segments of a few bytes would have the gateway keep
// hundreds for each: it gets none, however it asks.
func TestTinySegments(t *testing.T) {
	t.Parallel()
	for _, address := range []string{"203.0.113.5:80", "[2001:db8::5]:80"} {
		w := newWorld()
		w.listen(t, address, echo)
		r := startRaw(t, w, nil)
		dst := netip.MustParseAddrPort(address)
		src := source(dst.Addr(), 1000)
		send := func(segment []byte) { r.send(ip(src.Addr(), dst.Addr(), header.TCPProtocolNumber, segment)) }

		for _, size := range []uint16{1, 48, 535} {
			send(segmentWith(src, dst, header.TCPFlagSyn, 0, mss(size)...))
			r.expect("a refusal", func(frame []byte) bool {
				icmp4, icmp6 := icmp4Of(frame), icmp6Of(frame)
				return icmp4 != nil && icmp4.Type() == header.ICMPv4DstUnreachable || icmp6 != nil && icmp6.Type() == header.ICMPv6DstUnreachable
			})
		}
		// Headers that end early, and options behind the end.
		for length := range header.TCPMinimumSize + 4 {
			whole := segmentWith(src, dst, header.TCPFlagSyn, 0, mss(48)...)
			send(whole[:length])
		}
		// A SYN in fragments, in which the option is not seen at once.
		padded := append(segmentWith(src, dst, header.TCPFlagSyn, 0, append(mss(48), make([]byte, 28)...)...), make([]byte, 64)...)
		for _, cut := range []int{8, 16, 24, 32, 56} {
			r.sendFragments(src.Addr(), dst.Addr(), padded, cut)
		}
		r.barrier()
		if dials := w.dials(); len(dials) > 0 {
			t.Errorf("reached %v", dials)
		}

		for i, options := range [][]byte{mss(536), nil, {1, 1}} {
			src := source(dst.Addr(), uint16(2000+i))
			r.send(ip(src.Addr(), dst.Addr(), header.TCPProtocolNumber, segmentWith(src, dst, header.TCPFlagSyn, 0, options...)))
			r.expect("an answer", func(frame []byte) bool {
				s := tcpOf(frame)
				return s != nil && s.DestinationPort() == src.Port() && s.Flags() == header.TCPFlagSyn|header.TCPFlagAck
			})
		}
	}
}

// sendFragments sends a TCP segment in two pieces.
func (r *raw) sendFragments(src, dst netip.Addr, segment []byte, cut int) {
	r.t.Helper()
	r.id++
	if dst.Is4() {
		for _, frame := range split(r.id, src, dst, segment, cut) {
			packet := header.IPv4(frame[header.EthernetMinimumSize:])
			packet[9] = byte(header.TCPProtocolNumber)
			packet.SetChecksum(0)
			packet.SetChecksum(^packet.CalculateChecksum())
			r.send(frame)
		}
		return
	}
	for _, piece := range []struct {
		offset int
		more   byte
		data   []byte
	}{{0, 1, segment[:cut]}, {cut, 0, segment[cut:]}} {
		head := []byte{byte(header.TCPProtocolNumber), 0, byte(piece.offset >> 8), byte(piece.offset) | piece.more, 0, 0, byte(r.id >> 8), byte(r.id)}
		r.send(ip(src, dst, header.IPv6FragmentHeader, append(head, piece.data...)))
	}
}

// dialPublished connects to port 80 of the guest from the host.
func dialPublished(t *testing.T, r *raw) *net.TCPConn {
	t.Helper()
	host, err := r.Publish(netip.MustParseAddrPort("127.0.0.1:0"), 80)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := net.DialTCP("tcp", nil, net.TCPAddrFromAddrPort(host))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// gatewaySYN is what the guest then gets.
func gatewaySYN(r *raw) header.TCP {
	return tcpOf(r.expect("the gateway's SYN", func(frame []byte) bool {
		s := tcpOf(frame)
		return s != nil && s.Flags() == header.TCPFlagSyn
	}))
}

// Nor when the guest is the one that is connected to.
func TestTinySegmentsOfAServer(t *testing.T) {
	t.Parallel()
	r := startRaw(t, newWorld(), nil)
	dialPublished(t, r)
	asked := gatewaySYN(r)
	src, dst := source(gateway4, 80), netip.AddrPortFrom(gateway4, asked.SourcePort())
	r.send(ip(src.Addr(), dst.Addr(), header.TCPProtocolNumber,
		segmentWith(src, dst, header.TCPFlagSyn|header.TCPFlagAck, asked.SequenceNumber()+1, mss(48)...)))
	r.barrier()
	if flows := r.Stats().TCPFlows; flows != 0 {
		t.Errorf("%d flows", flows)
	}
}

// A client that has nothing to say ends its side before the guest has answered, and
// is served all the same.
func TestPublishToOneWhoListens(t *testing.T) {
	t.Parallel()
	r := startRaw(t, newWorld(), nil)
	conn := dialPublished(t, r)
	if err := conn.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	asked := gatewaySYN(r)
	r.barrier()
	src, dst := source(gateway4, 80), netip.AddrPortFrom(gateway4, asked.SourcePort())
	send := func(segment []byte) { r.send(ip(src.Addr(), dst.Addr(), header.TCPProtocolNumber, segment)) }
	send(segmentWith(src, dst, header.TCPFlagSyn|header.TCPFlagAck, asked.SequenceNumber()+1, mss(1460)...))
	r.expect("the end of the client's side", func(frame []byte) bool { s := tcpOf(frame); return s != nil && s.Flags().Contains(header.TCPFlagFin) })
	send(append(segment(src, dst, header.TCPFlagAck|header.TCPFlagFin, 1001, asked.SequenceNumber()+2), "banner"...))
	_ = conn.SetReadDeadline(time.Now().Add(patience))
	if text, err := io.ReadAll(conn); string(text) != "banner" || err != nil {
		t.Errorf("read %q, %v", text, err)
	}
}

// What tells a sender to make its packets smaller is for routers, and has no
// effect, not even as a fragment that is a whole packet.
func TestTooBigFromAGuest(t *testing.T) {
	t.Parallel()
	const address = "[2001:db8::5]:80"
	w := newWorld()
	w.listen(t, address, func(conn *net.TCPConn) {
		_, _ = io.ReadFull(conn, make([]byte, 1))
		_, _ = conn.Write(make([]byte, 1000))
		_, _ = io.Copy(io.Discard, conn)
	})
	r := startRaw(t, w, nil)
	dst := netip.MustParseAddrPort(address)
	src := source(dst.Addr(), 1000)
	send := func(payload []byte) { r.send(ip(src.Addr(), dst.Addr(), header.TCPProtocolNumber, payload)) }
	send(segmentWith(src, dst, header.TCPFlagSyn, 0, mss(1220)...))
	answer := r.expect("an answer", func(frame []byte) bool { s := tcpOf(frame); return s != nil && s.Flags().Contains(header.TCPFlagSyn) })
	next := tcpOf(answer).SequenceNumber() + 1
	send(segment(src, dst, header.TCPFlagAck, 1001, next))

	icmp := append(make(header.ICMPv6, header.ICMPv6PacketTooBigMinimumSize), answer[header.EthernetMinimumSize:]...)
	icmp.SetType(header.ICMPv6PacketTooBig)
	icmp.SetMTU(100)
	for _, to := range []netip.Addr{gateway6, dst.Addr()} {
		icmp.SetChecksum(header.ICMPv6Checksum(header.ICMPv6ChecksumParams{Header: icmp, Src: tcpipAddr(guest6.Addr()), Dst: tcpipAddr(to)}))
		r.send(ip(guest6.Addr(), to, header.ICMPv6ProtocolNumber, icmp))
		r.send(ip(guest6.Addr(), to, header.IPv6FragmentHeader, append([]byte{byte(header.ICMPv6ProtocolNumber), 0, 0, 0, 0, 0, 0, 9}, icmp...)))
	}
	push := append(segment(src, dst, header.TCPFlagAck|header.TCPFlagPsh, 1001, next), 'x')
	send(push)
	frame := r.expect("the data", func(frame []byte) bool { s := tcpOf(frame); return s != nil && len(s.Payload()) > 0 })
	if size := len(tcpOf(frame).Payload()); size != 1000 {
		t.Errorf("the first segment has %d bytes", size)
	}
}

// A guest that ends its side and then goes away gives its place back, though the
// other end neither sends nor closes anything.
func TestResetAfterHalfClose(t *testing.T) {
	t.Parallel()
	const address = "203.0.113.5:80"
	release, ended := make(chan struct{}), make(chan struct{})
	w := newWorld()
	w.listen(t, address, func(conn *net.TCPConn) {
		_, _ = io.Copy(io.Discard, conn)
		close(ended)
		<-release
	})
	defer close(release)
	r := startRaw(t, w, nil)
	dst := netip.MustParseAddrPort(address)
	src := source(dst.Addr(), 1000)
	send := func(flags header.TCPFlags, seq, ack uint32) {
		r.send(ip(src.Addr(), dst.Addr(), header.TCPProtocolNumber, segment(src, dst, flags, seq, ack)))
	}
	send(header.TCPFlagSyn, 1000, 0)
	answer := tcpOf(r.expect("an answer", func(frame []byte) bool { s := tcpOf(frame); return s != nil && s.Flags().Contains(header.TCPFlagSyn) }))
	send(header.TCPFlagAck|header.TCPFlagFin, 1001, answer.SequenceNumber()+1)
	<-ended
	if live := r.Stats().Live; live != 1 {
		t.Fatalf("%d flows are open", live)
	}
	send(header.TCPFlagRst, 1002, 0)
	eventually(t, "the place is free again", func() bool { return r.Stats().Live == 0 })
}

// A question by TCP that says to be longer than any question is not waited for.
func TestLongQuestion(t *testing.T) {
	t.Parallel()
	g := boot(t, newWorld(), nil)
	conn := g.mustTCP(t, "198.18.0.1:53")
	defer conn.Close() //nolint:errcheck // nothing more is written
	_, _ = conn.Write([]byte{0xff, 0xff})
	// Less than a connection may be idle.
	_ = conn.SetReadDeadline(time.Now().Add(8 * time.Second))
	if n, err := conn.Read(make([]byte, 1)); n != 0 || err != io.EOF { //nolint:errorlint // that very one
		t.Errorf("read %d bytes, %v", n, err)
	}
}

// Aliases in any order, in a circle, and with two ends.
func TestAliases(t *testing.T) {
	t.Parallel()
	z, w := newZone(), newWorld()
	z.set("ok.test.", 60,
		owned{"c.cdn.test.", a("203.0.113.5")}, owned{"d.cdn.test.", a("203.0.113.6")}, owned{"x.cdn.test.", a("203.0.113.7")},
		alias("b.cdn.test.", "c.cdn.test."), alias("b.cdn.test.", "d.cdn.test."), alias("c.cdn.test.", "ok.test."),
		alias("y.cdn.test.", "x.cdn.test."), alias("OK.test.", "b.cdn.test."))
	z.serve(t, w, server1)
	for _, dst := range []string{"203.0.113.5:443", "203.0.113.6:443", "203.0.113.7:443"} {
		w.listen(t, dst, echo)
	}
	g := boot(t, w, func(o *netstack.Options) {
		o.ResolvConf = resolvConf(t, server1)
		o.Policy = egress.Policy{Mode: egress.Restricted, Allow: []egress.Rule{{Name: "ok.test"}}}
	})
	if reply := g.ask(t, false, question(1, "ok.test.", dnsmessage.TypeA, 0)); len(reply.Answers) != 8 {
		t.Fatalf("the answer is %+v", reply)
	}
	g.reaches(t, "203.0.113.5:443")
	g.reaches(t, "203.0.113.6:443")
	if conn, err := g.tcp(t, "203.0.113.7:443"); err == nil {
		_ = conn.Close()
		t.Error("an alias of another name is reached")
	}
}

// Broadcast addresses that the list of the host's addresses does not tell are known
// to its kernel.
func TestUnlistedBroadcast(t *testing.T) {
	t.Parallel()
	interfaces, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	var dst netip.Addr
	for _, i := range interfaces {
		addrs, _ := i.Addrs()
		for _, addr := range addrs {
			prefix, err := netip.ParsePrefix(addr.String())
			if err == nil && i.Flags&net.FlagBroadcast != 0 && i.Flags&net.FlagRunning != 0 && prefix.Addr().Is4() && prefix.Bits() == 24 {
				b := prefix.Masked().Addr().As4()
				b[3] = 255
				dst = netip.AddrFrom4(b)
			}
		}
	}
	if !dst.IsValid() {
		t.Skip("SKIPPED: no interface here is in a network of 24 bits with a broadcast address")
	}
	w := newWorld()
	w.host = nil
	r := startRaw(t, w, func(o *netstack.Options) { o.Dial = nil })
	r.send(udpFrame(netip.AddrPortFrom(dst, 9), 1000, "to all"))
	frames := r.barrier()
	if !slices.ContainsFunc(frames, func(frame []byte) bool {
		icmp := icmp4Of(frame)
		return icmp != nil && icmp.Type() == header.ICMPv4DstUnreachable && icmp.Code() == 13
	}) {
		t.Errorf("%s was not refused", dst)
	}
	if flows := r.Stats().UDPFlows; flows != 0 {
		t.Errorf("%d flows", flows)
	}
}

// A question or an answer that is lost on the way is asked for again, also where
// there is one server alone.
func TestLostAnswer(t *testing.T) {
	t.Parallel()
	z, w := newZone(), newWorld()
	z.set("a.test.", 60, a("203.0.113.5"))
	asked := 0
	w.packets(t, server1+":53", func(query []byte) [][]byte {
		if asked++; asked == 1 {
			return nil
		}
		return [][]byte{z.answer(query, true)}
	})
	g := boot(t, w, func(o *netstack.Options) { o.ResolvConf = resolvConf(t, server1) })
	if reply := g.ask(t, false, question(1, "a.test.", dnsmessage.TypeA, 0)); len(reply.Answers) != 1 {
		t.Errorf("the answer is %+v", reply)
	}
}
