// Package sequence is the endless byte sequence that stream tests send: cheap
// to make at both ends, never the same in two places, so that a lost, doubled
// or moved byte is seen.
package sequence

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// block is how many bytes are made at one time.
const block = 32 << 10

// Reader gives the sequence from its beginning. It never ends and never fails.
// Not safe for concurrent use.
type Reader struct {
	counter uint64
	rest    []byte
	buf     [block]byte
}

// New returns a reader at the first byte.
func New() *Reader { return &Reader{} }

// Read fills p.
func (r *Reader) Read(p []byte) (int, error) {
	for done := 0; done < len(p); {
		if len(r.rest) == 0 {
			r.refill()
		}
		n := copy(p[done:], r.rest)
		r.rest = r.rest[n:]
		done += n
	}
	return len(p), nil
}

// refill makes the next block: numbered 64-bit words, spread by one odd
// multiplier so that every byte changes.
func (r *Reader) refill() {
	for i := 0; i < block; i += 8 {
		r.counter++
		binary.LittleEndian.PutUint64(r.buf[i:], r.counter*0x9e3779b97f4a7c15)
	}
	r.rest = r.buf[:]
}

// Writer compares what is written to it with the sequence. Not safe for
// concurrent use.
type Writer struct {
	// N is the number of bytes so far that were right.
	N    int64
	want Reader
	buf  [block]byte
}

// Write fails at the first byte that is not the sequence's, and names it.
func (w *Writer) Write(p []byte) (int, error) {
	for done := 0; done < len(p); {
		part := p[done:min(len(p), done+block)]
		want := w.buf[:len(part)]
		if _, err := w.want.Read(want); err != nil {
			return done, err
		}
		if string(part) != string(want) {
			for i := range part {
				if part[i] != want[i] {
					return done + i, fmt.Errorf("byte %d is %#02x, not %#02x", w.N+int64(i), part[i], want[i])
				}
			}
		}
		w.N += int64(len(part))
		done += len(part)
	}
	return len(p), nil
}

// Check reads r to its end and fails unless it is exactly the first n bytes of
// the sequence.
func Check(r io.Reader, n int64) error {
	w := &Writer{}
	if _, err := io.CopyBuffer(onlyWriter{w}, onlyReader{r}, make([]byte, 64<<10)); err != nil {
		return err
	}
	if w.N != n {
		return fmt.Errorf("%w: %d bytes, not %d", errLength, w.N, n)
	}
	return nil
}

var errLength = errors.New("wrong length")

type onlyWriter struct{ io.Writer }

type onlyReader struct{ io.Reader }
