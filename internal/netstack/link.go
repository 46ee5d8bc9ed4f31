package netstack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"

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
// the guest.
type link struct {
	conn     net.Conn
	framing  Framing
	mtu      uint32
	local    tcpip.LinkAddress
	guest    tcpip.LinkAddress
	dispatch stack.NetworkDispatcher

	mu      sync.Mutex
	queue   []outgoing
	queued  int // bytes
	closed  bool
	waiting chan struct{} // holds one token when queue is not empty or closed is set
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

func newLink(opts Options) *link {
	if conn, ok := opts.Link.(interface {
		SetReadBuffer(int) error
		SetWriteBuffer(int) error
	}); ok {
		// What the system grants is enough; more is only faster.
		_ = conn.SetReadBuffer(socketBuffer)
		_ = conn.SetWriteBuffer(socketBuffer)
	}
	return &link{
		conn:    opts.Link,
		framing: opts.Framing,
		mtu:     uint32(opts.MTU),
		local:   tcpip.LinkAddress(opts.GatewayMAC),
		guest:   tcpip.LinkAddress(opts.GuestMAC),
		waiting: make(chan struct{}, 1),
	}
}

// close ends write and, by closing the connection, read.
func (l *link) close() error {
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	l.wake()
	return l.conn.Close()
}

func (l *link) wake() {
	select {
	case l.waiting <- struct{}{}:
	default:
	}
}

// send queues one frame and takes it over; a full queue drops it.
func (l *link) send(frame outgoing) bool {
	size := frame.size()
	l.mu.Lock()
	if l.closed || len(l.queue) >= maxQueuedFrames || l.queued+size > maxQueuedBytes {
		l.mu.Unlock()
		return false
	}
	first := len(l.queue) == 0
	l.queue = append(l.queue, frame)
	l.queued += size
	l.mu.Unlock()
	if first {
		l.wake()
	}
	return true
}

// write sends what is queued until the link is closed or breaks.
func (l *link) write() error {
	var batch []outgoing
	buf := make([]byte, 0, batchSize)
	defer l.drop()
	for range l.waiting {
		l.mu.Lock()
		closed := l.closed
		batch, l.queue = l.queue, batch[:0]
		l.queued = 0
		l.mu.Unlock()
		err := l.writeBatch(batch, buf)
		clear(batch)
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
	for _, frame := range l.queue {
		if frame.packet != nil {
			frame.packet.DecRef()
		}
	}
	l.queue = nil
}

// writeBatch writes frames with as few calls as the framing allows, and lets go
// of all of them.
func (l *link) writeBatch(batch []outgoing, buf []byte) (err error) {
	flush := func() {
		if err == nil && len(buf) > 0 {
			_, err = l.conn.Write(buf)
		}
		buf = buf[:0]
	}
	for _, frame := range batch {
		if len(buf)+lengthSize+frame.size() > cap(buf) {
			flush()
		}
		if l.framing == Stream {
			buf = binary.BigEndian.AppendUint32(buf, uint32(frame.size()))
		}
		if frame.packet == nil {
			buf = append(buf, frame.raw...)
		} else {
			for _, part := range frame.packet.AsSlices() {
				buf = append(buf, part...)
			}
			frame.packet.DecRef()
		}
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
