package iii

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/coder/websocket"
)

const (
	channelPath = "/ws/channels/"
	// chunk is the largest binary frame that is sent, as with all SDKs: Python's
	// takes at most 1 MiB.
	chunk = 64 << 10
	// maxText bounds a text frame in bytes.
	maxText = 1 << 20
	// writerGrace is how long a writer's Close waits for the engine to have read
	// everything.
	writerGrace = 5 * time.Second
)

// Directions of a ChannelRef.
const (
	DirectionRead  = "read"
	DirectionWrite = "write"
)

// A ChannelRef names one end of a channel in payloads: whoever gets it reads or
// writes there, as Direction says. It is a credential.
type ChannelRef struct {
	ChannelID string `json:"channel_id"`
	AccessKey string `json:"access_key"`
	Direction string `json:"direction"`
}

// ChannelOptions bound an end of a channel.
type ChannelOptions struct {
	// Idle is how long a read or write may wait for the other end before it fails
	// with ErrStalled; 0 is for ever. A reader needs one unless it trusts the
	// writer: several SDKs never connect a writer that writes nothing, and the
	// engine notices that only after five minutes.
	Idle time.Duration
	// Text gets each text frame that a reader meets, at most 1 MiB of it, from
	// within Read; nil skips them.
	Text func(text []byte)
}

// CreateChannel makes a channel that holds buffer messages (frames, 64 of them
// when buffer is 0, at most 1024) between its two ends. Each end can be connected
// once, within five minutes; the engine removes it otherwise.
func (c *Client) CreateChannel(ctx context.Context, buffer int) (writer, reader ChannelRef, err error) {
	data := json.RawMessage("{}")
	if buffer > 0 {
		data = fmt.Appendf(nil, `{"buffer_size":%d}`, buffer)
	}
	raw, err := c.Invoke(ctx, Request{Function: "engine::channels::create", Data: data})
	if err != nil {
		return ChannelRef{}, ChannelRef{}, err
	}
	var reply struct{ Writer, Reader ChannelRef }
	if err := json.Unmarshal(raw, &reply); err != nil || reply.Writer.ChannelID == "" || reply.Reader.ChannelID == "" {
		return ChannelRef{}, ChannelRef{}, errors.New("the engine's reply to engine::channels::create names no channel")
	}
	return reply.Writer, reply.Reader, nil
}

// dialChannel connects one end. The connection ends with life.
func (c *Client) dialChannel(life context.Context, ref ChannelRef, direction string) (*websocket.Conn, *wire, error) {
	if !validID(ref.ChannelID) || ref.AccessKey == "" {
		return nil, nil, ErrNoChannel
	}
	u := *c.base
	u.Path = strings.TrimRight(u.Path, "/") + channelPath + ref.ChannelID
	// Behind the address's own query, which may hold credentials.
	query := url.Values{"key": {ref.AccessKey}, "dir": {direction}}.Encode()
	if u.RawQuery != "" {
		query = u.RawQuery + "&" + query
	}
	u.RawQuery = query
	dialing, cancel := context.WithTimeout(life, handshakeTimeout)
	defer cancel()
	return c.dial(dialing, &u)
}

// validID reports whether a channel's id can be a segment of a path as it is. The
// engine's are UUIDs.
func validID(id string) bool {
	odd := func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '-' && r != '_'
	}
	return id != "" && len(id) <= 128 && !strings.ContainsFunc(id, odd)
}

// A Reader is the reading end of a channel. One goroutine reads; Close may be
// called from any.
type Reader struct {
	socket  *websocket.Conn
	wire    *wire
	text    func([]byte)
	message io.Reader // the binary frame being read, nil between frames
	err     error     // what every further Read returns
	release func() bool
	cause   func() error
}

// OpenReader connects the reading end of a channel, whatever direction ref has.
// The caller closes the reader; it also ends, with ctx's error, when ctx does,
// which thus must outlive the reading. It fails with ErrNoChannel when the engine
// does not know the channel. An end that was connected before reads as empty.
func (c *Client) OpenReader(ctx context.Context, ref ChannelRef, o ChannelOptions) (*Reader, error) {
	socket, w, err := c.dialChannel(ctx, ref, DirectionRead)
	if err != nil {
		return nil, err
	}
	w.boundReads(o.Idle)
	w.readAhead()
	// Memory is bounded by the buffers of who reads, not by the frames.
	socket.SetReadLimit(-1)
	return &Reader{
		socket: socket, wire: w, text: o.Text,
		release: context.AfterFunc(ctx, func() { _ = w.Close() }),
		cause:   func() error { return context.Cause(ctx) },
	}, nil
}

// Read reads what is in binary frames, one after the other. It returns io.EOF when
// the channel has ended. The protocol cannot tell a writer that finished from one
// that died: where it matters, agree on a size. Other errors are ErrStalled,
// ErrChannelLost, and the error of the context of OpenReader.
func (r *Reader) Read(p []byte) (int, error) {
	if r.err != nil {
		return 0, r.err
	}
	if len(p) == 0 {
		return 0, nil
	}
	n, err := r.read(p)
	if err != nil {
		r.err = channelError(err, r.cause)
		_ = r.Close()
	}
	if n > 0 {
		return n, nil
	}
	return 0, r.err
}

func (r *Reader) read(p []byte) (int, error) {
	for {
		if r.message == nil {
			kind, message, err := r.socket.Reader(context.Background())
			if err != nil {
				return 0, err
			}
			if kind == websocket.MessageText {
				if err := r.takeText(message); err != nil {
					return 0, err
				}
				continue
			}
			r.message = message
		}
		n, err := r.message.Read(p)
		if errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
			r.message, err = nil, nil
		}
		if n > 0 || err != nil {
			return n, err
		}
	}
}

func (r *Reader) takeText(message io.Reader) error {
	text, err := io.ReadAll(io.LimitReader(message, maxText))
	if err != nil {
		return err
	}
	if _, err := io.Copy(io.Discard, message); err != nil {
		return err
	}
	if r.text != nil {
		r.text(text)
	}
	return nil
}

// Close gives the end up. The writer learns of it when it next writes. Close may
// be called more than once, and always returns nil.
//
// It drops the connection without a word: the engine does not listen to readers.
// For that reason a reader does not ping either.
func (r *Reader) Close() error {
	r.release()
	_ = r.wire.Close()
	_ = r.socket.CloseNow()
	return nil
}

// A Writer is the writing end of a channel. One goroutine writes; Close, Done
// and SetIdle may be called from any.
type Writer struct {
	socket  *websocket.Conn
	wire    *wire
	lost    <-chan struct{}
	err     error // of the first failed write
	release func() bool
	cause   func() error
}

// OpenWriter connects the writing end of a channel, whatever direction ref has, at
// once: a reader waits for the writer even if nothing is to be written. The caller
// closes the writer; it also ends, with ctx's error, when ctx does, which thus
// must outlive the writing. It fails with ErrNoChannel when the engine does not
// know the channel.
func (c *Client) OpenWriter(ctx context.Context, ref ChannelRef, o ChannelOptions) (*Writer, error) {
	socket, w, err := c.dialChannel(ctx, ref, DirectionWrite)
	if err != nil {
		return nil, err
	}
	w.boundWrites(o.Idle)
	return &Writer{
		socket: socket, wire: w,
		lost:    socket.CloseRead(context.Background()).Done(),
		release: context.AfterFunc(ctx, func() { _ = w.Close() }),
		cause:   func() error { return context.Cause(ctx) },
	}, nil
}

// Write sends p in binary frames of at most 64 KiB. It waits while the channel is
// full: that is how a slow reader slows the writer down. Its errors are ErrStalled,
// ErrChannelLost when the reader or the engine is gone, and the error of the
// context of OpenWriter; after one every further Write fails.
func (w *Writer) Write(p []byte) (int, error) {
	written := 0
	for len(p) > 0 {
		part := p[:min(len(p), chunk)]
		if err := w.send(websocket.MessageBinary, part); err != nil {
			return written, err
		}
		written += len(part)
		p = p[len(part):]
	}
	return written, nil
}

// WriteText sends one text frame, at most 1 MiB of valid UTF-8. It fails as Write
// does.
func (w *Writer) WriteText(text []byte) error {
	if len(text) > maxText {
		return fmt.Errorf("a text frame of %d bytes: %w", len(text), ErrTooLarge)
	}
	return w.send(websocket.MessageText, text)
}

func (w *Writer) send(kind websocket.MessageType, p []byte) error {
	if w.err != nil {
		return w.err
	}
	w.wire.gather()
	err := w.socket.Write(context.Background(), kind, p)
	if flushed := w.wire.flush(); err == nil {
		err = flushed
	}
	if err != nil {
		if w.err = channelError(err, w.cause); errors.Is(w.err, io.EOF) {
			w.err = ErrChannelLost
		}
		_ = w.wire.Close() // part of a frame may be out: there is nothing more to say
	}
	return w.err
}

// SetIdle replaces ChannelOptions.Idle, also of a Write that waits already: it may
// wait so much longer from now. It may be called at any time.
func (w *Writer) SetIdle(idle time.Duration) { w.wire.boundWrites(idle) }

// Done is closed when the connection is gone. The engine drops it only after the
// reader has left and something more was written.
func (w *Writer) Done() <-chan struct{} { return w.lost }

// Close ends the stream: the reader gets what was written, then io.EOF. It waits
// for up to five seconds until the engine has taken everything; the kernel sends
// the rest. It may be called more than once, and always returns nil.
func (w *Writer) Close() error {
	late := time.AfterFunc(writerGrace, func() { _ = w.wire.Close() })
	defer late.Stop()
	_ = w.socket.Close(websocket.StatusNormalClosure, "stream_complete")
	w.release()
	_ = w.wire.Close()
	return nil
}

// channelError puts an error of the library into our terms.
func channelError(err error, cause func() error) error {
	var closed websocket.CloseError
	switch {
	case cause() != nil:
		return cause()
	case errors.As(err, &closed):
		if closed.Code == websocket.StatusNormalClosure || closed.Code == websocket.StatusNoStatusRcvd {
			return io.EOF
		}
		return fmt.Errorf("%w: closed with code %d", ErrChannelLost, closed.Code)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return ErrStalled
	}
	return fmt.Errorf("%w: %w", ErrChannelLost, err)
}
