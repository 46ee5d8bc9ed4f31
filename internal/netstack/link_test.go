package netstack_test

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"slices"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/netstack"
)

// fill has the gateway answer n times a kilobyte to a guest that reads nothing,
// each with its number.
func fill(t *testing.T, w *wire, n int) {
	t.Helper()
	_ = w.conn.SetWriteDeadline(time.Now().Add(patience)) // it reads on
	for i := range n {
		frame := echo4(guest4.Addr(), gateway4, uint16(i), make([]byte, 1024))
		if _, err := w.conn.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(frame))), frame...)); err != nil {
			t.Fatal(err)
		}
	}
}

func TestGuestThatReadsLate(t *testing.T) {
	t.Parallel()
	const frames = 3000
	w := start(t, newWorld(), nil)
	fill(t, w, frames)
	_ = w.conn.SetReadDeadline(time.Now().Add(patience))
	var got []uint16
	err := readFrames(w.conn, netstack.Stream, func(frame []byte) {
		if icmp := icmp4Of(frame); icmp != nil && icmp.Type() == header.ICMPv4EchoReply && len(icmp) == header.ICMPv4MinimumSize+1024 {
			if got = append(got, icmp.Ident()); len(got) == frames {
				_ = w.conn.Close()
			}
		}
	})
	if !errors.Is(err, net.ErrClosed) {
		t.Errorf("after %d of %d frames: %v", len(got), frames, err)
	}
	if !slices.IsSorted(got) {
		t.Error("the frames are out of order")
	}
}

// The gateway waits for room on its link when that ends.
func TestTheEndOfAFullLink(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*wire) error{
		"by the gateway": func(w *wire) error { return w.Close() },
		"by the guest":   func(w *wire) error { return w.conn.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := start(t, newWorld(), nil)
			fill(t, w, 3000)
			if err := end(w); err != nil {
				t.Error(err)
			}
			<-w.Done()
			if err := w.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// What the guest sent before its end is taken, however it arrives: the end may
// come with it.
func TestLastWordsOfALink(t *testing.T) {
	t.Parallel()
	for range 50 {
		w := start(t, newWorld(), nil)
		frame := echo4(guest4.Addr(), gateway4, 1, nil)
		_, err := w.conn.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(frame))), frame...))
		if err := errors.Join(err, w.conn.Close()); err != nil {
			t.Fatal(err)
		}
		<-w.Done()
	}
}

// A link that is no socket of the system has no descriptor to wait for.
func TestLinkInMemory(t *testing.T) {
	t.Parallel()
	opts := options(newWorld(), &logs{})
	ours, theirs := net.Pipe()
	opts.Link = ours
	gateway, err := netstack.Start(opts)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = gateway.Close() }()
	w := &wire{Gateway: gateway, conn: theirs}
	_ = theirs.SetReadDeadline(time.Now().Add(patience))
	fill(t, w, 1)
	var size [4]byte
	if _, err := io.ReadFull(theirs, size[:]); err != nil {
		t.Fatal(err)
	}
	frame := make([]byte, binary.BigEndian.Uint32(size[:]))
	if _, err := io.ReadFull(theirs, frame); err != nil || icmp4Of(frame) == nil {
		t.Errorf("the answer is %x, %v", frame, err)
	}
}
