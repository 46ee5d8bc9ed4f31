package fsops

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"unicode/utf8"
)

// maxHeld is the longest line that is held in memory to search it; longer ones
// are read from the file again.
const maxHeld = 1 << 20

// line is one line of a file.
type line struct {
	// text is the line without its end, nil when it is longer than maxHeld. It
	// is valid until the next line is read.
	text []byte
	// offset is where it begins in the file, length how long it is without end.
	offset, length int64
	// utf8 tells whether it is valid UTF-8.
	utf8 bool
}

// readBuffer is how much of a file is read at a time.
const readBuffer = 64 << 10

// lineReader reads files line by line with flat memory. Its zero value is ready
// for read.
type lineReader struct {
	in     *bufio.Reader
	offset int64
	held   []byte
}

// read begins with a new file. The reader's memory is used again: that of a tree
// of small files would cost more than reading them.
func (l *lineReader) read(r io.Reader) {
	if l.in == nil {
		l.in = bufio.NewReaderSize(r, readBuffer)
	}
	l.in.Reset(r)
	l.offset = 0
}

// next returns the next line, and io.EOF after the last. A line ends at "\n" or
// "\r\n"; what follows the last end is a line when it is not empty.
func (l *lineReader) next() (line, error) {
	text, err := l.in.ReadSlice('\n')
	if !errors.Is(err, bufio.ErrBufferFull) {
		return l.end(text, err)
	}
	l.held = append(l.held[:0], text...)
	for errors.Is(err, bufio.ErrBufferFull) {
		if len(l.held) > maxHeld {
			return l.long()
		}
		text, err = l.in.ReadSlice('\n')
		l.held = append(l.held, text...)
	}
	return l.end(l.held, err)
}

// end makes a line of text, which ends in "\n" or at the end of the file.
func (l *lineReader) end(text []byte, err error) (line, error) {
	if err != nil && (!isEOF(err) || len(text) == 0) {
		return line{}, err
	}
	at := l.offset
	l.offset += int64(len(text))
	if cut, ok := bytes.CutSuffix(text, []byte("\n")); ok {
		text = bytes.TrimSuffix(cut, []byte("\r"))
	}
	return line{text: text, offset: at, length: int64(len(text)), utf8: utf8.Valid(text)}, nil
}

// long goes to the end of a line whose beginning is l.held.
func (l *lineReader) long() (line, error) {
	out := line{offset: l.offset, utf8: true}
	check := utf8Check{}
	size, last, before := int64(0), byte(0), byte(0)
	text := l.held
	var err error
	for {
		size += int64(len(text))
		out.utf8 = check.next(text) && out.utf8
		switch n := len(text); {
		case n > 1:
			before, last = text[n-2], text[n-1]
		case n == 1:
			before, last = last, text[0]
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) || last == '\n' && len(text) > 0 {
			break
		}
		text, err = l.in.ReadSlice('\n')
	}
	if err != nil && !isEOF(err) {
		return line{}, err
	}
	l.offset += size
	out.length = size
	out.utf8 = out.utf8 && check.whole()
	if last == '\n' {
		out.length--
		if before == '\r' {
			out.length--
		}
	}
	return out, nil
}

// utf8Check validates text that comes in pieces.
type utf8Check struct {
	// rest is the beginning of a character at the end of a piece.
	rest []byte
}

// next reports whether the text is valid so far.
func (c *utf8Check) next(text []byte) bool {
	for len(c.rest) > 0 && len(text) > 0 && !utf8.FullRune(c.rest) {
		c.rest = append(c.rest, text[0])
		text = text[1:]
	}
	if len(c.rest) > 0 {
		if !utf8.FullRune(c.rest) {
			return true
		}
		if !utf8.Valid(c.rest) {
			return false
		}
		c.rest = c.rest[:0]
	}
	end := len(text)
	for i := 1; i <= utf8.UTFMax && i <= end; i++ {
		if b := text[end-i]; utf8.RuneStart(b) {
			if !utf8.FullRune(text[end-i:]) {
				c.rest = append(c.rest[:0], text[end-i:]...)
				end -= i
			}
			break
		}
	}
	return utf8.Valid(text[:end])
}

// whole reports whether the text did not end within a character.
func (c *utf8Check) whole() bool { return len(c.rest) == 0 }
