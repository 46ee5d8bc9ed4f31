package iii

import (
	"net"
	"sync/atomic"
	"time"
)

// A wire is a network connection that knows when it last received something, and
// that can bound how long each read and write waits for the network.
type wire struct {
	net.Conn
	began time.Time
	last  atomic.Int64 // nanoseconds since began

	// Nanoseconds; 0 is no bound.
	readIdle, writeIdle atomic.Int64
}

func newWire(conn net.Conn) *wire { return &wire{Conn: conn, began: time.Now()} }

// quiet returns for how long nothing came.
func (w *wire) quiet() time.Duration {
	return time.Since(w.began) - time.Duration(w.last.Load())
}

// boundReads makes reads fail with os.ErrDeadlineExceeded when nothing comes for
// so long; boundWrites does so for writes when nothing can be sent.
func (w *wire) boundReads(idle time.Duration)  { w.readIdle.Store(int64(idle)) }
func (w *wire) boundWrites(idle time.Duration) { w.writeIdle.Store(int64(idle)) }

func (w *wire) Read(p []byte) (int, error) {
	if idle := time.Duration(w.readIdle.Load()); idle > 0 {
		if err := w.SetReadDeadline(time.Now().Add(idle)); err != nil {
			return 0, err
		}
	}
	n, err := w.Conn.Read(p)
	if n > 0 {
		w.last.Store(int64(time.Since(w.began)))
	}
	return n, err
}

func (w *wire) Write(p []byte) (int, error) {
	if idle := time.Duration(w.writeIdle.Load()); idle > 0 {
		if err := w.SetWriteDeadline(time.Now().Add(idle)); err != nil {
			return 0, err
		}
	}
	return w.Conn.Write(p)
}
