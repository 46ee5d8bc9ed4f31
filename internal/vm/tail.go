package vm

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
)

// What an error shows of a log file's end.
const (
	tailLines = 32
	tailBytes = 4 << 10
)

// Tails are the ends of a VM's log files, at most 32 lines and 4 KiB each, made
// safe for a terminal.
type Tails struct {
	// Console is what kernel and early agent printed, Shim what shim and VMM
	// printed.
	Console, Shim string
}

// ReadTails reads the ends of the logs in a machine directory, as far as they are
// there.
func ReadTails(files layout.Machine) Tails {
	return Tails{Console: tail(files.Console()), Shim: tail(files.ShimLog())}
}

// String is empty or begins with a line end, to follow a message.
func (t Tails) String() string {
	var b strings.Builder
	section := func(title, text string) {
		if text == "" {
			return
		}
		fmt.Fprintf(&b, "\n--- %s:", title)
		for line := range strings.Lines(text) {
			b.WriteString("\n    " + strings.TrimSuffix(line, "\n"))
		}
	}
	section("end of shim log", t.Shim)
	section("end of console", t.Console)
	return b.String()
}

// tail reads the end of a file that may be missing and may have any content.
func tail(path string) string {
	file, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return ""
	}
	defer func() { _ = file.Close() }()
	return Tail(file)
}

// Tail is the end of an open log file as Tails has it; empty where it cannot be
// read. The file's offset stays.
func Tail(file *os.File) string {
	info, err := file.Stat()
	if err != nil || !info.Mode().IsRegular() {
		return ""
	}
	// Escape sequences and carriage returns fall away, so read some more.
	from := max(info.Size()-4*tailBytes, 0)
	raw, err := io.ReadAll(io.NewSectionReader(file, from, 4*tailBytes))
	if err != nil {
		return ""
	}
	if from > 0 {
		if _, rest, ok := bytes.Cut(raw, []byte("\n")); ok {
			raw = rest
		}
	}
	return lastLines(printable(raw))
}

// printable keeps text and line ends. Terminal escape sequences go, everything
// else that a terminal would not show becomes '?'.
func printable(raw []byte) string {
	var b strings.Builder
	for len(raw) > 0 {
		if raw[0] == 0x1b {
			raw = raw[escapeLen(raw):]
			continue
		}
		r, n := utf8.DecodeRune(raw)
		raw = raw[n:]
		switch {
		case r == '\n':
			b.WriteByte('\n')
		case r == '\t':
			b.WriteByte(' ')
		case r == '\r':
		case r == utf8.RuneError || !unicode.IsPrint(r):
			b.WriteByte('?')
		default:
			b.WriteRune(r)
		}
	}
	return b.String()
}

// escapeLen is the length of the escape sequence that raw begins with: ESC [,
// parameters (0x20 to 0x3f) and one final byte, or ESC and one byte (ECMA-48).
func escapeLen(raw []byte) int {
	if len(raw) < 2 {
		return 1
	}
	if raw[1] != '[' {
		return 2
	}
	n := 2
	for n < len(raw) && raw[n] >= 0x20 && raw[n] <= 0x3f {
		n++
	}
	return min(n+1, len(raw))
}

func lastLines(text string) string {
	text = strings.TrimRight(text, "\n ")
	lines := strings.Split(text, "\n")
	lines = lines[max(len(lines)-tailLines, 0):]
	size := 0
	first := len(lines)
	for first > 0 && size+len(lines[first-1])+1 <= tailBytes {
		first--
		size += len(lines[first]) + 1
	}
	if first == len(lines) && first > 0 {
		// One line alone is too long.
		last := lines[first-1]
		return strings.ToValidUTF8(last[len(last)-tailBytes:], "")
	}
	return strings.Join(lines[first:], "\n")
}

// EndError tells how a VM ended, to whom it interrupted.
type EndError struct {
	// ID is the VM's.
	ID string
	// End is the cause.
	End bootspec.End
	// Tails are what the VM printed last.
	Tails Tails
}

func (e *EndError) Error() string {
	return fmt.Sprintf("vm %s ended: %v%v", e.ID, e.End, e.Tails)
}

// Unwrap gives the bootspec.End.
func (e *EndError) Unwrap() error { return e.End }

// BootError is a launch that failed after the VM's process was started.
type BootError struct {
	// ID is the VM's.
	ID string
	// Cause is what went wrong: a bootspec.End, a *guest.VersionError, the end
	// of the caller's context, or the boot time-out.
	Cause error
	// Tails are what the VM printed last.
	Tails Tails
	// SpecFile has the spec without secrets, for a replay; empty when it could
	// not be saved.
	SpecFile string
}

func (e *BootError) Error() string {
	msg := fmt.Sprintf("boot vm %s: %v", e.ID, e.Cause)
	if e.SpecFile != "" {
		msg += "\n(its spec is kept in " + e.SpecFile + ")"
	}
	return msg + e.Tails.String()
}

func (e *BootError) Unwrap() error { return e.Cause }

// ErrBootTimeout is the cause of a boot that took too long.
var ErrBootTimeout = errors.New("the guest did not answer in time")
