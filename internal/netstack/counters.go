package netstack

import (
	"sync/atomic"
	"time"
)

// counters are a gateway's totals of payload, and the time of the last of it.
type counters struct {
	start                          time.Time
	bytesIn, bytesOut              atomic.Uint64
	tcpFlows, udpFlows, dnsQueries atomic.Uint64
	last                           atomic.Int64 // nanoseconds after start
}

// since is the monotonic time since the start.
func (c *counters) since() time.Duration { return time.Since(c.start) }

func (c *counters) touch() { c.last.Store(int64(c.since())) }

// in counts n bytes to the guest, out n bytes from it.
func (c *counters) in(n int) {
	if n > 0 {
		c.bytesIn.Add(uint64(n))
		c.touch()
	}
}

func (c *counters) out(n int) {
	if n > 0 {
		c.bytesOut.Add(uint64(n))
		c.touch()
	}
}

func (c *counters) query() {
	c.dnsQueries.Add(1)
	c.touch()
}
