package sandbox

import (
	"bytes"
	"testing"
)

func TestCapture_TextReplacesMaximalInvalidParts(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"plain":                "plain",
		"ab\xE2\x82":           "ab\uFFFD",
		"\xFF\xFE":             "\uFFFD\uFFFD",
		"\xED\xA0\x80":         "\uFFFD\uFFFD\uFFFD",
		"\xF0\x9F\x92":         "\uFFFD",
		"\xF0\x9F\x92x":        "\uFFFDx",
		"\xE0\x80x":            "\uFFFD\uFFFDx",
		"\xC0\xAF":             "\uFFFD\uFFFD",
		"\xF4\x90\x80\x80":     "\uFFFD\uFFFD\uFFFD\uFFFD",
		"\u20AC\xE2\x82\u20AC": "\u20AC\uFFFD\u20AC",
		"\uFFFD":               "\uFFFD",
		"\x00\x1b[0m":          "\x00\x1b[0m",
	} {
		var c Capture
		_, _ = c.Write([]byte(in))
		if got := c.Text(); got != want {
			t.Errorf("%q: got %q, want %q", in, got, want)
		}
	}
}

func TestCapture_KeepsExactlyTheLimit(t *testing.T) {
	t.Parallel()
	var c Capture
	chunk := bytes.Repeat([]byte("x"), 1000)
	for range MaxCapture / len(chunk) {
		_, _ = c.Write(chunk)
	}
	_, _ = c.Write(bytes.Repeat([]byte("y"), MaxCapture%len(chunk)))
	if c.Truncated() || len(c.Text()) != MaxCapture {
		t.Fatalf("exactly 1 MiB: truncated %v, %d bytes", c.Truncated(), len(c.Text()))
	}
	if n, err := c.Write([]byte("zz")); n != 2 || err != nil {
		t.Fatalf("write over the limit: %d, %v", n, err)
	}
	if !c.Truncated() || len(c.Text()) != MaxCapture {
		t.Fatalf("over the limit: truncated %v, %d bytes", c.Truncated(), len(c.Text()))
	}
}
