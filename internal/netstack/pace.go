package netstack

import (
	"bytes"
	"sync/atomic"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

// On a link with little traffic, what counts is how soon a packet arrives and how
// few packets there are, each of which interrupts the guest: then packets are
// written by who sends them, and a mere acknowledgement waits for data to travel
// with. Under load what counts is that many packets are written at once, and that
// the guest learns early that it may go on.
const (
	paceWindow = time.Millisecond
	// slowBytes in a paceWindow is little traffic.
	slowBytes = 16 << 10
	// holdTime is how long an acknowledgement waits at least, and half of how long
	// it waits at most.
	holdTime = time.Millisecond
)

// rate counts bytes in the current paceWindow. Its two halves, add and slow, are
// safe to be called from one goroutine each at the same time.
type rate struct {
	window atomic.Int64 // number of the window that bytes is of
	bytes  atomic.Int64
}

func (r *rate) add(n int) {
	window := time.Now().UnixNano() / int64(paceWindow)
	if r.window.Swap(window) != window {
		r.bytes.Store(0)
	}
	r.bytes.Add(int64(n))
}

// slow counts n more bytes and tells whether there was little traffic, with them.
func (r *rate) slow(n int) bool {
	r.add(n)
	return r.little()
}

func (r *rate) little() bool {
	return r.bytes.Load() <= slowBytes || time.Now().UnixNano()/int64(paceWindow) > r.window.Load()+1
}

// heldACK is an acknowledgement without data that waits to be overtaken. The
// link's mutex guards it.
type heldACK struct {
	packet *stack.PacketBuffer
	// timer runs on as long as packets are being held: to set it for each would
	// wake a thread each time.
	timer   *time.Timer
	running bool
	used    bool // something was held since the timer was set
	old     bool // packet was held already when the timer was set
}

// stop forgets it.
func (h *heldACK) stop() {
	if h.packet != nil {
		h.packet.DecRef()
		h.packet = nil
	}
	if h.timer != nil {
		h.timer.Stop()
	}
}

// hold keeps frame back when it is an acknowledgement on a link with little
// traffic. What is held already is forgotten when frame acknowledges as much, and
// queued before it otherwise. The caller has the link's mutex.
func (l *link) hold(frame outgoing) bool {
	h := &l.held
	if h.packet != nil {
		if frame.packet != nil && overtakes(frame.packet, h.packet) {
			h.packet.DecRef()
		} else {
			l.enqueue(outgoing{packet: h.packet})
			h.old = false
		}
		h.packet = nil
	} else {
		h.old = false
	}
	if frame.packet == nil || !mereACK(frame.packet) || !l.arrived.little() || len(l.queue) > 0 {
		return false
	}
	h.packet, h.used = frame.packet, true
	if !h.running {
		h.running = true
		if h.timer == nil {
			h.timer = time.AfterFunc(holdTime, l.letGo)
		} else {
			h.timer.Reset(holdTime)
		}
	}
	return true
}

// letGo sends an acknowledgement that was held for as long as the timer runs, and
// sets that again while there are any.
func (l *link) letGo() {
	l.mu.Lock()
	h := &l.held
	late := h.packet != nil && h.old
	if late {
		l.enqueue(outgoing{packet: h.packet})
		h.packet = nil
	}
	h.running = h.used && !l.closed
	h.old, h.used = h.packet != nil, h.packet != nil
	if h.running {
		h.timer.Reset(holdTime)
	}
	l.mu.Unlock()
	if late {
		l.notify()
	}
}

// mereACK tells whether a packet does nothing but acknowledge, without more
// options than time stamps: one with gaps (SACK) has to arrive soon.
func mereACK(packet *stack.PacketBuffer) bool {
	const timestamps = header.TCPMinimumSize + 12
	segment := header.TCP(packet.TransportHeader().Slice())
	return packet.TransportProtocolNumber == header.TCPProtocolNumber && len(segment) >= header.TCPMinimumSize &&
		segment.Flags() == header.TCPFlagAck && packet.Data().Size() == 0 && segment.DataOffset() <= timestamps
}

// overtakes tells whether packet is of the same connection as the acknowledgement
// held, and so acknowledges as much.
func overtakes(packet, held *stack.PacketBuffer) bool {
	if packet.TransportProtocolNumber != header.TCPProtocolNumber || packet.NetworkProtocolNumber != held.NetworkProtocolNumber {
		return false
	}
	from, to := 12, 20 // both addresses
	if held.NetworkProtocolNumber == header.IPv6ProtocolNumber {
		from, to = 8, 40
	}
	a, b := packet.TransportHeader().Slice(), held.TransportHeader().Slice()
	return len(a) >= header.TCPMinimumSize && header.TCP(a).Flags().Contains(header.TCPFlagAck) &&
		bytes.Equal(a[:4], b[:4]) && // both ports
		bytes.Equal(packet.NetworkHeader().Slice()[from:to], held.NetworkHeader().Slice()[from:to])
}
