package netstack

import (
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/egress"
)

const (
	// logInterval is how often one destination is logged at most.
	logInterval = time.Minute
	// maxLogged is how many destinations are told apart; while all are in use,
	// denials of others are counted alone, and one record says so.
	maxLogged = 256
)

// denials counts what was denied and logs each destination once in logInterval.
type denials struct {
	log   *slog.Logger
	total atomic.Uint64

	mu   sync.Mutex
	seen map[denied]time.Time
}

// denied is what a record is about: Dst is an address, with or without a port, or
// a DNS name.
type denied struct {
	proto, dst string
	reason     egress.Reason
}

func newDenials(log *slog.Logger) *denials {
	return &denials{log: log, seen: map[denied]time.Time{}}
}

func (d *denials) addr(proto string, dst netip.AddrPort, reason egress.Reason) {
	d.total.Add(1)
	text := dst.String()
	switch {
	case !dst.Addr().IsValid():
		text = ""
	case dst.Port() == 0:
		text = dst.Addr().String()
	}
	d.record(denied{proto, text, reason})
}

func (d *denials) name(name string, reason egress.Reason) {
	d.total.Add(1)
	d.record(denied{"dns", name, reason})
}

func (d *denials) record(what denied) {
	if !d.first(what) {
		return
	}
	d.log.Warn("the network policy denied a destination", "proto", what.proto, "destination", what.dst, "reason", string(what.reason))
}

// first tells whether what is to be logged now.
func (d *denials) first(what denied) bool {
	now := time.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	if last, ok := d.seen[what]; ok && now.Sub(last) < logInterval {
		return false
	}
	if len(d.seen) >= maxLogged {
		for old, last := range d.seen {
			if now.Sub(last) >= logInterval {
				delete(d.seen, old)
			}
		}
	}
	if len(d.seen) >= maxLogged {
		rest := denied{reason: "more destinations than are logged"}
		if last, ok := d.seen[rest]; ok && now.Sub(last) < logInterval {
			return false
		}
		d.seen[rest] = now
		d.log.Warn("the network policy denies more destinations than are logged one by one", "logged", maxLogged)
		return false
	}
	d.seen[what] = now
	return true
}
