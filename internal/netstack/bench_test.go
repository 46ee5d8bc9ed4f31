package netstack_test

import (
	"fmt"
	"io"
	"net"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/netstack"
)

// The guest of these is a stack in the same process, which takes as much of the
// CPU as the gateway: a real guest sees more.
func BenchmarkTCP(b *testing.B) {
	for _, mtu := range []int{netstack.SafeMTU, netstack.MaxMTU} {
		b.Run(fmt.Sprintf("to guest/mtu %d", mtu), func(b *testing.B) {
			w := newWorld()
			w.listen(b, "203.0.113.5:80", func(conn *net.TCPConn) {
				_, _ = io.Copy(conn, zeros{})
			})
			g := boot(b, w, func(o *netstack.Options) { o.MTU = mtu })
			conn := g.mustTCP(b, "203.0.113.5:80")
			buf := make([]byte, 64<<10)
			b.SetBytes(int64(len(buf)))
			for b.Loop() {
				if _, err := io.ReadFull(conn, buf); err != nil {
					b.Fatal(err)
				}
			}
			_ = conn.Close()
		})
		b.Run(fmt.Sprintf("from guest/mtu %d", mtu), func(b *testing.B) {
			w := newWorld()
			w.listen(b, "203.0.113.5:80", func(conn *net.TCPConn) { _, _ = io.Copy(io.Discard, conn) })
			g := boot(b, w, func(o *netstack.Options) { o.MTU = mtu })
			conn := g.mustTCP(b, "203.0.113.5:80")
			buf := make([]byte, 64<<10)
			b.SetBytes(int64(len(buf)))
			for b.Loop() {
				if _, err := conn.Write(buf); err != nil {
					b.Fatal(err)
				}
			}
			_ = conn.Close()
		})
		b.Run(fmt.Sprintf("round trip/mtu %d", mtu), func(b *testing.B) {
			w := newWorld()
			w.listen(b, "203.0.113.5:80", echo)
			g := boot(b, w, func(o *netstack.Options) { o.MTU = mtu })
			conn := g.mustTCP(b, "203.0.113.5:80")
			buf := make([]byte, 64)
			for b.Loop() {
				if _, err := conn.Write(buf); err != nil {
					b.Fatal(err)
				}
				if _, err := io.ReadFull(conn, buf); err != nil {
					b.Fatal(err)
				}
			}
			_ = conn.Close()
		})
	}
}

func BenchmarkConnect(b *testing.B) {
	w := newWorld()
	w.listen(b, "203.0.113.5:80", echo)
	g := boot(b, w, nil)
	for b.Loop() {
		conn := g.mustTCP(b, "203.0.113.5:80")
		_ = conn.CloseWrite()
		if _, err := io.ReadAll(conn); err != nil {
			b.Fatal(err)
		}
		_ = conn.Close()
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }
