package netstack_test

import (
	"bytes"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/netstack"
)

func TestTCPBothWaysWithHalfClose(t *testing.T) {
	t.Parallel()
	for name, dst := range map[string]string{"IPv4": "203.0.113.5:80", "IPv6": "[2001:db8::5]:80"} {
		for _, framing := range []netstack.Framing{netstack.Stream, netstack.Datagram} {
			for _, mtu := range []int{netstack.MinMTU, netstack.SafeMTU, netstack.MaxMTU} {
				if framing == netstack.Datagram && mtu == netstack.MaxMTU {
					mtu = 9000 // what a socket of datagrams bears everywhere
				}
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					w := newWorld()
					w.listen(t, dst, echo)
					g := boot(t, w, func(o *netstack.Options) { o.MTU, o.Framing = mtu, framing })
					conn := g.mustTCP(t, dst)
					defer func() { _ = conn.Close() }()
					data := make([]byte, 3<<20)
					_, _ = rand.Read(data)
					var sending sync.WaitGroup
					sending.Go(func() {
						if _, err := conn.Write(data); err != nil {
							t.Error(err)
						}
						if err := conn.CloseWrite(); err != nil {
							t.Error(err)
						}
					})
					_ = conn.SetReadDeadline(time.Now().Add(patience))
					got, err := io.ReadAll(conn)
					sending.Wait()
					if err != nil || !bytes.Equal(got, data) {
						t.Fatalf("got %d bytes of %d, %v\n%s", len(got), len(data), err, g.logs)
					}
					_ = conn.Close()
					eventually(t, "the flow ends", func() bool { return g.Stats().Live == 0 })
					stats := g.Stats()
					if stats.BytesIn != uint64(len(data)) || stats.BytesOut != uint64(len(data)) || stats.TCPFlows != 1 || stats.Denied != 0 {
						t.Errorf("stats are %+v", stats)
					}
				})
			}
		}
	}
}

func TestHostEndsFirst(t *testing.T) {
	t.Parallel()
	const dst = "203.0.113.5:80"
	w := newWorld()
	got := make(chan string, 1)
	w.listen(t, dst, func(conn *net.TCPConn) {
		_, _ = conn.Write([]byte("hello"))
		_ = conn.CloseWrite()
		rest, _ := io.ReadAll(conn)
		got <- string(rest)
	})
	g := boot(t, w, nil)
	conn := g.mustTCP(t, dst)
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(patience))
	if text, err := io.ReadAll(conn); err != nil || string(text) != "hello" {
		t.Fatalf("read %q, %v", text, err)
	}
	// The guest's direction is still open.
	if _, err := conn.Write([]byte("late")); err != nil {
		t.Fatal(err)
	}
	_ = conn.CloseWrite()
	if text := <-got; text != "late" {
		t.Errorf("the host got %q", text)
	}
}

func TestRefusedIsRefusedAtOnce(t *testing.T) {
	t.Parallel()
	w := newWorld()
	w.fail("tcp", "203.0.113.5:81", unix.ECONNREFUSED)
	w.fail("tcp", "[2001:db8::5]:81", unix.ECONNREFUSED)
	w.fail("tcp", "203.0.113.6:80", unix.EHOSTUNREACH)
	w.fail("tcp", "203.0.113.7:80", unix.ETIMEDOUT)
	w.fail("tcp", "[2001:db8::6]:80", unix.ENETUNREACH)
	g := boot(t, w, nil)
	for dst, want := range map[string]string{
		"203.0.113.5:81":   "refused",
		"[2001:db8::5]:81": "refused",
		"203.0.113.6:80":   "host",
		"203.0.113.7:80":   "host",
		"198.51.100.1:80":  "unreachable", // no route at all
		"[2001:db8::6]:80": "unreachable",
	} {
		conn, err := g.tcp(t, dst)
		if err == nil {
			_ = conn.Close()
			t.Errorf("%s: connected", dst)
			continue
		}
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", dst, err, want)
		}
	}
	// The answer comes a moment before the flow's place is free.
	eventually(t, "no flow is left", func() bool { return g.Stats().Live == 0 })
}

func TestResetPassesBothWays(t *testing.T) {
	t.Parallel()
	const dst = "203.0.113.5:80"
	w := newWorld()
	conns := make(chan *net.TCPConn, 1)
	over := make(chan struct{})
	w.listen(t, dst, func(conn *net.TCPConn) {
		conns <- conn
		<-over
	})
	t.Cleanup(func() { close(over) })
	g := boot(t, w, nil)

	conn := g.mustTCP(t, dst)
	_, _ = conn.Write([]byte("x"))
	host := <-conns
	_ = host.SetLinger(0)
	_ = host.Close()
	_ = conn.SetReadDeadline(time.Now().Add(patience))
	if _, err := conn.Read(make([]byte, 1)); err == nil || errors.Is(err, io.EOF) || !strings.Contains(err.Error(), "reset") {
		t.Errorf("the host's reset is %v in the guest", err)
	}
	_ = conn.Close()
	eventually(t, "the flow ends", func() bool { return g.Stats().Live == 0 })

	conn = g.mustTCP(t, dst)
	_, _ = conn.Write([]byte("x"))
	host = <-conns
	if _, err := io.ReadFull(host, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	_, _ = host.Write([]byte("unread")) // unread data makes the guest's close a reset
	eventually(t, "the data arrives", func() bool { return g.Stats().BytesIn >= 6 })
	for _, ep := range g.stack.RegisteredEndpoints() {
		ep.Abort()
	}
	_ = host.SetReadDeadline(time.Now().Add(patience))
	if _, err := host.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("the guest's reset is %v on the host", err)
	}
	eventually(t, "the flow ends", func() bool { return g.Stats().Live == 0 })
}

func TestSlowReaderHoldsTheSender(t *testing.T) {
	t.Parallel()
	const dst = "203.0.113.5:80"
	w := newWorld()
	start := make(chan struct{})
	sum := make(chan int64, 1)
	w.listen(t, dst, func(conn *net.TCPConn) {
		<-start
		n, _ := io.Copy(io.Discard, conn)
		sum <- n
	})
	g := boot(t, w, nil)
	conn := g.mustTCP(t, dst)
	defer func() { _ = conn.Close() }()
	const size = 32 << 20
	chunk := make([]byte, 64<<10)
	sent := make(chan struct{})
	var sending sync.WaitGroup
	sending.Go(func() {
		defer close(sent)
		for range size / len(chunk) {
			if _, err := conn.Write(chunk); err != nil {
				t.Error(err)
				return
			}
		}
		_ = conn.CloseWrite()
	})
	// The sender stops when the buffers in between are full, which have bounds.
	last := uint64(0)
	eventually(t, "the sender stands still", func() bool {
		timer := time.NewTimer(100 * time.Millisecond)
		<-timer.C
		now := g.Stats().BytesOut
		same := now == last && now > 0
		last = now
		return same
	})
	select {
	case <-sent:
		t.Error("everything was sent although nobody reads")
	default:
	}
	// Another flow goes on meanwhile.
	w.listen(t, "203.0.113.6:80", echo)
	other := g.mustTCP(t, "203.0.113.6:80")
	_, _ = other.Write([]byte("ping"))
	_ = other.SetReadDeadline(time.Now().Add(patience))
	if _, err := io.ReadFull(other, make([]byte, 4)); err != nil {
		t.Error(err)
	}
	_ = other.Close()
	close(start)
	if n := <-sum; n != size {
		t.Errorf("%d bytes arrived of %d", n, size)
	}
	sending.Wait()
}

func TestParallelConnections(t *testing.T) {
	t.Parallel()
	const dst = "203.0.113.5:80"
	w := newWorld()
	w.listen(t, dst, echo)
	g := boot(t, w, nil)
	var all sync.WaitGroup
	for range 200 {
		all.Go(func() {
			conn, err := g.tcp(t, dst)
			if err != nil {
				t.Error(err)
				return
			}
			defer func() { _ = conn.Close() }()
			data := make([]byte, 20<<10)
			_, _ = rand.Read(data)
			_ = conn.SetDeadline(time.Now().Add(patience))
			if _, err := conn.Write(data); err != nil {
				t.Error(err)
			}
			_ = conn.CloseWrite()
			if got, err := io.ReadAll(conn); err != nil || !bytes.Equal(got, data) {
				t.Errorf("got %d bytes, %v", len(got), err)
			}
		})
	}
	all.Wait()
	eventually(t, "all flows end", func() bool { return g.Stats().Live == 0 })
}
