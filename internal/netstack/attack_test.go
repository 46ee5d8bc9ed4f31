package netstack_test

import (
	"encoding/binary"
	"net/netip"
	"strings"
	"testing"

	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/egress"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/netstack"
)

// never are destinations that no policy opens to a guest.
func never() []string {
	return []string{
		// The host's loopback.
		"127.0.0.1", "127.1.2.3", "::1", "0.0.0.0", "0.1.2.3", "::",
		// The host's own addresses and its network's broadcast.
		"192.0.2.77", "192.0.2.255", "192.0.2.0",
		// Link-local, metadata.
		"169.254.169.254", "169.254.0.1", "fe80::1", "fd00:ec2::254", "fd20:ce::254", "100.100.100.200", "168.63.129.16", "192.0.0.192",
		// To many.
		"224.0.0.251", "239.255.255.250", "255.255.255.255", "ff02::1", "ff0e::fb", "240.0.0.1",
		// IPv4 in IPv6: mapped, compatible, translated, NAT64, 6to4, Teredo, ISATAP.
		"::ffff:127.0.0.1", "::ffff:169.254.169.254", "::ffff:192.0.2.77",
		"::127.0.0.1", "::169.254.169.254", "::ffff:0:127.0.0.1",
		"64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b::c000:24d", "64:ff9b:1::a9fe:a9fe", "64:ff9b:1:a9fe:a9:fe00::",
		"2002:7f00:1::1", "2002:a9fe:a9fe::", "2002:c000:24d::1",
		"2001:0:7f00:1::1", "2001:0:808:808:0:0:8000:fffe", // the second's client is 127.255.0.1, inverted
		"2001:db8::5efe:169.254.169.254", "2001:db8::200:5efe:127.0.0.1",
		// The VM's own network, and the gateway as if it were the host.
		"198.18.0.0", "198.18.0.3", "fd9c:3f1e:7a52::3", "fd9c:3f1e:7a52::", "::ffff:198.18.0.1",
	}
}

func TestWhatNoPolicyOpens(t *testing.T) {
	t.Parallel()
	policies := map[string]egress.Policy{
		"open": {Mode: egress.Open, HostPorts: []uint16{8080}},
		"all allowed": {Mode: egress.Restricted, HostPorts: []uint16{8080}, Allow: []egress.Rule{
			{CIDR: "0.0.0.0/0"}, {CIDR: "::/0"}, {Name: "*"},
		}},
	}
	for name, policy := range policies {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld()
			r := startRaw(t, w, func(o *netstack.Options) { o.Policy = policy })
			port := uint16(20000)
			for _, text := range never() {
				addr := netip.MustParseAddr(text)
				for _, p := range []uint16{22, 53, 80, 8080} {
					port++
					dst := netip.AddrPortFrom(addr, p)
					r.send(syn(dst, port))
					r.send(udpFrame(dst, port, "out"))
				}
			}
			// The gateway's ports that are not open; those of DNS are its own.
			for _, addr := range []netip.Addr{gateway4, gateway6} {
				for _, p := range []uint16{1, 22, 54, 80, 8081, 65535} {
					port++
					r.send(syn(netip.AddrPortFrom(addr, p), port))
					r.send(udpFrame(netip.AddrPortFrom(addr, p), port, "out"))
				}
				r.send(udpFrame(netip.AddrPortFrom(addr, 8080), port, "a host port is for TCP"))
			}
			r.barrier()
			if dials := w.dials(); len(dials) > 0 {
				t.Errorf("reached %v", dials)
			}
			if s := r.Stats(); s.Live != 0 || s.BytesOut != 0 || s.Denied == 0 {
				t.Errorf("stats are %+v", s)
			}
			// And the same way something does get out.
			r.send(syn(netip.MustParseAddrPort("203.0.113.9:80"), 1))
			eventually(t, "a dial", func() bool { return len(w.dials()) == 1 })
		})
	}
}

func TestForeignSources(t *testing.T) {
	t.Parallel()
	w := newWorld()
	r := startRaw(t, w, nil)
	dst := netip.MustParseAddrPort("203.0.113.9:80")
	dst6 := netip.MustParseAddrPort("[2001:db8::9]:80")
	var frames [][]byte
	for _, src := range []string{"192.0.2.77", "127.0.0.1", "198.18.0.1", "198.18.0.3", "0.0.0.0", "10.0.0.1", "255.255.255.255"} {
		from := netip.AddrPortFrom(netip.MustParseAddr(src), 1234)
		frames = append(frames,
			ip(from.Addr(), dst.Addr(), header.TCPProtocolNumber, segment(from, dst, header.TCPFlagSyn, 1, 0)),
			ip(from.Addr(), dst.Addr(), header.UDPProtocolNumber, datagram(from, dst, []byte("out"))))
	}
	for _, src := range []string{"::1", "2001:db8::77", "fd9c:3f1e:7a52::1", "fd9c:3f1e:7a52::3", "::ffff:198.18.0.2"} {
		from := netip.AddrPortFrom(netip.MustParseAddr(src), 1234)
		frames = append(frames,
			ip(from.Addr(), dst6.Addr(), header.TCPProtocolNumber, segment(from, dst6, header.TCPFlagSyn, 1, 0)),
			ip(from.Addr(), dst6.Addr(), header.UDPProtocolNumber, datagram(from, dst6, []byte("out"))))
	}
	foreign := syn(dst, 1)
	foreign[11] ^= 1 // another MAC address
	frames = append(frames, foreign, arpRequest(gateway4, guest4.Addr()), arpRequest(netip.MustParseAddr("198.18.0.3"), gateway4))
	for _, frame := range frames {
		r.send(frame)
	}
	// Silent: link-local and no address at all are for neighbour discovery alone.
	for _, src := range []string{"fe80::2", "::"} {
		from := netip.AddrPortFrom(netip.MustParseAddr(src), 1234)
		r.send(ip(from.Addr(), dst6.Addr(), header.TCPProtocolNumber, segment(from, dst6, header.TCPFlagSyn, 1, 0)))
		r.send(ip(from.Addr(), dst6.Addr(), header.UDPProtocolNumber, datagram(from, dst6, []byte("out"))))
	}
	if answers := r.barrier(); len(answers) > 0 {
		t.Errorf("%d answers", len(answers))
	}
	if dials := w.dials(); len(dials) > 0 {
		t.Errorf("reached %v", dials)
	}
	if denied := r.Stats().Denied; denied != uint64(len(frames)) {
		t.Errorf("denied %d of %d", denied, len(frames))
	}
}

func TestSourceRoutingAndOptions(t *testing.T) {
	t.Parallel()
	w := newWorld()
	r := startRaw(t, w, nil)
	allowed := netip.MustParseAddrPort("203.0.113.9:80")
	for _, kind := range []byte{0x83, 0x89, 7, 68, 148} { // loose and strict source routes, record route, timestamp, router alert
		src := source(allowed.Addr(), 1234)
		r.send(withOption(ip4(src.Addr(), allowed.Addr(), header.UDPProtocolNumber, datagram(src, allowed, []byte("out")), nil),
			[]byte{kind, 7, 4, 127, 0, 0, 1, 0}))
	}
	allowed6 := netip.MustParseAddrPort("[2001:db8::9]:80")
	src6 := source(allowed6.Addr(), 1234)
	loopback := netip.MustParseAddr("::1").As16()
	for _, next := range []uint8{0, 43, 60} { // hop-by-hop options, a route by way of ::1, destination options
		extension := append([]byte{uint8(header.UDPProtocolNumber), 2, 0, 1, 0, 0, 0, 0}, loopback[:]...)
		payload := append(extension, datagram(src6, allowed6, []byte("out"))...)
		r.send(ip(src6.Addr(), allowed6.Addr(), 0, payload))
		frame := ip(src6.Addr(), allowed6.Addr(), 0, payload)
		frame[header.EthernetMinimumSize+6] = next
		r.send(frame)
	}
	// Other protocols: IGMP, IP in IP, GRE, ESP, SCTP, IPv6 in IPv4.
	for _, proto := range []uint8{2, 4, 41, 47, 50, 132} {
		r.send(ip4(guest4.Addr(), allowed.Addr(), 0, make([]byte, 40), func(f *header.IPv4Fields) { f.Protocol = proto }))
	}
	r.barrier()
	if dials := w.dials(); len(dials) > 0 {
		t.Errorf("reached %v", dials)
	}
	if denied := r.Stats().Denied; denied != 5+6+6 {
		t.Errorf("denied %d", denied)
	}
}

// withOption puts 8 bytes of options into an IPv4 header.
func withOption(frame, option []byte) []byte {
	const end = header.EthernetMinimumSize + header.IPv4MinimumSize
	out := append(append(append([]byte(nil), frame[:end]...), option...), frame[end:]...)
	h := header.IPv4(out[header.EthernetMinimumSize:])
	h.SetHeaderLength(header.IPv4MinimumSize + 8)
	h.SetTotalLength(uint16(len(h)))
	h.SetChecksum(0)
	h.SetChecksum(^h.CalculateChecksum())
	return out
}

// split cuts the payload of an IPv4 packet in fragments at offsets of 8 bytes.
func split(id uint16, src, dst netip.Addr, payload []byte, cuts ...int) [][]byte {
	var frames [][]byte
	cuts = append(cuts, len(payload))
	from := 0
	for i, to := range cuts {
		frames = append(frames, ip4(src, dst, header.UDPProtocolNumber, payload[from:to], func(f *header.IPv4Fields) {
			f.ID, f.FragmentOffset = id, uint16(from)
			if i < len(cuts)-1 {
				f.Flags = header.IPv4FlagMoreFragments
			}
		}))
		from = to
	}
	return frames
}

func TestFragments(t *testing.T) {
	t.Parallel()
	w := newWorld()
	got := make(chan string, 10)
	w.packets(t, "203.0.113.9:7", func(b []byte) [][]byte {
		got <- string(b)
		return nil
	})
	r := startRaw(t, w, func(o *netstack.Options) {
		o.Policy = egress.Policy{Mode: egress.Restricted, Allow: []egress.Rule{{CIDR: "203.0.113.9", Ports: []string{"7"}}}}
	})
	allowed, denied := netip.MustParseAddrPort("203.0.113.9:7"), netip.MustParseAddrPort("203.0.113.9:22")
	src := source(allowed.Addr(), 1234)
	text := strings.Repeat("fragment", 40)
	good, bad := datagram(src, allowed, []byte(text)), datagram(src, denied, []byte(text))

	// To what is denied, in one order and the other, and with tiny fragments that
	// cut the UDP header's neighbours apart.
	for _, frame := range split(1, src.Addr(), denied.Addr(), bad, 8, 64) {
		r.send(frame)
	}
	frames := split(2, src.Addr(), denied.Addr(), bad, 16)
	r.send(frames[1])
	r.send(frames[0])
	// Ports that a second first fragment overwrites.
	frames = split(3, src.Addr(), allowed.Addr(), good, 64)
	r.send(frames[0])
	r.send(split(3, src.Addr(), allowed.Addr(), bad, 64)[0])
	r.send(frames[1])
	// A fragment of another source for the end of a good one.
	r.send(split(4, src.Addr(), allowed.Addr(), good, 64)[0])
	r.send(split(4, netip.MustParseAddr("192.0.2.77"), allowed.Addr(), bad, 64)[1])
	// Past the end of a packet ("ping of death").
	r.send(ip4(src.Addr(), allowed.Addr(), header.UDPProtocolNumber, good, func(f *header.IPv4Fields) { f.ID, f.FragmentOffset = 5, 65528 }))
	// IPv6's, with a routing header behind the fragment's.
	dst6 := netip.MustParseAddr("2001:db8::9")
	fragment := append([]byte{43, 0, 0, 0, 0, 0, 0, 9}, 17, 2, 0, 1, 0, 0, 0, 0)
	fragment = append(fragment, make([]byte, 16)...)
	r.send(ip(guest6.Addr(), dst6, 44, fragment))
	r.barrier()
	for _, dial := range w.dials() {
		if dial != "udp 203.0.113.9:7" {
			t.Errorf("reached %s", dial)
		}
	}
	for len(got) > 0 {
		if g := <-got; g != text {
			t.Errorf("the server got %q", g)
		}
	}

	// Thousands that never end take bounded memory, and do not stop the others.
	for id := range 5000 {
		r.send(split(uint16(1000+id), src.Addr(), allowed.Addr(), make([]byte, 1400), 1392)[0])
	}
	frames = split(6, src.Addr(), allowed.Addr(), good, 64, 128)
	for _, i := range []int{2, 0, 1} {
		r.send(frames[i])
	}
	if g := <-got; g != text {
		t.Errorf("the server got %q", g)
	}
}

func TestICMP(t *testing.T) {
	t.Parallel()
	r := startRaw(t, newWorld(), nil)
	r.barrier() // which is an echo of the gateway
	r.send(echo6(guest6.Addr(), gateway6, 7))
	r.expect("an echo by IPv6", func(frame []byte) bool {
		icmp := icmp6Of(frame)
		return icmp != nil && icmp.Type() == header.ICMPv6EchoReply && icmp.Ident() == 7
	})
	// Nobody answers in the name of others.
	r.send(echo4(guest4.Addr(), netip.MustParseAddr("203.0.113.9"), 8, nil))
	frame := r.expect("a refusal", func(frame []byte) bool { return icmp4Of(frame) != nil })
	if icmp := icmp4Of(frame); icmp.Type() != header.ICMPv4DstUnreachable || icmp.Code() != 13 {
		t.Errorf("type %d code %d", icmp.Type(), icmp.Code())
	}
	r.send(echo6(guest6.Addr(), netip.MustParseAddr("2001:db8::9"), 8))
	frame = r.expect("a refusal by IPv6", func(frame []byte) bool { return icmp6Of(frame) != nil })
	if icmp := icmp6Of(frame); icmp.Type() != header.ICMPv6DstUnreachable || icmp.Code() != 1 {
		t.Errorf("type %d code %d", icmp.Type(), icmp.Code())
	}
	// Errors are never answered, nor what goes to many.
	unreachable := make(header.ICMPv4, header.ICMPv4MinimumSize+28)
	unreachable.SetType(header.ICMPv4DstUnreachable)
	for _, dst := range []string{"203.0.113.9", "198.18.0.1"} {
		r.send(ip(guest4.Addr(), netip.MustParseAddr(dst), header.ICMPv4ProtocolNumber, unreachable))
	}
	r.send(echo4(guest4.Addr(), netip.MustParseAddr("224.0.0.1"), 9, nil))
	r.send(echo4(guest4.Addr(), guest4.Addr(), 9, nil))
	if answers := r.barrier(); len(answers) > 0 {
		t.Errorf("%d answers, the first %x", len(answers), answers[0])
	}
}

func TestNeighbours(t *testing.T) {
	t.Parallel()
	r := startRaw(t, newWorld(), nil)
	for _, addr := range []netip.Addr{guest4.Addr(), netip.MustParseAddr("198.18.0.3"), netip.MustParseAddr("203.0.113.1")} {
		r.send(arpRequest(guest4.Addr(), addr))
	}
	for _, addr := range []netip.Addr{guest6.Addr(), netip.MustParseAddr("fd9c:3f1e:7a52::3"), netip.MustParseAddr("2001:db8::1")} {
		r.send(solicit(guest6.Addr(), addr))
	}
	r.send(solicit(netip.IPv6Unspecified(), guest6.Addr())) // the guest asks whether its address is taken
	if answers := r.barrier(); len(answers) > 0 {
		t.Errorf("%d answers, the first %x", len(answers), answers[0])
	}
	r.send(arpRequest(guest4.Addr(), gateway4))
	frame := r.expect("ARP", func(frame []byte) bool { return header.Ethernet(frame).Type() == header.ARPProtocolNumber })
	if mac := header.ARP(frame[header.EthernetMinimumSize:]).HardwareAddressSender(); string(mac) != string(gatewayMAC) {
		t.Errorf("the gateway is at %x", mac)
	}
	for _, src := range []string{guest6.Addr().String(), "fe80::5894:efff:fe18:2"} {
		r.send(solicit(netip.MustParseAddr(src), gateway6))
		frame = r.expect("an advertisement to "+src, func(frame []byte) bool { return icmp6Of(frame) != nil })
		if icmp := icmp6Of(frame); icmp.Type() != header.ICMPv6NeighborAdvert {
			t.Errorf("type %d", icmp.Type())
		}
	}
}

// Whatever a router would say is not listened to: the gateway takes no address
// and no route of the guest.
func TestGuestIsNoRouter(t *testing.T) {
	t.Parallel()
	w := newWorld()
	r := startRaw(t, w, nil)
	linkLocal := netip.MustParseAddr("fe80::5894:efff:fe18:2")
	all := netip.MustParseAddr("ff02::1")
	prefix := netip.MustParseAddr("2001:db8:bad::").As16()
	advert := append([]byte{134, 0, 0, 0, 64, 0, 255, 255, 0, 0, 0, 0, 0, 0, 0, 0, 3, 4, 64, 0xc0}, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0, 0, 0)
	advert = append(advert, prefix[:]...)
	icmp := header.ICMPv6(advert)
	icmp.SetChecksum(header.ICMPv6Checksum(header.ICMPv6ChecksumParams{Header: icmp, Src: tcpipAddr(linkLocal), Dst: tcpipAddr(all)}))
	frame := ip(linkLocal, all, header.ICMPv6ProtocolNumber, icmp)
	header.IPv6(frame[header.EthernetMinimumSize:]).SetHopLimit(255)
	r.send(frame)
	if answers := r.barrier(); len(answers) > 0 {
		t.Errorf("%d answers", len(answers))
	}
}

// The host's addresses that nobody listed yet: the socket tells.
func TestHostAddressAddedLater(t *testing.T) {
	t.Parallel()
	const tcpDst, udpDst = "203.0.113.50:80", "203.0.113.50:7"
	w := newWorld()
	got := make(chan string, 1)
	address := w.listen(t, tcpDst, echo)
	_ = address
	w.packets(t, udpDst, func(b []byte) [][]byte {
		got <- string(b)
		return nil
	})
	w.local = netip.Addr{}
	g := boot(t, w, func(o *netstack.Options) {
		o.Policy.Extra = []egress.Endpoint{{Host: "203.0.113.50", Port: 81}}
	})
	if conn, err := g.tcp(t, tcpDst); err == nil {
		_ = conn.Close()
		t.Error("connected to the host by TCP")
	}
	conn := g.udp(t, udpDst)
	_, _ = conn.Write([]byte("out"))
	eventually(t, "the denial by UDP", func() bool { return g.Stats().Denied == 2 })
	select {
	case text := <-got:
		t.Errorf("the host got %q", text)
	default:
	}
	// What the operator named exactly is reached.
	w.listen(t, "203.0.113.50:81", echo)
	g.reaches(t, "203.0.113.50:81")

	// An address that is listed now.
	w.mu.Lock()
	w.host = append(w.host, netip.MustParsePrefix("203.0.113.60/24"))
	w.local = netip.MustParseAddr("192.0.2.77")
	w.mu.Unlock()
	w.listen(t, "203.0.113.60:80", echo)
	eventually(t, "the new address is denied", func() bool {
		conn, err := g.tcp(t, "203.0.113.60:80")
		if err == nil {
			_ = conn.Close()
		}
		return err != nil
	})
}

func TestDenialsAreLoggedOnce(t *testing.T) {
	t.Parallel()
	w := newWorld()
	r := startRaw(t, w, nil)
	for i := range 50 {
		r.send(syn(netip.MustParseAddrPort("169.254.169.254:80"), uint16(1000+i)))
	}
	r.barrier()
	log := r.logs.String()
	if n := strings.Count(log, "169.254.169.254:80"); n != 1 || !strings.Contains(log, "vm-test") || !strings.Contains(log, "link-local") {
		t.Errorf("logged %d times:\n%s", n, log)
	}
	if denied := r.Stats().Denied; denied != 50 {
		t.Errorf("denied %d", denied)
	}
	// However many destinations there are, the log stays small.
	for i := range 3000 {
		dst := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127 + 42, 254, byte(i >> 8), byte(i)}), 80)
		r.send(syn(dst, 1))
	}
	r.barrier()
	if lines := strings.Count(r.logs.String(), "\n"); lines > 300 {
		t.Errorf("%d lines of log", lines)
	}
	if denied := r.Stats().Denied; denied != 3050 {
		t.Errorf("denied %d", denied)
	}
}

// A length that no frame has ends the link, and with it the gateway.
func TestBrokenFraming(t *testing.T) {
	t.Parallel()
	r := startRaw(t, newWorld(), nil)
	_, _ = r.conn.Write(binary.BigEndian.AppendUint32(nil, 1<<20))
	<-r.Done()
	if log := r.logs.String(); !strings.Contains(log, "longer than its MTU") {
		t.Errorf("log is %q", log)
	}
	if _, err := r.Publish(netip.MustParseAddrPort("127.0.0.1:0"), 1); err == nil {
		t.Error("published on a gateway that has ended")
	}
}

func FuzzFrames(f *testing.F) {
	f.Add(syn(netip.MustParseAddrPort("203.0.113.9:80"), 1))
	f.Add(syn(netip.MustParseAddrPort("[2001:db8::9]:80"), 1))
	f.Add(udpFrame(netip.MustParseAddrPort("198.18.0.1:53"), 1, "\x00\x01\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x01a\x00\x00\x01\x00\x01"))
	f.Add(echo4(guest4.Addr(), gateway4, 1, []byte("x")))
	f.Add(echo6(guest6.Addr(), gateway6, 1))
	f.Add(arpRequest(guest4.Addr(), gateway4))
	f.Add(solicit(guest6.Addr(), gateway6))
	for _, frame := range split(1, guest4.Addr(), netip.MustParseAddr("203.0.113.9"), make([]byte, 64), 16, 32) {
		f.Add(frame)
	}
	w := newWorld()
	r := startRaw(f, w, func(o *netstack.Options) { o.MTU = netstack.MaxMTU })
	f.Fuzz(func(t *testing.T, frame []byte) {
		if len(frame) > 2000 {
			t.Skip("SKIPPED: longer frames are nothing new")
		}
		r.t = t
		// As it is, and with the addresses right, so that more of it is looked at.
		r.send(frame)
		if len(frame) >= header.EthernetMinimumSize+header.IPv4MinimumSize {
			copy(frame, ether(header.Ethernet(frame).Type(), nil))
			r.send(frame)
		}
		r.barrier()
		for _, dial := range w.dials() {
			_, address, _ := strings.Cut(dial, " ")
			dst := netip.MustParseAddrPort(address)
			if dst.Addr().IsLoopback() || dst.Addr().IsLinkLocalUnicast() || dst.Addr().IsMulticast() || dst.Addr().IsUnspecified() {
				t.Fatalf("reached %s", dial)
			}
		}
	})
}
