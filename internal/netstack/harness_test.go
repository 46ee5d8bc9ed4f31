package netstack_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/egress"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/netstack"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds every wait of a test; none takes nearly as long.
const patience = 30 * time.Second

// The addresses of a test's VM.
var (
	guestMAC   = net.HardwareAddr{0x5a, 0x94, 0xef, 0x18, 0, 2}
	gatewayMAC = net.HardwareAddr{0x5a, 0x94, 0xef, 0x18, 0, 1}
	guest4     = netip.MustParsePrefix("198.18.0.2/30")
	gateway4   = netip.MustParseAddr("198.18.0.1")
	guest6     = netip.MustParsePrefix("fd9c:3f1e:7a52::2/64")
	gateway6   = netip.MustParseAddr("fd9c:3f1e:7a52::1")
)

// A world is what lies behind the gateway: destinations that lead to servers of
// the test, and a record of all that the gateway dialled.
type world struct {
	mu     sync.Mutex
	routes map[string]string // "tcp 192.0.2.1:80" to a loopback address
	fails  map[string]error
	dialed []string
	host   []netip.Prefix // the host's addresses
	// local is the source address of connections; where it is not valid, the
	// destination's, as if that was the host itself.
	local netip.Addr
	hold  chan struct{} // when set, dials wait until it is closed
}

func newWorld() *world {
	return &world{
		routes: map[string]string{}, fails: map[string]error{},
		host:  []netip.Prefix{netip.MustParsePrefix("192.0.2.77/24"), netip.MustParsePrefix("127.0.0.1/8")},
		local: netip.MustParseAddr("192.0.2.77"),
	}
}

func (w *world) route(network, dst, to string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.routes[network+" "+dst] = to
}

func (w *world) fail(network, dst string, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err == nil {
		delete(w.fails, network+" "+dst)
		return
	}
	w.fails[network+" "+dst] = &net.OpError{Op: "dial", Net: network, Err: os.NewSyscallError("connect", err)}
}

func (w *world) dials() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.dialed)
}

// seen is a connection that claims to lead elsewhere than it does.
type seen struct {
	net.Conn
	local, remote net.Addr
}

func (s seen) LocalAddr() net.Addr  { return s.local }
func (s seen) RemoteAddr() net.Addr { return s.remote }

type seenTCP struct {
	*net.TCPConn
	local, remote net.Addr
}

func (s seenTCP) LocalAddr() net.Addr  { return s.local }
func (s seenTCP) RemoteAddr() net.Addr { return s.remote }

type seenUDP struct {
	*net.UDPConn
	local, remote net.Addr
}

func (s seenUDP) LocalAddr() net.Addr  { return s.local }
func (s seenUDP) RemoteAddr() net.Addr { return s.remote }

func (w *world) dial(ctx context.Context, network, address string) (net.Conn, error) {
	w.mu.Lock()
	key := network + " " + address
	w.dialed = append(w.dialed, key)
	to, routed := w.routes[key]
	err := w.fails[key]
	hold, local := w.hold, w.local
	w.mu.Unlock()
	if hold != nil {
		select {
		case <-hold:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	switch {
	case err != nil:
		return nil, err
	case !routed && strings.HasPrefix(address, "127.0.0.1:"), !routed && strings.HasPrefix(address, "[::1]:"):
		to = address // the gateway means the host's loopback
	case !routed:
		return nil, &net.OpError{Op: "dial", Net: network, Err: os.NewSyscallError("connect", unix.ENETUNREACH)}
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, network, to)
	if err != nil {
		return nil, err
	}
	dst := netip.MustParseAddrPort(address)
	if !local.IsValid() {
		local = dst.Addr()
	}
	src := netip.AddrPortFrom(local, 40000)
	switch conn := conn.(type) {
	case *net.TCPConn:
		return seenTCP{conn, net.TCPAddrFromAddrPort(src), net.TCPAddrFromAddrPort(dst)}, nil
	case *net.UDPConn:
		return seenUDP{conn, net.UDPAddrFromAddrPort(src), net.UDPAddrFromAddrPort(dst)}, nil
	}
	return seen{conn, net.TCPAddrFromAddrPort(src), net.TCPAddrFromAddrPort(dst)}, nil
}

func (w *world) addrs() ([]netip.Prefix, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.host), nil
}

// listen serves each connection to dst by f.
func (w *world) listen(t testing.TB, dst string, f func(*net.TCPConn)) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var conns sync.WaitGroup
	var mu sync.Mutex
	var open []net.Conn
	conns.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			open = append(open, conn)
			mu.Unlock()
			conns.Go(func() {
				defer func() { _ = conn.Close() }()
				f(conn.(*net.TCPConn))
			})
		}
	})
	t.Cleanup(func() {
		_ = listener.Close()
		mu.Lock()
		for _, conn := range open {
			_ = conn.Close()
		}
		mu.Unlock()
		conns.Wait()
	})
	w.route("tcp", dst, listener.Addr().String())
	return listener.Addr().String()
}

// packets serves each datagram to dst by f, which returns the answers.
func (w *world) packets(t testing.TB, dst string, f func([]byte) [][]byte) {
	t.Helper()
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var done sync.WaitGroup
	done.Go(func() {
		buf := make([]byte, 1<<16)
		for {
			n, from, err := conn.ReadFrom(buf)
			if err != nil {
				return
			}
			for _, answer := range f(slices.Clone(buf[:n])) {
				_, _ = conn.WriteTo(answer, from)
			}
		}
	})
	t.Cleanup(func() {
		_ = conn.Close()
		done.Wait()
	})
	w.route("udp", dst, conn.LocalAddr().String())
}

// logs collects log records as text.
type logs struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *logs) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logs) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// wire is a gateway with its link's other end.
type wire struct {
	*netstack.Gateway
	conn  net.Conn
	logs  *logs
	world *world
}

func options(w *world, l *logs) netstack.Options {
	return netstack.Options{
		ID: "vm-test", MTU: netstack.SafeMTU,
		GuestMAC: guestMAC, GatewayMAC: gatewayMAC,
		Guest4: guest4, Gateway4: gateway4, Guest6: guest6, Gateway6: gateway6,
		Policy: egress.Policy{Mode: egress.Open},
		Dial:   w.dial, HostAddrs: w.addrs,
		ResolvConf: "/nonexistent",
		Log:        slog.New(slog.NewTextHandler(l, nil)),
	}
}

// start runs a gateway for the test's time.
func start(t testing.TB, w *world, change func(*netstack.Options)) *wire {
	t.Helper()
	l := &logs{}
	opts := options(w, l)
	if change != nil {
		change(&opts)
	}
	ours, theirs := pair(t, opts.Framing)
	opts.Link = ours
	gateway, err := netstack.Start(opts)
	if err != nil {
		_ = theirs.Close()
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = theirs.Close()
		if err := gateway.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return &wire{gateway, theirs, l, w}
}

func pair(t testing.TB, framing netstack.Framing) (a, b net.Conn) {
	t.Helper()
	kind := unix.SOCK_STREAM
	if framing == netstack.Datagram {
		kind = unix.SOCK_DGRAM
	}
	syscall.ForkLock.RLock()
	fds, err := unix.Socketpair(unix.AF_UNIX, kind, 0)
	if err == nil {
		unix.CloseOnExec(fds[0])
		unix.CloseOnExec(fds[1])
	}
	syscall.ForkLock.RUnlock()
	if err != nil {
		t.Fatal(err)
	}
	conns := [2]net.Conn{}
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "link")
		if conns[i], err = net.FileConn(f); err != nil {
			t.Fatal(err)
		}
		_ = f.Close()
	}
	return conns[0], conns[1]
}

// resolvConf writes a resolv.conf that names servers.
func resolvConf(t testing.TB, servers ...string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "resolv.conf")
	writeConf(t, path, servers...)
	return path
}

func writeConf(t testing.TB, path string, servers ...string) {
	t.Helper()
	var text strings.Builder
	for _, server := range servers {
		fmt.Fprintf(&text, "nameserver %s\n", server)
	}
	if err := os.WriteFile(path, []byte(text.String()), 0o600); err != nil {
		t.Fatal(err)
	}
}

// eventually waits until f holds.
func eventually(t testing.TB, what string, f func() bool) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for !f() {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %v", what, patience)
		}
		pause := time.NewTimer(5 * time.Millisecond)
		<-pause.C
	}
}

func tcpipAddr(a netip.Addr) tcpip.Address { return tcpip.AddrFromSlice(a.AsSlice()) }
