package erofs

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"os"
)

// bufferSize is how much is written at once; a multiple of the block size.
const bufferSize = 256 << 10

// blockWriter writes consecutive blocks to a file. Blocks of zeros are skipped:
// they become holes.
type blockWriter struct {
	file  *os.File
	block uint32 // the block that buf[0] goes to
	buf   []byte
	zero  []byte
}

func newBlockWriter(file *os.File, first uint32) *blockWriter {
	return &blockWriter{file: file, block: first, buf: make([]byte, 0, bufferSize), zero: make([]byte, blockSize)}
}

// next is the block that the next byte goes to, once the last one is padded.
func (w *blockWriter) next() uint32 {
	return w.block + uint32((len(w.buf)+blockSize-1)/blockSize)
}

// Write appends p. It never fails for a reason other than the file's.
func (w *blockWriter) Write(p []byte) (int, error) {
	n := len(p)
	for len(p) > 0 {
		if err := w.room(); err != nil {
			return n - len(p), err
		}
		k := min(len(p), cap(w.buf)-len(w.buf))
		w.buf = append(w.buf, p[:k]...)
		p = p[k:]
	}
	return n, nil
}

// copy appends n bytes of r. A short r is io.ErrUnexpectedEOF.
func (w *blockWriter) copy(r io.Reader, n int64) error {
	for n > 0 {
		if err := w.room(); err != nil {
			return err
		}
		at := len(w.buf)
		k := int(min(n, int64(cap(w.buf)-at)))
		w.buf = w.buf[:at+k]
		if _, err := io.ReadFull(r, w.buf[at:]); err != nil {
			w.buf = w.buf[:at]
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return err
		}
		n -= int64(k)
	}
	return nil
}

// pad fills the last block with zeros.
func (w *blockWriter) pad() {
	if over := len(w.buf) % blockSize; over > 0 {
		w.buf = append(w.buf, w.zero[:blockSize-over]...)
	}
}

func (w *blockWriter) room() error {
	if len(w.buf) < cap(w.buf) {
		return nil
	}
	return w.flush()
}

// flush writes the whole blocks of the buffer, which must be padded at the end
// of the file.
func (w *blockWriter) flush() error {
	for at := 0; at < len(w.buf); {
		if w.isZero(at) {
			at += blockSize
			continue
		}
		end := at + blockSize
		for end < len(w.buf) && !w.isZero(end) {
			end += blockSize
		}
		if _, err := w.file.WriteAt(w.buf[at:end], int64(w.block)*blockSize+int64(at)); err != nil {
			return err
		}
		at = end
	}
	w.block += uint32(len(w.buf) / blockSize)
	w.buf = w.buf[:0]
	return nil
}

func (w *blockWriter) isZero(at int) bool {
	return bytes.Equal(w.buf[at:at+blockSize], w.zero)
}

// erase turns n blocks from first on into zeros, by a hole where the file system
// can make one.
func (w *blockWriter) erase(first, n uint32) error {
	if n == 0 {
		return nil
	}
	if first+n > w.block {
		w.pad()
		if err := w.flush(); err != nil {
			return err
		}
	}
	offset, length := int64(first)*blockSize, int64(n)*blockSize
	if punchHole(w.file, offset, length) == nil {
		return nil
	}
	for ; length > 0; offset, length = offset+blockSize, length-blockSize {
		if _, err := w.file.WriteAt(w.zero, offset); err != nil {
			return err
		}
	}
	return nil
}

// sideFile keeps small pieces until the inodes are written.
type sideFile struct {
	file  *os.File
	w     *bufio.Writer
	size  int64
	piece [inlineMax]byte
}

func newSideFile(file *os.File) *sideFile {
	return &sideFile{file: file, w: bufio.NewWriterSize(file, 64<<10)}
}

// add appends p and returns its offset.
func (s *sideFile) add(p []byte) (int64, error) {
	at := s.size
	n, err := s.w.Write(p)
	s.size += int64(n)
	return at, err
}

// copy appends n bytes of r, inlineMax at most, and returns their offset.
func (s *sideFile) copy(r io.Reader, n int64) (int64, error) {
	piece := s.piece[:n]
	if _, err := io.ReadFull(r, piece); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return 0, err
	}
	return s.add(piece)
}

// read fills p from offset at.
func (s *sideFile) read(p []byte, at int64) error {
	if s.w.Buffered() > 0 {
		if err := s.w.Flush(); err != nil {
			return err
		}
	}
	_, err := s.file.ReadAt(p, at)
	return err
}

func (s *sideFile) readString(at, n int64) (string, error) {
	p := make([]byte, n)
	err := s.read(p, at)
	return string(p), err
}
