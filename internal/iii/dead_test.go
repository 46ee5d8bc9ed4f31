package iii_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/coder/websocket"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
)

func TestDeadConnectionIsGivenUpAfterAMinute(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var net network
		l := net.listen()
		ended := make(chan time.Duration, 10)
		server := &http.Server{Handler: silent(t, ended), ReadHeaderTimeout: time.Minute}
		go func() { _ = server.Serve(l) }()
		t.Cleanup(func() { _ = server.Close() })
		open(t, iii.Options{URL: "ws://engine:1", Dial: net.dial})
		if got := <-ended; got < 59*time.Second || got > 61*time.Second {
			t.Errorf("given up after %v", got)
		}
	})
}

// silent is an engine that accepts a connection and never says a word.
func silent(t *testing.T, ended chan<- time.Duration) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		socket, err := websocket.Accept(w, r, &websocket.AcceptOptions{OnPingReceived: func(context.Context, []byte) bool { return false }})
		if err != nil {
			t.Error(err)
			return
		}
		began := time.Now()
		for err == nil {
			_, _, err = socket.Read(r.Context())
		}
		select {
		case ended <- time.Since(began):
		default:
		}
		_ = socket.CloseNow()
	})
}

// An engine that reads nothing is given up like one that says nothing; until then
// it does not keep the client from closing.
func TestStuckEngine(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var net network
		l := net.listen()
		release := make(chan struct{})
		server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			socket, err := websocket.Accept(w, r, nil)
			if err != nil {
				t.Error(err)
				return
			}
			<-release
			_ = socket.CloseNow()
		})}
		go func() { _ = server.Serve(l) }()
		t.Cleanup(func() {
			close(release)
			_ = server.Close()
		})
		c := open(t, iii.Options{URL: "ws://engine:1", Dial: net.dial})
		<-time.After(59 * time.Second)
		if net.count() != 1 {
			t.Errorf("%d connections in the first minute", net.count())
		}
		<-time.After(4 * time.Second)
		if net.count() != 2 {
			t.Errorf("%d connections after it", net.count())
		}
		_, err := c.Invoke(t.Context(), iii.Request{Function: "f::x", Timeout: time.Second})
		if !errors.Is(err, iii.ErrTimeout) {
			t.Errorf("got %v", err)
		}
		began := time.Now()
		if err := c.Close(t.Context()); err != nil || time.Since(began) > 2*time.Second {
			t.Errorf("closed after %v: %v", time.Since(began), err)
		}
	})
}

// A large result on a slow network takes longer than an engine may be silent.
func TestSlowNetworkIsNoDeadEngine(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var net network
		l := net.listen()
		const size = 8 << 20
		got := make(chan int64, 1)
		server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			socket, err := websocket.Accept(w, r, nil)
			if err != nil {
				t.Error(err)
				return
			}
			defer func() { _ = socket.CloseNow() }()
			socket.SetReadLimit(2 * size)
			call := `{"type":"invokefunction","invocation_id":"` + uuidText + `","function_id":"f::large","data":{}}`
			if err := socket.Write(r.Context(), websocket.MessageText, []byte(call)); err != nil {
				t.Error(err)
			}
			for total := int64(0); total < size; { // the introduction, and what is of interest
				_, message, err := socket.Reader(r.Context())
				if err != nil {
					t.Error(err)
					break
				}
				for err == nil {
					var n int64
					n, err = io.CopyN(io.Discard, message, 64<<10)
					total += n
					<-time.After(time.Second)
				}
				if total >= size {
					got <- total
				}
			}
		})}
		go func() { _ = server.Serve(l) }()
		t.Cleanup(func() { _ = server.Close() })
		open(t, iii.Options{URL: "ws://engine:1", Dial: net.dial, Functions: []iii.Function{
			{ID: "f::large", Handler: func(context.Context, iii.Invocation) (json.RawMessage, error) {
				return json.RawMessage(`"` + strings.Repeat("x", size) + `"`), nil
			}},
		}})
		select {
		case <-got:
		case <-time.After(time.Hour):
			t.Error("it never came")
		}
		if n := net.count(); n != 1 {
			t.Errorf("%d connections", n)
		}
	})
}
