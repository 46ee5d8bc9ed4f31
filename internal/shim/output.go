package shim

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"strings"
	"unicode"

	"golang.org/x/sys/unix"
)

// Limits of a console log, in bytes. A file that would exceed maxConsole keeps
// its first keptHead and last keptTail bytes: why a boot went wrong is at the
// beginning, why a guest died at the end.
const (
	maxConsole = 256 << 10
	keptHead   = 64 << 10
	keptTail   = 64 << 10
)

// boundedLog is a log file of bounded size. Its writes never fail: a full disk
// costs the log, not the VM. Not for concurrent use.
type boundedLog struct {
	path  string
	file  *os.File
	size  int64
	total int64
}

// openBoundedLog opens or makes the file; what it has stays.
func openBoundedLog(path string) (*boundedLog, error) {
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	size, err := file.Seek(0, io.SeekEnd)
	if err != nil {
		_ = file.Close()
		return nil, err
	}
	return &boundedLog{path: path, file: file, size: size, total: size}, nil
}

func (l *boundedLog) Write(p []byte) (int, error) {
	if l.size+int64(len(p)) > maxConsole {
		if err := l.shorten(); err != nil {
			// In place then: the end is lost, the bound holds.
			l.size = min(l.size, keptHead)
			_ = l.file.Truncate(l.size)
		}
	}
	n, _ := l.file.WriteAt(p, l.size)
	l.size += int64(n)
	l.total += int64(len(p))
	return len(p), nil
}

// shorten replaces the file by its head and tail. Readers see the old file or
// the new one.
func (l *boundedLog) shorten() (err error) {
	partial := l.path + ".partial"
	file, err := os.OpenFile(partial, os.O_RDWR|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = file.Close()
			_ = os.Remove(partial)
		}
	}()
	head := min(l.size, keptHead)
	tail := min(l.size-head, keptTail)
	size := int64(0)
	for _, part := range []io.Reader{
		io.NewSectionReader(l.file, 0, head),
		strings.NewReader(fmt.Sprintf("\n[... %d bytes left out ...]\n", l.total-head-tail)),
		io.NewSectionReader(l.file, l.size-tail, tail),
	} {
		n, err := io.Copy(file, part)
		if err != nil {
			return err
		}
		size += n
	}
	if err := os.Rename(partial, l.path); err != nil {
		return err
	}
	_ = l.file.Close() // it has no name any more
	l.file, l.size = file, size
	return nil
}

func (l *boundedLog) close() { _ = l.file.Close() }

// limitedWriter passes the first bytes on and drops the rest.
type limitedWriter struct {
	w    io.Writer
	left int
}

func (l *limitedWriter) Write(p []byte) (int, error) {
	if l.w == nil || l.left == 0 {
		return len(p), nil
	}
	part := p[:min(len(p), l.left)]
	l.left -= len(part)
	_, err := l.w.Write(part)
	if l.left == 0 {
		_, err = io.WriteString(l.w, "\n[... the VMM prints more; it is left out ...]\n")
	}
	return len(p), err
}

// tail keeps the last size bytes written to it.
type tail struct {
	size int
	buf  []byte
	any  bool
}

func (t *tail) Write(p []byte) (int, error) {
	t.any = t.any || len(p) > 0
	n := len(p)
	p = p[max(0, len(p)-t.size):]
	if drop := len(t.buf) + len(p) - t.size; drop > 0 {
		t.buf = t.buf[:copy(t.buf, t.buf[drop:])]
	}
	t.buf = append(t.buf, p...)
	return n, nil
}

// lastLine is the last line that shows anything, made fit for a message.
func (t *tail) lastLine() string {
	lines := bytes.Split(t.buf, []byte("\n"))
	for i := len(lines) - 1; i >= 0; i-- {
		if line := oneLine(string(lines[i])); line != "" {
			return line
		}
	}
	return ""
}

// rustPanic is in the line before the one in which a program in Rust says why it
// gives up; it then prints how to debug it.
const rustPanic = "panicked at"

// reason is the line that tells why a VMM ended, as well as can be told: the last
// one, but for panics.
func (t *tail) reason() string {
	if at := bytes.LastIndex(t.buf, []byte(rustPanic)); at >= 0 {
		if lines := bytes.SplitN(t.buf[at:], []byte("\n"), 3); len(lines) > 1 && len(lines[1]) > 0 {
			return oneLine(string(lines[1]))
		}
	}
	return t.lastLine()
}

// lineWith is the last line that has text, from text on.
func (t *tail) lineWith(text string) string {
	at := bytes.LastIndex(t.buf, []byte(text))
	if at < 0 {
		return ""
	}
	line, _, _ := bytes.Cut(t.buf[at:], []byte("\n"))
	return oneLine(string(line))
}

// maxLine is the longest line that becomes part of a message, in bytes.
const maxLine = 400

// oneLine makes one line of printable characters of text that may come from a
// guest.
func oneLine(text string) string {
	text = strings.Map(func(r rune) rune {
		switch {
		case r == '\n':
			return ';'
		case unicode.IsSpace(r):
			return ' '
		case r == unicode.ReplacementChar || !unicode.IsPrint(r):
			return -1
		}
		return r
	}, strings.ToValidUTF8(strings.TrimSpace(text), ""))
	text = strings.Join(strings.Fields(text), " ")
	if len(text) > maxLine {
		text = strings.ToValidUTF8(text[:maxLine], "") + "..."
	}
	return text
}
