package sandbox

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"time"
	"unicode/utf8"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/guest"
)

const (
	// maxInline is the size below which a text file's content is in File.Body
	// (contract: fs::read).
	maxInline = 1 << 20
	// downloadStall is how long a File may stand still, whether the reader takes
	// nothing or the guest gives nothing. The engine drops a channel that nobody
	// has connected to after 5 minutes.
	downloadStall = 6 * time.Minute
	// downloadChunk is the most that one Write of WriteTo gets, in bytes: a frame
	// of a channel.
	downloadChunk = 64 << 10
)

// File is a file of a sandbox being read. It counts as activity until Close, the
// end of the transfer, or a stall, whichever is first; Close it in any case. It
// is not for concurrent use, but Close may be called at any time.
type File struct {
	// Size in bytes is what the file system tells: a file of /proc tells 0, and
	// one that grows gives more.
	Size uint64
	// Mode is octal with four digits or more, Mtime in seconds since 1970.
	Mode  string
	Mtime int64
	// Body is the whole content of a UTF-8 text of less than 1 MiB, nil otherwise.
	// Read gives it all the same.
	Body *string

	life  context.Context //nolint:containedctx // the transfer's lifetime
	path  string
	head  []byte
	rest  *guest.File
	err   error // what every further Read returns
	guard *stall
	fault func(error) error
	close func()
}

// OpenFile implements Functions.
func (m *Manager) OpenFile(ctx context.Context, id, path string) (_ *File, err error) {
	id, err = canonicalID(id)
	if err != nil {
		return nil, err
	}
	v, err := m.use(id, forOp)
	if err != nil {
		return nil, err
	}
	// The transfer outlives this call.
	life, cancel := v.within(context.WithoutCancel(ctx))
	guard := newStall(func(cause error) {
		cancel(cause)
		v.done()
	})
	f := &File{
		life: life, path: path, guard: guard,
		fault: func(err error) error { return m.fileFault(life, v.entry, path, err) },
		close: func() {
			guard.stop()
			cancel(nil)
			v.done()
		},
	}
	defer func() {
		if err != nil {
			f.close()
			err = f.fault(err)
		}
	}()
	detach := context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })
	guard.within(pathTimeout, fault.FileRefused(path, fmt.Sprintf("read: nothing came within %v", pathTimeout), nil))
	if err := f.begin(life, v.machine.Guest()); err != nil {
		return nil, err
	}
	if !detach() {
		return nil, context.Cause(life)
	}
	f.progress()
	return f, nil
}

// begin reads what the reply of fs::read needs.
func (f *File) begin(ctx context.Context, g *guest.Client) error {
	rest, err := g.OpenFile(ctx, f.path)
	if err != nil {
		return err
	}
	f.rest = rest
	f.Size, f.Mode, f.Mtime = rest.Size, guest.FormatMode(rest.Mode), rest.MtimeUnix
	if f.Size >= maxInline {
		return nil
	}
	var head bytes.Buffer
	_, err = io.CopyN(&head, rest, maxInline)
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	f.head = head.Bytes()
	if err != nil && utf8.Valid(f.head) {
		text := string(f.head)
		f.Body = &text
	}
	return nil
}

func (f *File) progress() {
	f.guard.within(downloadStall, fault.FileRefused(f.path, fmt.Sprintf("read: nothing moved for %v", downloadStall), nil))
}

// Read gives the content. io.EOF means that all of it came; any other error is a
// *fault.Error.
func (f *File) Read(p []byte) (int, error) {
	if f.err == nil && f.life.Err() != nil {
		f.err = f.fault(context.Cause(f.life)) // not what came in before that
	}
	if f.err != nil {
		return 0, f.err
	}
	f.progress()
	if len(f.head) > 0 {
		n := copy(p, f.head)
		f.head = f.head[n:]
		return n, nil
	}
	n, err := f.rest.Read(p)
	if err != nil {
		f.err = err
		if !errors.Is(err, io.EOF) {
			f.err = f.fault(err)
		}
		f.close()
	}
	return n, f.err
}

// WriteTo writes the rest of the content in pieces of at most 64 KiB, as fast as
// w takes them. An error of w is returned as it is, one of the file is a
// *fault.Error.
func (f *File) WriteTo(w io.Writer) (written int64, err error) {
	buffer := make([]byte, downloadChunk)
	for {
		n, err := f.Read(buffer)
		if n > 0 {
			f.progress()
			m, writeErr := w.Write(buffer[:n])
			written += int64(m)
			if writeErr != nil {
				return written, writeErr
			}
		}
		if errors.Is(err, io.EOF) {
			return written, nil
		}
		if err != nil {
			return written, err
		}
	}
}

// OnBreak runs what once the transfer is ended from outside, by the end of its
// sandbox or for standing still, in a goroutine of its own: whoever takes the
// content may be waiting elsewhere. Close and the end of the content are no break.
// The caller calls stop, or Close.
func (f *File) OnBreak(what func()) (stop func() bool) {
	return context.AfterFunc(f.life, func() {
		if !errors.Is(context.Cause(f.life), context.Canceled) {
			what()
		}
	})
}

// Close ends the transfer, complete or not. It always returns nil.
func (f *File) Close() error {
	f.close()
	return nil
}
