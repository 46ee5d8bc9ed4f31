package iii

import (
	"bufio"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// maxGathered is how many bytes a wire gathers before it sends them: more than a
// channel's largest frame.
const maxGathered = 2 * chunk

// A wire is a network connection that knows when it last received something and
// when it last sent something, and that can bound how long each read and write
// waits for the network.
type wire struct {
	net.Conn
	began time.Time

	// Nanoseconds since began.
	received, sent atomic.Int64

	// ahead, where set, is what reads come from: more than was asked for.
	ahead *bufio.Reader

	// Nanoseconds; 0 is no bound. limiting keeps a write that begins from setting
	// the deadline of an older bound.
	readIdle, writeIdle atomic.Int64
	limiting            sync.Mutex

	// writing guards what follows, and is held while a write waits.
	writing   sync.Mutex
	gathering bool
	gathered  []byte
}

func newWire(conn net.Conn) *wire { return &wire{Conn: conn, began: time.Now()} }

// quiet returns for how long nothing came, stuck for how long nothing could be
// sent.
func (w *wire) quiet() time.Duration { return w.since(&w.received) }
func (w *wire) stuck() time.Duration { return w.since(&w.sent) }

func (w *wire) since(moment *atomic.Int64) time.Duration {
	return time.Since(w.began) - time.Duration(moment.Load())
}

func (w *wire) now(moment *atomic.Int64) { moment.Store(int64(time.Since(w.began))) }

// boundReads makes reads fail with os.ErrDeadlineExceeded when nothing comes for
// so long.
func (w *wire) boundReads(idle time.Duration) { w.readIdle.Store(int64(idle)) }

// boundWrites makes writes fail with os.ErrDeadlineExceeded when nothing can be
// sent for so long; one that waits already has that long from now.
func (w *wire) boundWrites(idle time.Duration) {
	w.writeIdle.Store(int64(idle))
	_ = w.limitWrites() // of a connection that is closed
}

func (w *wire) limitWrites() error {
	w.limiting.Lock()
	defer w.limiting.Unlock()
	idle := time.Duration(w.writeIdle.Load())
	if idle <= 0 {
		return nil
	}
	return w.SetWriteDeadline(time.Now().Add(idle))
}

// readAhead makes the reads of a stream few; the library asks for 4 KiB at first.
// It is called before any other goroutine reads.
func (w *wire) readAhead() { w.ahead = bufio.NewReaderSize(receiver{w}, maxGathered) }

func (w *wire) Read(p []byte) (int, error) {
	if w.ahead != nil {
		return w.ahead.Read(p)
	}
	return w.receive(p)
}

// receiver is a wire without what was read ahead.
type receiver struct{ *wire }

func (r receiver) Read(p []byte) (int, error) { return r.receive(p) }

func (w *wire) receive(p []byte) (int, error) {
	if idle := time.Duration(w.readIdle.Load()); idle > 0 {
		if err := w.SetReadDeadline(time.Now().Add(idle)); err != nil {
			return 0, err
		}
	}
	n, err := w.Conn.Read(p)
	if n > 0 {
		w.now(&w.received)
	}
	return n, err
}

// gather keeps what is written until flush, or until it is much. The library
// writes a frame in pieces of 4 KiB: a system call, and often a wake-up of the
// peer, for each.
func (w *wire) gather() {
	w.writing.Lock()
	defer w.writing.Unlock()
	w.gathering = true
}

// flush sends what was gathered. Writes go out at once from then on.
func (w *wire) flush() error {
	w.writing.Lock()
	defer w.writing.Unlock()
	w.gathering = false
	return w.sendGathered()
}

func (w *wire) sendGathered() error {
	if len(w.gathered) == 0 {
		return nil
	}
	_, err := w.send(w.gathered)
	w.gathered = w.gathered[:0]
	return err
}

func (w *wire) Write(p []byte) (int, error) {
	w.writing.Lock()
	defer w.writing.Unlock()
	if !w.gathering {
		return w.send(p)
	}
	if len(w.gathered)+len(p) > maxGathered {
		if err := w.sendGathered(); err != nil {
			return 0, err
		}
	}
	w.gathered = append(w.gathered, p...)
	return len(p), nil
}

func (w *wire) send(p []byte) (int, error) {
	if err := w.limitWrites(); err != nil {
		return 0, err
	}
	n, err := w.Conn.Write(p)
	if n > 0 {
		w.now(&w.sent)
	}
	return n, err
}
