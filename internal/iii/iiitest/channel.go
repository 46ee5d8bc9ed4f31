package iiitest

import (
	"bytes"
	"context"
	"crypto/subtle"
	"net"
	"net/http"
	"time"

	"github.com/coder/websocket"
	"github.com/google/uuid"
)

const (
	// defaultBuffer and maxBuffer are messages that a channel holds.
	defaultBuffer = 64
	maxBuffer     = 1024
	// unusedAge is the age at which a channel with an unconnected end is removed.
	unusedAge = 5 * time.Minute
	// usualFrame is the largest frame that SDKs send.
	usualFrame = 64 << 10
)

// A channel carries frames from its writer to its reader.
type channel struct {
	id, key string
	created time.Time
	queue   chan part     // closed by the writer's connection, or by remove
	gone    chan struct{} // closed when the reader has gone, or by the sweep

	// Guarded by the engine's mu.
	reading, writing bool // the end was connected
	left             int  // connections that have ended
	writer           net.Conn
}

type part struct {
	kind websocket.MessageType
	data []byte
}

type createChannelRequest struct {
	BufferSize *int `json:"buffer_size"`
}

func (e *Engine) createChannel(r createChannelRequest) (any, error) {
	size := defaultBuffer
	if r.BufferSize != nil {
		size = min(max(*r.BufferSize, 1), maxBuffer)
	}
	c := &channel{id: uuid.NewString(), key: uuid.NewString(), created: time.Now(), queue: make(chan part, size), gone: make(chan struct{})}
	e.mu.Lock()
	e.channels[c.id] = c
	e.change()
	e.mu.Unlock()
	ref := func(direction string) map[string]string {
		return map[string]string{"channel_id": c.id, "access_key": c.key, "direction": direction}
	}
	return map[string]any{"writer": ref("write"), "reader": ref("read")}, nil
}

// serveChannel serves one end of a channel.
func (e *Engine) serveChannel(w http.ResponseWriter, r *http.Request, conn net.Conn, id string) {
	key, direction := r.URL.Query().Get("key"), r.URL.Query().Get("dir")
	if key == "" || direction != "read" && direction != "write" {
		http.Error(w, "key and dir=read or dir=write are required", http.StatusBadRequest)
		return
	}
	e.mu.Lock()
	c := e.channels[id]
	if c == nil || subtle.ConstantTimeCompare([]byte(c.key), []byte(key)) != 1 {
		e.mu.Unlock()
		http.Error(w, "Channel not found", http.StatusNotFound)
		return
	}
	end := &c.reading
	if direction == "write" {
		end = &c.writing
	}
	taken := *end
	*end = true
	if direction == "write" && !taken {
		c.writer = conn
	}
	e.mu.Unlock()

	socket, err := websocket.Accept(w, r, &websocket.AcceptOptions{OnPingReceived: func(context.Context, []byte) bool {
		if direction == "read" {
			e.mu.Lock()
			e.pings++
			e.mu.Unlock()
		}
		return true
	}})
	if err == nil {
		socket.SetReadLimit(messageLimit)
		defer func() { _ = socket.CloseNow() }()
	}
	switch {
	case taken && err == nil:
		_ = socket.Close(websocket.StatusNoStatusRcvd, "")
	case taken:
	case direction == "read":
		if err == nil {
			e.feedReader(r.Context(), c, socket)
		}
		close(c.gone)
		e.endOf(c)
	default:
		if err == nil {
			e.drainWriter(r.Context(), c, socket, conn)
		}
		close(c.queue)
		e.endOf(c)
	}
}

// feedReader sends what the writer wrote, then closes without a code. That the
// reader is gone it finds when it sends.
func (e *Engine) feedReader(ctx context.Context, c *channel, socket *websocket.Conn) {
	socket.CloseRead(ctx)
	for {
		select {
		case p, more := <-c.queue:
			if !more && e.closing() {
				return
			}
			if !more {
				_ = socket.Close(websocket.StatusNoStatusRcvd, "")
				return
			}
			if socket.Write(ctx, p.kind, p.data) != nil {
				return
			}
		case <-ctx.Done():
			return
		}
	}
}

// drainWriter takes what the writer sends until it closes, or its reader is gone:
// then it cuts the connection without a word. While the queue is full it reads
// nothing, which slows the writer down.
func (e *Engine) drainWriter(ctx context.Context, c *channel, socket *websocket.Conn, conn net.Conn) {
	for {
		kind, frame, err := socket.Reader(ctx)
		if err != nil {
			return
		}
		// Room for a usual frame, and for the read that finds its end.
		data := bytes.NewBuffer(make([]byte, 0, usualFrame+bytes.MinRead))
		if _, err := data.ReadFrom(frame); err != nil {
			return
		}
		select {
		case <-c.gone:
			_ = conn.Close()
			return
		default:
		}
		select {
		case c.queue <- part{kind, data.Bytes()}:
		case <-c.gone:
			_ = conn.Close()
			return
		case <-ctx.Done():
			return
		}
	}
}

// endOf forgets a channel both ends of which have been used.
func (e *Engine) endOf(c *channel) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if c.left++; c.left == 2 {
		delete(e.channels, c.id)
		e.change()
	}
}

// sweepChannels removes channels that have had an unconnected end for too long.
// The other end sees the end of the channel.
func (e *Engine) sweepChannels() {
	ticker := time.NewTicker(sweepInterval)
	defer ticker.Stop()
	for {
		select {
		case <-e.done:
			return
		case <-ticker.C:
		}
		e.mu.Lock()
		for id, c := range e.channels {
			if time.Since(c.created) < unusedAge || c.reading && c.writing {
				continue
			}
			delete(e.channels, id)
			e.change()
			// Nobody can take these ends any more, so nobody else closes.
			if c.writing {
				_ = c.writer.Close()
			} else {
				close(c.queue)
			}
			if !c.reading {
				close(c.gone)
			}
		}
		e.mu.Unlock()
	}
}
