// Package wire is the little protocol between netprobe and its server: the server
// reads one request of nine bytes from each connection and serves it.
package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
)

// Op is what a client asks for.
type Op byte

// The operations.
const (
	// Echo sends everything back until the client's end of stream.
	Echo Op = 'e'
	// Get sends Size bytes and closes.
	Get Op = 'g'
	// Put takes Size bytes and answers with one.
	Put Op = 'p'
)

// Request begins a connection.
type Request struct {
	Op   Op
	Size int64
}

// Write sends the request.
func (r Request) Write(w io.Writer) error {
	head := binary.BigEndian.AppendUint64([]byte{byte(r.Op)}, uint64(r.Size))
	_, err := w.Write(head)
	return err
}

// bufferSize is that of each copy, in bytes.
const bufferSize = 256 << 10

// Serve answers the connections of a listener until it is closed. Each has a
// goroutine that ends with its connection.
func Serve(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close() //nolint:errcheck // the client sees what it got
			_ = serve(c)    // as above
		}()
	}
}

func serve(c net.Conn) error {
	var head [9]byte
	if _, err := io.ReadFull(c, head[:]); err != nil {
		return err
	}
	size := int64(binary.BigEndian.Uint64(head[1:]))
	switch Op(head[0]) {
	case Echo:
		_, err := io.CopyBuffer(onlyWriter{c}, onlyReader{c}, make([]byte, 4<<10))
		return err
	case Get:
		return Fill(c, size)
	case Put:
		if err := Drain(c, size); err != nil {
			return err
		}
		_, err := c.Write([]byte{0})
		return err
	}
	return errors.New("unknown operation")
}

// Fill writes size bytes.
func Fill(w io.Writer, size int64) error {
	buf := make([]byte, bufferSize)
	for i := range buf {
		buf[i] = byte(i * 7)
	}
	for size > 0 {
		n, err := w.Write(buf[:min(size, bufferSize)])
		if err != nil {
			return err
		}
		size -= int64(n)
	}
	return nil
}

// Drain reads size bytes, of which it looks at none.
func Drain(r io.Reader, size int64) error {
	buf := make([]byte, bufferSize)
	for size > 0 {
		n, err := r.Read(buf[:min(size, bufferSize)])
		size -= int64(n)
		if err != nil && size > 0 {
			return fmt.Errorf("%d bytes are missing: %w", size, err)
		}
	}
	return nil
}

// The two hide what makes io.Copy go around the buffer.
type (
	onlyWriter struct{ io.Writer }
	onlyReader struct{ io.Reader }
)
