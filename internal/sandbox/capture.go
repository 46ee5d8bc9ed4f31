package sandbox

import (
	"strings"
	"unicode/utf8"
)

// MaxCapture is how much of each output stream a captured exec keeps, in bytes
// (contract: 1 MiB); the rest is read and dropped so the program never blocks.
const MaxCapture = 1 << 20

// Capture is an io.Writer that keeps the first bytes written and forgets the
// rest. Its zero value keeps MaxCapture bytes. It is not safe for concurrent
// use: one stream writes to it.
type Capture struct {
	// Limit replaces MaxCapture when positive.
	Limit     int
	kept      []byte
	truncated bool
}

// Write never fails.
func (c *Capture) Write(p []byte) (int, error) {
	limit := c.Limit
	if limit <= 0 {
		limit = MaxCapture
	}
	room := limit - len(c.kept)
	if len(p) > room {
		c.truncated = true
		c.kept = append(c.kept, p[:room]...)
		return len(p), nil
	}
	c.kept = append(c.kept, p...)
	return len(p), nil
}

// Truncated reports whether anything was dropped.
func (c *Capture) Truncated() bool { return c.truncated }

// Text is what was kept, as UTF-8 with each maximal invalid part replaced by one
// U+FFFD: the Unicode standard's recommended practice, which Rust's lossy
// conversion follows and Go's strings.ToValidUTF8 and encoding/json do not.
func (c *Capture) Text() string { return lossyUTF8(c.kept) }

func lossyUTF8(b []byte) string {
	if utf8.Valid(b) {
		return string(b)
	}
	var out strings.Builder
	out.Grow(len(b) + 16)
	for len(b) > 0 {
		r, size := utf8.DecodeRune(b)
		if r == utf8.RuneError && size <= 1 {
			size = invalidLen(b)
			r = utf8.RuneError
		}
		out.WriteRune(r)
		b = b[size:]
	}
	return out.String()
}

// invalidLen is the length of the maximal part at the start of b, which does not
// begin a valid rune, that one U+FFFD replaces: the longest prefix of some valid
// sequence (Unicode 15, table 3-7), and at least one byte.
func invalidLen(b []byte) int {
	var want int
	low, high := byte(0x80), byte(0xBF)
	switch lead := b[0]; {
	case lead >= 0xC2 && lead <= 0xDF:
		want = 2
	case lead >= 0xE0 && lead <= 0xEF:
		want = 3
		if lead == 0xE0 {
			low = 0xA0
		}
		if lead == 0xED {
			high = 0x9F
		}
	case lead >= 0xF0 && lead <= 0xF4:
		want = 4
		if lead == 0xF0 {
			low = 0x90
		}
		if lead == 0xF4 {
			high = 0x8F
		}
	default:
		return 1
	}
	n := 1
	for n < want && n < len(b) && b[n] >= low && b[n] <= high {
		low, high = 0x80, 0xBF
		n++
	}
	return n
}
