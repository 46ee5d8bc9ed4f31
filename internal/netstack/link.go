package netstack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"syscall"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

const (
	// lengthSize is what stands before each frame of a Stream.
	lengthSize = 4
	// maxQueuedBytes and maxQueuedFrames bound what waits for a guest that does not
	// read; what comes beyond is lost, as on any network.
	maxQueuedBytes  = 4 << 20
	maxQueuedFrames = 4096
	// batchSize is the most that is written, or read, at once.
	batchSize = 256 << 10
	// socketBuffer is what the kernel may hold of each direction.
	socketBuffer = 1 << 20
)

// errLongFrame ends a link: after a length that no frame has, nothing that
// follows can be trusted to be one.
var errLongFrame = errors.New("the guest's frame is longer than its MTU allows")

// link is the wire to the guest, as gVisor wants a network device to be. Packets
// go out through a queue and one goroutine, so that nobody who sends waits for
// the guest; while there is little to send, who sends also writes, which saves
// the way through another goroutine.
type link struct {
	conn     io.ReadWriteCloser
	raw      syscall.RawConn // nil where conn is no socket, or not a stream
	framing  Framing
	mtu      uint32
	local    tcpip.LinkAddress
	guest    tcpip.LinkAddress
	dispatch stack.NetworkDispatcher
	wake     chan struct{} // holds a token when there is something for write to do
	arrived  rate          // what came from the guest

	mu      sync.Mutex
	queue   []outgoing
	queued  int // bytes
	held    heldACK
	sent    rate // what was written by those who sent
	writing bool // somebody is using batch, buf and rest
	closed  bool

	batch []outgoing
	buf   []byte
	rest  []byte // of what was written in part
}

// outgoing is one frame: a packet, or bytes that are a frame already.
type outgoing struct {
	packet *stack.PacketBuffer
	raw    []byte
}

func (o outgoing) size() int {
	if o.packet != nil {
		return o.packet.Size()
	}
	return len(o.raw)
}

func (o outgoing) release() {
	if o.packet != nil {
		o.packet.DecRef()
	}
}

func newLink(opts Options) *link {
	if conn, ok := opts.Link.(interface {
		SetReadBuffer(int) error
		SetWriteBuffer(int) error
	}); ok {
		// What the system grants is enough; more is only faster.
		_ = conn.SetReadBuffer(socketBuffer)
		_ = conn.SetWriteBuffer(socketBuffer)
	}
	l := &link{
		conn:    opts.Link,
		framing: opts.Framing,
		mtu:     uint32(opts.MTU),
		local:   tcpip.LinkAddress(opts.GatewayMAC),
		guest:   tcpip.LinkAddress(opts.GuestMAC),
		wake:    make(chan struct{}, 1),
		buf:     make([]byte, 0, batchSize),
	}
	if l.framing == Stream {
		l.conn = calm(opts.Link)
		l.raw = rawConn(l.conn)
	}
	return l
}

// close ends write and, by closing the connection, read.
func (l *link) close() error {
	l.mu.Lock()
	l.closed = true
	l.held.stop()
	l.mu.Unlock()
	l.notify()
	return l.conn.Close()
}

func (l *link) notify() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// send queues one frame and takes it over; a full queue drops it.
func (l *link) send(frame outgoing) bool {
	l.mu.Lock()
	if l.closed || len(l.queue) >= maxQueuedFrames || l.queued+frame.size() > maxQueuedBytes {
		l.mu.Unlock()
		return false
	}
	if l.hold(frame) {
		l.mu.Unlock()
		return true
	}
	l.enqueue(frame)
	if l.writing {
		l.mu.Unlock() // who writes sees to it
		return true
	}
	if l.raw == nil || len(l.rest) > 0 || !l.sent.slow(l.queued) {
		l.mu.Unlock()
		l.notify()
		return true
	}
	l.take()
	l.mu.Unlock()
	l.writeNow()
	return true
}

func (l *link) enqueue(frame outgoing) {
	l.queue = append(l.queue, frame)
	l.queued += frame.size()
}

// take makes the caller the one who writes, and gives it what is queued as batch.
func (l *link) take() {
	l.writing = true
	l.batch, l.queue = l.queue, l.batch[:0]
	l.queued = 0
}

// done ends what take began.
func (l *link) done() {
	clear(l.batch)
	l.mu.Lock()
	l.writing = false
	more := len(l.queue) > 0 || len(l.rest) > 0 || l.closed // the end is something to do
	l.mu.Unlock()
	if more {
		l.notify()
	}
}

// writeNow writes the batch as far as that does not block; write does the rest,
// and finds any error.
func (l *link) writeNow() {
	defer l.done()
	l.buf = l.buf[:0]
	for _, frame := range l.batch {
		l.buf = l.encode(l.buf, frame)
	}
	n, _ := writeNow(l.raw, l.buf)
	l.rest = append(l.rest, l.buf[n:]...)
}

// write writes what is queued until the link is closed or breaks.
func (l *link) write() error {
	defer l.drop()
	for range l.wake {
		l.mu.Lock()
		closed := l.closed
		if l.writing {
			l.mu.Unlock() // who writes notifies when it is done
			continue
		}
		l.take()
		l.mu.Unlock()
		err := l.writeBatch()
		l.done()
		switch {
		case closed:
			return nil
		case err != nil:
			return err
		}
	}
	return nil
}

// drop forgets what is queued once nobody sends it any more.
func (l *link) drop() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	l.held.stop()
	for _, frame := range l.queue {
		frame.release()
	}
	l.queue = nil
}

// encode appends a frame as it lies on the link, and lets go of it.
func (l *link) encode(buf []byte, frame outgoing) []byte {
	if l.framing == Stream {
		buf = binary.BigEndian.AppendUint32(buf, uint32(frame.size()))
	}
	if frame.packet == nil {
		return append(buf, frame.raw...)
	}
	for _, part := range frame.packet.AsSlices() {
		buf = append(buf, part...)
	}
	frame.release()
	return buf
}

// writeBatch writes the rest and the batch, with as few calls as the framing
// allows.
func (l *link) writeBatch() (err error) {
	flush := func() {
		if err == nil && len(l.buf) > 0 {
			_, err = l.conn.Write(l.buf)
		}
		l.buf = l.buf[:0]
	}
	if len(l.rest) > 0 {
		_, err = l.conn.Write(l.rest)
		l.rest = l.rest[:0]
	}
	l.buf = l.buf[:0]
	for _, frame := range l.batch {
		if len(l.buf)+lengthSize+frame.size() > cap(l.buf) {
			flush()
		}
		l.buf = l.encode(l.buf, frame)
		if l.framing == Datagram {
			flush()
			err = lostDatagram(err)
		}
	}
	flush()
	return err
}

// read hands each frame to deliver, which may keep nothing of it, until the link
// ends; io.EOF is its orderly end.
func (l *link) read(deliver func(frame []byte)) error {
	buf := make([]byte, batchSize)
	if l.framing == Datagram {
		for {
			n, err := l.conn.Read(buf)
			if err != nil {
				return err
			}
			deliver(buf[:n])
		}
	}
	have := 0
	for {
		n, err := l.conn.Read(buf[have:])
		if err != nil {
			return err
		}
		l.arrived.add(n)
		have += n
		at := 0
		for have-at >= lengthSize {
			size := binary.BigEndian.Uint32(buf[at:])
			if size > l.mtu+header.EthernetMinimumSize+vlanTag {
				return fmt.Errorf("%w: %d bytes", errLongFrame, size)
			}
			end := at + lengthSize + int(size)
			if end > have {
				break
			}
			deliver(buf[at+lengthSize : end])
			at = end
		}
		have = copy(buf, buf[at:have])
	}
}

// vlanTag is what a frame of a virtual LAN is longer: it is dropped, not an error.
const vlanTag = 4

// inject gives a frame that was found good to the stack.
func (l *link) inject(frame []byte) {
	packet := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(frame)})
	defer packet.DecRef()
	if !l.ParseHeader(packet) {
		return
	}
	eth := header.Ethernet(frame)
	packet.PktType = tcpip.PacketHost
	if header.IsMulticastEthernetAddress(eth.DestinationAddress()) {
		packet.PktType = tcpip.PacketMulticast
	}
	// The link is a socket of this host, which alters nothing.
	packet.RXChecksumValidated = true
	l.dispatch.DeliverNetworkPacket(eth.Type(), packet)
}

var _ stack.LinkEndpoint = (*link)(nil)

// WritePackets implements stack.LinkWriter.
func (l *link) WritePackets(packets stack.PacketBufferList) (int, tcpip.Error) {
	for i, packet := range packets.AsSlice() {
		if !l.send(outgoing{packet: packet.IncRef()}) {
			packet.DecRef()
			return i, &tcpip.ErrNoBufferSpace{}
		}
	}
	return packets.Len(), nil
}

// AddHeader implements stack.NetworkLinkEndpoint. There is one neighbour alone.
func (l *link) AddHeader(packet *stack.PacketBuffer) {
	header.Ethernet(packet.LinkHeader().Push(header.EthernetMinimumSize)).Encode(&header.EthernetFields{
		SrcAddr: l.local, DstAddr: l.guest, Type: packet.NetworkProtocolNumber,
	})
}

// ParseHeader implements stack.NetworkLinkEndpoint.
func (*link) ParseHeader(packet *stack.PacketBuffer) bool {
	_, ok := packet.LinkHeader().Consume(header.EthernetMinimumSize)
	return ok
}

// Attach implements stack.NetworkLinkEndpoint. The stack calls it once, before
// anything is read.
func (l *link) Attach(dispatcher stack.NetworkDispatcher) { l.dispatch = dispatcher }

// IsAttached implements stack.NetworkLinkEndpoint.
func (l *link) IsAttached() bool { return l.dispatch != nil }

// MTU implements stack.NetworkLinkEndpoint.
func (l *link) MTU() uint32 { return l.mtu }

// MaxHeaderLength implements stack.NetworkLinkEndpoint.
func (*link) MaxHeaderLength() uint16 { return header.EthernetMinimumSize }

// LinkAddress implements stack.NetworkLinkEndpoint.
func (l *link) LinkAddress() tcpip.LinkAddress { return l.local }

// Capabilities implements stack.NetworkLinkEndpoint: no neighbour has to be
// looked for, and checksums that come in need no check.
func (*link) Capabilities() stack.LinkEndpointCapabilities {
	return stack.CapabilityRXChecksumOffload
}

// ARPHardwareType implements stack.NetworkLinkEndpoint.
func (*link) ARPHardwareType() header.ARPHardwareType { return header.ARPHardwareEther }

// The rest of stack.NetworkLinkEndpoint: nothing of it changes after the start.

// SetMTU does nothing.
func (*link) SetMTU(uint32) {}

// SetLinkAddress does nothing.
func (*link) SetLinkAddress(tcpip.LinkAddress) {}

// Wait does nothing: the gateway waits for its goroutines itself.
func (*link) Wait() {}

// Close does nothing: the gateway closes the link itself.
func (*link) Close() {}

// SetOnCloseAction does nothing.
func (*link) SetOnCloseAction(func()) {}

// ended tells whether err is how a link ends in order.
func ended(err error) bool {
	return err == nil || errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed)
}
