package netstack_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/egress"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/netstack"
)

func TestUDP(t *testing.T) {
	t.Parallel()
	w := newWorld()
	upper := func(b []byte) [][]byte { return [][]byte{[]byte(strings.ToUpper(string(b)))} }
	w.packets(t, "203.0.113.5:7", upper)
	w.packets(t, "[2001:db8::5]:7", upper)
	g := boot(t, w, nil)
	for _, dst := range []string{"203.0.113.5:7", "[2001:db8::5]:7"} {
		conn := g.udp(t, dst)
		_ = conn.SetDeadline(time.Now().Add(patience))
		for _, text := range []string{"a", "", strings.Repeat("fragments ", 2000), "z"} {
			if _, err := conn.Write([]byte(text)); err != nil {
				t.Fatal(err)
			}
			buf := make([]byte, 1<<16)
			n, err := conn.Read(buf)
			if err != nil || string(buf[:n]) != strings.ToUpper(text) {
				t.Fatalf("%s: %d bytes for %d, %v\n%s", dst, n, len(text), err, g.logs)
			}
		}
	}
	if s := g.Stats(); s.UDPFlows != 2 || s.Live != 2 || s.BytesIn != s.BytesOut || s.BytesIn != 2*20002 {
		t.Errorf("stats are %+v", s)
	}
}

// A port where nobody listens, and networks that are not there, are told.
func TestUDPErrors(t *testing.T) {
	t.Parallel()
	w := newWorld()
	listener, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_ = listener.Close()
	w.route("udp", "203.0.113.5:9", listener.LocalAddr().String())
	w.route("udp", "[2001:db8::5]:9", listener.LocalAddr().String())
	w.fail("udp", "203.0.113.6:7", unix.ENETUNREACH)
	w.fail("udp", "203.0.113.7:7", unix.EHOSTUNREACH)
	w.fail("udp", "[2001:db8::6]:7", unix.ENETUNREACH)
	r := startRaw(t, w, nil)
	for dst, code := range map[string]byte{
		"203.0.113.5:9": 3, "[2001:db8::5]:9": 4, "203.0.113.6:7": 0, "203.0.113.7:7": 1, "[2001:db8::6]:7": 0,
		"169.254.169.254:80": 13, "[fd00:ec2::254]:80": 1, "198.18.0.1:9": 3, "[fd9c:3f1e:7a52::1]:9": 4,
	} {
		sent := udpFrame(netip.MustParseAddrPort(dst), 1234, "x")
		r.send(sent)
		frame := r.expect(dst, func(frame []byte) bool { return icmp4Of(frame) != nil || icmp6Of(frame) != nil })
		// It repeats the packet, so that the guest finds the socket.
		quoted := sent[header.EthernetMinimumSize : len(sent)-1]
		if icmp := icmp4Of(frame); icmp != nil {
			copy(quoted[10:12], icmp.Payload()[10:12]) // the header's checksum
			if icmp.Type() != header.ICMPv4DstUnreachable || byte(icmp.Code()) != code || string(icmp.Payload()) != string(quoted) {
				t.Errorf("%s: %x", dst, icmp)
			}
		} else if icmp := icmp6Of(frame); icmp.Type() != header.ICMPv6DstUnreachable || byte(icmp.Code()) != code || string(icmp[header.ICMPv6DstUnreachableMinimumSize:]) != string(quoted) {
			t.Errorf("%s: %x", dst, icmp)
		}
	}
}

func TestUDPFlowsAreBounded(t *testing.T) {
	t.Parallel()
	w := newWorld()
	w.packets(t, "203.0.113.5:7", func(b []byte) [][]byte { return [][]byte{b} })
	r := startRaw(t, w, nil)
	dst := netip.MustParseAddrPort("203.0.113.5:7")
	for port := range 2000 {
		r.send(udpFrame(dst, uint16(1+port), "x"))
	}
	r.barrier()
	if s := r.Stats(); s.Live > 256 || s.UDPFlows != 2000 {
		t.Errorf("stats are %+v", s)
	}
	// The flow that was idle the longest is the one that ended: the last still has
	// its own.
	r.send(udpFrame(dst, 2000, "again"))
	r.expect("the answer", func(frame []byte) bool { return strings.HasSuffix(string(frame), "again") })
	if s := r.Stats(); s.UDPFlows != 2000 {
		t.Errorf("a new flow was opened: %+v", s)
	}
}

// A guest that opens connections without end gets a bounded number of the host's
// sockets, and refusals, and its others go on.
func TestTCPFlowsAreBounded(t *testing.T) {
	t.Parallel()
	w := newWorld()
	w.listen(t, "203.0.113.5:80", echo)
	g := boot(t, w, nil)
	first := g.mustTCP(t, "203.0.113.5:80")
	defer func() { _ = first.Close() }()
	hold := make(chan struct{})
	w.mu.Lock()
	w.hold = hold
	w.mu.Unlock()
	before := len(w.dials())
	var all sync.WaitGroup
	var mu sync.Mutex
	refused := 0
	for range 1500 {
		all.Go(func() {
			addr, proto := full(netip.MustParseAddrPort("203.0.113.6:80"))
			conn, err := gonet.DialTCP(g.stack, addr, proto)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				_ = conn.Close()
			case strings.Contains(err.Error(), "refused"):
				refused++
			}
		})
	}
	eventually(t, "what is too much is refused", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return refused >= 1500-1023
	})
	if dials := len(w.dials()) - before; dials > 1023 {
		t.Errorf("%d dials", dials)
	}
	if live := g.Stats().Live; live > 1024 {
		t.Errorf("%d flows", live)
	}
	_, _ = first.Write([]byte("ping"))
	_ = first.SetDeadline(time.Now().Add(patience))
	if _, err := io.ReadFull(first, make([]byte, 4)); err != nil {
		t.Error(err)
	}
	close(hold)
	all.Wait()
	eventually(t, "the places are free again", func() bool { return g.Stats().Live == 1 })
}

// Handshakes that a guest begins and never ends, and connections that it never
// closes, give their places back.
func TestHalfOpenHandshakes(t *testing.T) {
	t.Parallel()
	w := newWorld()
	closed := make(chan struct{}, 100)
	w.listen(t, "203.0.113.5:80", func(conn *net.TCPConn) {
		_, _ = io.Copy(io.Discard, conn)
		closed <- struct{}{}
	})
	r := startRaw(t, w, nil)
	dst := netip.MustParseAddrPort("203.0.113.5:80")
	for port := range 20 {
		r.send(syn(dst, uint16(1000+port)))
		r.send(syn(dst, uint16(1000+port))) // once more, as kernels do
	}
	for range 20 {
		r.expect("the answer to a SYN", func(frame []byte) bool {
			s := tcpOf(frame)
			return s != nil && s.Flags() == header.TCPFlagSyn|header.TCPFlagAck
		})
	}
	if dials := len(w.dials()); dials != 20 {
		t.Errorf("%d dials", dials)
	}
	for range 20 {
		<-closed // without a word of the guest
	}
	eventually(t, "the places are free again", func() bool { return r.Stats().Live == 0 })
}

// The same ports again, right after a connection that the gateway ended first.
func TestPortReuse(t *testing.T) {
	t.Parallel()
	const dst = "203.0.113.5:80"
	w := newWorld()
	w.listen(t, dst, func(conn *net.TCPConn) {
		_, _ = io.ReadFull(conn, make([]byte, 4))
		_, _ = conn.Write([]byte("pong"))
	})
	g := boot(t, w, nil)
	addr, proto := full(netip.MustParseAddrPort(dst))
	for i := range 20 {
		var conn *gonet.TCPConn
		eventually(t, "the guest's own side is closed", func() bool {
			var err error
			conn, err = gonet.DialTCPWithBind(t.Context(), g.stack, tcpip.FullAddress{NIC: 1, Addr: tcpipAddr(guest4.Addr()), Port: 5555}, addr, proto)
			if err != nil && !strings.Contains(err.Error(), "in use") {
				t.Fatalf("connection %d: %v", i, err)
			}
			return err == nil
		})
		_, _ = conn.Write([]byte("ping"))
		_ = conn.SetDeadline(time.Now().Add(patience))
		if text, err := io.ReadAll(conn); err != nil || string(text) != "pong" {
			t.Fatalf("connection %d: %q, %v", i, text, err)
		}
		_ = conn.Close()
		eventually(t, "the flow ends", func() bool { return g.Stats().Live == 0 })
	}
}

// A guest that began anew uses a port whose old connection the gateway still has.
func TestPortReuseWithoutReset(t *testing.T) {
	t.Parallel()
	w := newWorld()
	w.listen(t, "203.0.113.5:80", func(conn *net.TCPConn) { _, _ = io.Copy(io.Discard, conn) })
	r := startRaw(t, w, nil)
	src, dst := netip.MustParseAddrPort("198.18.0.2:5555"), netip.MustParseAddrPort("203.0.113.5:80")
	handshake := func(seq uint32) header.TCP {
		frame := r.expect("the answer to a SYN", func(frame []byte) bool {
			s := tcpOf(frame)
			return s != nil && s.Flags().Contains(header.TCPFlagAck)
		})
		return tcpOf(frame)
	}
	send := func(flags header.TCPFlags, seq, ack uint32) {
		r.send(ip(src.Addr(), dst.Addr(), header.TCPProtocolNumber, segment(src, dst, flags, seq, ack)))
	}
	send(header.TCPFlagSyn, 1000, 0)
	answer := handshake(1000)
	send(header.TCPFlagAck, 1001, answer.SequenceNumber()+1)
	eventually(t, "the connection", func() bool { return r.Stats().TCPFlows == 1 })
	// The new kernel's SYN is challenged, which it answers with a reset (RFC 5961),
	// and its next SYN opens a new connection.
	send(header.TCPFlagSyn, 900000, 0)
	challenge := handshake(900000)
	if challenge.Flags().Contains(header.TCPFlagSyn) {
		t.Fatalf("the old connection answered %v", challenge.Flags())
	}
	send(header.TCPFlagRst, challenge.AckNumber(), 0)
	eventually(t, "the old connection ends", func() bool { return r.Stats().Live == 0 })
	send(header.TCPFlagSyn, 900000, 0)
	if answer := handshake(900000); answer.Flags() != header.TCPFlagSyn|header.TCPFlagAck || answer.AckNumber() != 900001 {
		t.Errorf("the new SYN was answered %v", answer.Flags())
	}
}

func TestPublish(t *testing.T) {
	t.Parallel()
	g := boot(t, newWorld(), nil)
	listen := func() (listener *gonet.TCPListener) {
		eventually(t, "the guest's port is free", func() bool {
			var err error
			listener, err = gonet.ListenTCP(g.stack, tcpip.FullAddress{NIC: 1, Addr: tcpipAddr(guest4.Addr()), Port: 8000}, ipv4.ProtocolNumber)
			return err == nil
		})
		return listener
	}
	var serving sync.WaitGroup
	serve := func(listener *gonet.TCPListener) {
		serving.Go(func() {
			for {
				conn, err := listener.Accept()
				if err != nil {
					return
				}
				serving.Go(func() {
					defer func() { _ = conn.Close() }()
					_, _ = io.Copy(conn, conn)
				})
			}
		})
	}
	host, err := g.Publish(netip.MustParseAddrPort("127.0.0.1:0"), 8000)
	if err != nil {
		t.Fatal(err)
	}
	talk := func() error {
		conn, err := net.DialTimeout("tcp", host.String(), patience)
		if err != nil {
			return err
		}
		defer func() { _ = conn.Close() }()
		_ = conn.SetDeadline(time.Now().Add(patience))
		data := strings.Repeat("published ", 50000)
		go func() {
			_, _ = io.WriteString(conn, data)
			_ = conn.(*net.TCPConn).CloseWrite()
		}()
		got, err := io.ReadAll(conn)
		if err == nil && string(got) != data {
			err = fmt.Errorf("got %d bytes of %d", len(got), len(data))
		}
		return err
	}
	// Nobody listens in the guest: a reset, not silence.
	if err := talk(); !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) {
		t.Errorf("without a listener: %v", err)
	}
	for range 2 { // the second time, the guest's program was started again
		listener := listen()
		serve(listener)
		var all sync.WaitGroup
		for range 10 {
			all.Go(func() {
				if err := talk(); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		_ = listener.Close()
		serving.Wait()
	}
	if list := g.Published(); len(list) != 1 || list[0] != (netstack.Forward{Host: host, Guest: 8000}) {
		t.Errorf("list is %v", list)
	}
	if _, err := g.Publish(host, 8001); err == nil {
		t.Error("published twice")
	}
	for _, bad := range []string{"0.0.0.0:0", "192.0.2.1:0", "[::]:0"} {
		if _, err := g.Publish(netip.MustParseAddrPort(bad), 8000); err == nil || !strings.Contains(err.Error(), "127.0.0.1") {
			t.Errorf("%s: %v", bad, err)
		}
	}
	// A connection ends with its port.
	listener := listen()
	serve(listener)
	conn, err := net.DialTimeout("tcp", host.String(), patience)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(patience))
	_, _ = conn.Write([]byte("x"))
	if _, err := io.ReadFull(conn, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	if err := g.Unpublish(host); err != nil {
		t.Error(err)
	}
	if _, err := conn.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("after Unpublish: %v", err)
	}
	if _, err := net.DialTimeout("tcp", host.String(), patience); err == nil {
		t.Error("still listening")
	}
	if err := g.Unpublish(host); err == nil {
		t.Error("unpublished twice")
	}
	_ = listener.Close()
	serving.Wait()
}

// Close ends everything, whatever is going on: dials, handshakes, flows,
// questions, published ports. TestMain looks for what is left.
func TestCloseInTheMiddle(t *testing.T) {
	t.Parallel()
	w := newWorld()
	w.listen(t, "203.0.113.5:80", echo)
	w.packets(t, "203.0.113.5:7", func([]byte) [][]byte { return nil })
	z := newZone()
	z.mute = true
	z.serve(t, w, server1)
	g := boot(t, w, func(o *netstack.Options) { o.ResolvConf = resolvConf(t, server1) })
	host, err := g.Publish(netip.MustParseAddrPort("127.0.0.1:0"), 8000)
	if err != nil {
		t.Fatal(err)
	}
	conn := g.mustTCP(t, "203.0.113.5:80")
	_, _ = conn.Write(make([]byte, 100<<10)) // and nobody reads what comes back
	datagrams := g.udp(t, "203.0.113.5:7")
	_, _ = datagrams.Write([]byte("x"))
	dns := g.mustTCP(t, "198.18.0.1:53")
	_, _ = dns.Write([]byte{0, 20})
	queries := g.udp(t, "198.18.0.1:53")
	_, _ = queries.Write(question(1, "a.test.", 1, 0))
	eventually(t, "the flows", func() bool { s := g.Stats(); return s.Live == 3 && s.DNSQueries == 1 })
	w.mu.Lock()
	w.hold = make(chan struct{}) // for ever
	w.mu.Unlock()
	var dialing sync.WaitGroup
	dialing.Go(func() {
		if conn, err := g.tcp(t, "203.0.113.5:80"); err == nil {
			_ = conn.Close()
		}
	})
	eventually(t, "the dial", func() bool { return g.Stats().Live == 4 })
	if outside, err := net.DialTimeout("tcp", host.String(), patience); err == nil {
		defer func() { _ = outside.Close() }() // or it was reset already: nobody listens in the guest
	}

	closed := make(chan error, 2)
	go func() { closed <- g.Close() }()
	go func() { closed <- g.Close() }()
	for range 2 {
		select {
		case err := <-closed:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(patience):
			t.Fatal("Close hangs")
		}
	}
	select {
	case <-g.Done():
	default:
		t.Error("not done")
	}
	if live := g.Stats().Live; live != 0 {
		t.Errorf("%d flows are left", live)
	}
	if _, err := g.Publish(netip.MustParseAddrPort("127.0.0.1:0"), 1); err == nil {
		t.Error("published after Close")
	}
	for _, ep := range g.stack.RegisteredEndpoints() {
		ep.Abort() // a guest whose network is gone
	}
	dialing.Wait()
}

func TestTheLinksEndIsTheGateways(t *testing.T) {
	t.Parallel()
	w := newWorld()
	w.listen(t, "203.0.113.5:80", echo)
	g := boot(t, w, nil)
	conn := g.mustTCP(t, "203.0.113.5:80")
	defer func() { _ = conn.Close() }()
	_ = g.conn.Close()
	<-g.Done()
	if g.logs.String() != "" {
		t.Errorf("log is %s", g.logs)
	}
}

// The host's network goes away and comes back: errors in the guest, then none.
func TestHostNetworkGoesAndComes(t *testing.T) {
	t.Parallel()
	const dst = "203.0.113.5:80"
	w := newWorld()
	w.listen(t, dst, echo)
	g := boot(t, w, nil)
	g.reaches(t, dst)
	for _, errno := range []error{unix.ENETUNREACH, unix.ENETDOWN, unix.EADDRNOTAVAIL, unix.EMFILE, unix.EPERM} {
		w.fail("tcp", dst, errno)
		if conn, err := g.tcp(t, dst); err == nil {
			_ = conn.Close()
			t.Errorf("%v: connected", errno)
		}
	}
	w.fail("tcp", dst, nil)
	g.reaches(t, dst)
}

// Only payload is activity: not what keeps a connection alive or opens it.
func TestActivity(t *testing.T) {
	t.Parallel()
	w := newWorld()
	w.listen(t, "203.0.113.5:80", echo)
	g := boot(t, w, nil)
	idle := func() time.Duration { return g.Stats().Idle }
	conn := g.mustTCP(t, "203.0.113.5:80")
	defer func() { _ = conn.Close() }()
	first := idle()
	eventually(t, "time passes", func() bool { return idle() > first+20*time.Millisecond })
	_ = conn.SetDeadline(time.Now().Add(patience))
	_, _ = conn.Write([]byte("ping"))
	_, _ = io.ReadFull(conn, make([]byte, 4))
	if now := idle(); now > first+20*time.Millisecond && now > 10*time.Second {
		t.Errorf("idle for %v after data", now)
	}
	if s := g.Stats(); s.BytesIn != 4 || s.BytesOut != 4 {
		t.Errorf("stats are %+v", s)
	}
}

func TestStartRefuses(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		change func(*netstack.Options)
		want   string
	}{
		"no MTU":        {func(o *netstack.Options) { o.MTU = 0 }, "MTU"},
		"large MTU":     {func(o *netstack.Options) { o.MTU = 70000 }, "MTU"},
		"one MAC":       {func(o *netstack.Options) { o.GuestMAC = o.GatewayMAC }, "MAC"},
		"other network": {func(o *netstack.Options) { o.Gateway4 = netip.MustParseAddr("10.0.0.1") }, "IPv4"},
		"half of IPv6":  {func(o *netstack.Options) { o.Gateway6 = netip.Addr{} }, "IPv6"},
		"off":           {func(o *netstack.Options) { o.Policy = egress.Policy{Mode: egress.Off} }, "off"},
		"bad policy":    {func(o *netstack.Options) { o.Policy = egress.Policy{} }, "mode is missing"},
		"no log":        {func(o *netstack.Options) { o.Log = nil }, "log"},
		"no addresses": {func(o *netstack.Options) {
			o.HostAddrs = func() ([]netip.Prefix, error) { return nil, unix.EACCES }
		}, "host's addresses"},
	} {
		opts := options(newWorld(), &logs{})
		test.change(&opts)
		ours, theirs := pair(t, netstack.Stream)
		opts.Link = ours
		if _, err := netstack.Start(opts); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v", name, err)
		}
		// The link is closed.
		_ = theirs.SetReadDeadline(time.Now().Add(patience))
		if _, err := theirs.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
			t.Errorf("%s: the link is %v", name, err)
		}
		_ = theirs.Close()
	}
	// IPv6 may be left out.
	opts := options(newWorld(), &logs{})
	opts.Guest6, opts.Gateway6 = netip.Prefix{}, netip.Addr{}
	ours, theirs := pair(t, netstack.Stream)
	defer func() { _ = theirs.Close() }()
	opts.Link = ours
	gateway, err := netstack.Start(opts)
	if err != nil {
		t.Fatal(err)
	}
	if err := gateway.Close(); err != nil {
		t.Error(err)
	}
}

// What is only an acknowledgement may wait for data to travel with, but not for
// long: it arrives although the host has nothing to say.
func TestAcknowledgementArrivesAlone(t *testing.T) {
	t.Parallel()
	w := newWorld()
	w.listen(t, "203.0.113.5:80", func(conn *net.TCPConn) { _, _ = io.Copy(io.Discard, conn) })
	r := startRaw(t, w, nil)
	src, dst := netip.MustParseAddrPort("198.18.0.2:5555"), netip.MustParseAddrPort("203.0.113.5:80")
	send := func(flags header.TCPFlags, seq, ack uint32, data string) {
		r.send(ip(src.Addr(), dst.Addr(), header.TCPProtocolNumber, append(segment(src, dst, flags, seq, ack), data...)))
	}
	send(header.TCPFlagSyn, 1000, 0, "")
	frame := r.expect("the answer to a SYN", func(frame []byte) bool { return tcpOf(frame) != nil })
	next := tcpOf(frame).SequenceNumber() + 1
	send(header.TCPFlagAck, 1001, next, "")
	for seq := uint32(1001); seq < 1101; seq += 10 {
		send(header.TCPFlagAck|header.TCPFlagPsh, seq, next, "0123456789")
		r.expect("an acknowledgement", func(frame []byte) bool {
			s := tcpOf(frame)
			return s != nil && s.Flags() == header.TCPFlagAck && s.AckNumber() == seq+10
		})
	}
}
