package iiitest

import (
	"bufio"
	"context"
	"crypto/sha1" //nolint:gosec // RFC 6455 wants it.
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"
)

// upgrade answers a request for a WebSocket, with more headers where given, and
// drops what comes after it.
func upgrade(conn net.Conn, more ...string) {
	in := bufio.NewReader(conn)
	request, err := http.ReadRequest(in)
	if err != nil {
		return
	}
	//nolint:gosec // RFC 6455 wants it.
	sum := sha1.Sum([]byte(request.Header.Get("Sec-WebSocket-Key") + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"))
	_, _ = fmt.Fprintf(conn, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: %s\r\n%s\r\n",
		base64.StdEncoding.EncodeToString(sum[:]), strings.Join(more, ""))
	go func() { _, _ = io.Copy(io.Discard, in) }()
}

// hostileFrame is the beginning of a WebSocket frame with that first byte, of a payload
// of size bytes, and what there is of it.
func hostileFrame(first byte, size uint64, payload string) []byte {
	out := binary.BigEndian.AppendUint64([]byte{first, 127}, size)
	return append(out, payload...)
}

const (
	textFrame      = 0x81
	hostileWelcome = `{"type":"workerregistered","worker_id":"21babd5c-6347-4a85-8260-afd3031839a1","reattach_token":"65a491c7-7373-4d39-aa21-cf627499d5bb"}`
)

func hostileText(message string) []byte {
	return hostileFrame(textFrame, uint64(len(message)), message)
}

// Hostile are what an engine, or something else at its address, may do to a
// connection, for ServeHostile.
func Hostile() map[string]func(context.Context, net.Conn) {
	drain := func(ctx context.Context, conn net.Conn) { _, _ = io.Copy(io.Discard, conn) }
	wait := func(ctx context.Context, _ net.Conn) { <-ctx.Done() }
	answer := func(response string) func(context.Context, net.Conn) {
		return func(ctx context.Context, conn net.Conn) {
			if _, err := http.ReadRequest(bufio.NewReader(conn)); err == nil {
				_, _ = io.WriteString(conn, response)
			}
			wait(ctx, conn)
		}
	}
	emptyPing := []byte{0x89, 0}
	sends := func(frames ...[]byte) func(context.Context, net.Conn) {
		return func(ctx context.Context, conn net.Conn) {
			upgrade(conn)
			for _, f := range frames {
				_, _ = conn.Write(f)
			}
			// It lives, as far as anybody can tell.
			for _, err := conn.Write(emptyPing); err == nil; _, err = conn.Write(emptyPing) {
				<-time.After(10 * time.Second)
			}
		}
	}
	return map[string]func(context.Context, net.Conn){
		"closes at once":           func(context.Context, net.Conn) {},
		"reads and says nothing":   drain,
		"does not even read":       wait,
		"closes after the request": func(ctx context.Context, conn net.Conn) { _, _ = http.ReadRequest(bufio.NewReader(conn)) },
		"speaks no HTTP":           answer("220 mail.example.com ESMTP\r\n"),
		"is an HTTP server":        answer("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"),
		"is out of order":          answer("HTTP/1.1 503 Service Unavailable\r\nContent-Length: 9999999999\r\n\r\nx"),
		"does not know the path":   answer("HTTP/1.1 404 Not Found\r\n\r\n"),
		"sends elsewhere":          answer("HTTP/1.1 302 Found\r\nLocation: http://elsewhere:1/\r\nContent-Length: 0\r\n\r\n"),
		"never ends its headers": func(ctx context.Context, conn net.Conn) {
			answer("HTTP/1.1 101 Switching Protocols\r\n"+"A: "+strings.Repeat("b", 12<<20))(ctx, conn)
		},
		"accepts another key": answer("HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: AAAA\r\n\r\n"),
		"chooses a protocol": func(ctx context.Context, conn net.Conn) {
			upgrade(conn, "Sec-WebSocket-Protocol: x\r\n")
			wait(ctx, conn)
		},
		"chooses to compress": func(ctx context.Context, conn net.Conn) {
			upgrade(conn, "Sec-WebSocket-Extensions: permessage-deflate\r\n")
			wait(ctx, conn)
		},
		"upgrades and closes": func(ctx context.Context, conn net.Conn) { upgrade(conn) },
		"welcomes and closes": func(ctx context.Context, conn net.Conn) {
			upgrade(conn)
			_, _ = conn.Write(hostileText(hostileWelcome))
		},
		"upgrades and is mute": func(ctx context.Context, conn net.Conn) { upgrade(conn); <-ctx.Done() },

		"masks its frames":       sends([]byte{0x81, 0x80 | 1, 1, 2, 3, 4, 5}),
		"sets reserved bits":     sends([]byte{0xf1, 0}),
		"sends an unknown frame": sends([]byte{0x83, 0}),
		"continues nothing":      sends([]byte{0x80, 0}),
		"sends a long ping":      sends(hostileFrame(0x89, 1000, strings.Repeat("x", 1000))),
		"announces 2^63 bytes":   sends(hostileFrame(textFrame, 1<<63, "")),
		"announces 2^62 bytes":   sends(hostileFrame(textFrame, 1<<62, strings.Repeat("x", 1000))),
		"closes with 1013":       sends([]byte{0x88, 2, 0x03, 0xf5}),
		"closes with a bad code": sends([]byte{0x88, 2, 0, 1}),
		"refuses credentials":    sends(hostileText(`{"type":"error","error":{"code":"AUTH_ERROR","message":"m"}}`)),
	}
}

// ServeHostile gives each connection of l to hostile, and cuts it when that
// returns. Its context ends with the connection's use: stop closes the listener,
// cuts everything and waits.
func ServeHostile(l net.Listener, hostile func(context.Context, net.Conn)) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	all.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			cut := context.AfterFunc(ctx, func() { _ = conn.Close() })
			all.Go(func() {
				defer cut()
				defer func() { _ = conn.Close() }()
				hostile(ctx, conn)
			})
		}
	})
	return func() {
		_ = l.Close()
		cancel()
		all.Wait()
	}
}
