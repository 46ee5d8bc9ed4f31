// Package netstack is the network of one VM: a gateway in user space that ends
// the guest's flows and opens them again as sockets of the host, as far as the
// egress policy allows. Nothing of the guest's packets reaches the host's network
// but the payload of TCP and UDP, and DNS questions asked in its stead.
//
// The link carries Ethernet frames (QEMU's stream netdev, libkrun's unixstream
// and unixgram); gVisor's stack answers ARP and neighbour discovery, puts IP
// fragments together and speaks TCP with the guest.
package netstack

import (
	"net/netip"
	"sync"
	"time"
)

// Gateway is the running network of one VM. It is safe for concurrent use.
type Gateway struct {
	opts Options
	done chan struct{}
	once sync.Once
}

// Start runs the gateway until Close, or until the link ends. On error the link
// is closed.
func Start(opts Options) (*Gateway, error) {
	if err := opts.validate(); err != nil {
		if opts.Link != nil {
			_ = opts.Link.Close()
		}
		return nil, err
	}
	return &Gateway{opts: opts, done: make(chan struct{})}, nil
}

// Close ends all flows and published ports, closes the link, and returns when
// nothing of the gateway runs any more. Further calls do nothing.
func (g *Gateway) Close() error {
	var err error
	g.once.Do(func() {
		err = g.opts.Link.Close()
		close(g.done)
	})
	return err
}

// Done is closed when the link has ended or Close was called.
func (g *Gateway) Done() <-chan struct{} { return g.done }

// Forward is one published port.
type Forward struct {
	// Host is the loopback address and port of the host that accepts.
	Host netip.AddrPort
	// Guest is the TCP port of the guest that is connected to.
	Guest uint16
}

// Stats are totals since Start, of payload alone: TCP data, UDP data, DNS. What
// acknowledges, keeps alive or looks for neighbours does not count.
type Stats struct {
	// BytesIn came into the guest, BytesOut left it. They do not count DNS.
	BytesIn, BytesOut uint64
	// TCPFlows and UDPFlows were opened, DNSQueries asked.
	TCPFlows, UDPFlows, DNSQueries uint64
	// Denied counts what the policy denied: flows, names, packets that lie about
	// their source.
	Denied uint64
	// Live is how many flows are open.
	Live int
	// Idle is the time since the last payload either way, or since Start, by the
	// monotonic clock.
	Idle time.Duration
}
