package iii_test

import (
	"context"
	"io"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii/iiitest"
)

// Whatever is at the engine's address, the client keeps trying without haste, is
// there soon after the engine is, and leaves nothing when it is closed.
func TestHostileEngines(t *testing.T) {
	t.Parallel()
	for name, hostile := range iiitest.Hostile() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var net network
				stop := iiitest.ServeHostile(net.listen(), hostile)
				var log logbook
				c := open(t, iii.Options{
					URL: "ws://engine:1", Dial: net.dialOnly(t, "engine:1"), Log: log.logger(), Functions: []iii.Function{{ID: "f::echo", Handler: echo}},
				})
				<-time.After(10 * time.Minute)
				if n := net.count(); n < 1 || n > 10*60+10 {
					t.Errorf("%d connections in 10 minutes", n)
				}
				engine := startEngine(t, iiitest.Options{Listener: net.listen()})
				stop()
				began := time.Now()
				ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
				defer cancel()
				if err := engine.AwaitFunction(ctx, "f::echo"); err != nil {
					t.Fatal(err)
				}
				if waited := time.Since(began); waited > 39*time.Second {
					t.Errorf("it was there after %v", waited)
				}
				if err := c.Err(); err != nil {
					t.Error(err)
				}
				if size := len(log.String()); size > 200<<10 {
					t.Errorf("it logged %d bytes", size)
				}
			})
		})
	}
}

// Ends of channels are no more patient than their options say, whatever is at the
// other end, and Close leaves nothing.
func TestHostileChannels(t *testing.T) {
	t.Parallel()
	ref := iii.ChannelRef{ChannelID: uuidText, AccessKey: uuidText}
	for name, hostile := range iiitest.Hostile() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var net network
				defer iiitest.ServeHostile(net.listen(), hostile)()
				c := open(t, iii.Options{URL: "ws://engine:1", Dial: net.dialOnly(t, "engine:1")})
				began := time.Now()
				reader, err := c.OpenReader(t.Context(), ref, iii.ChannelOptions{Idle: 5 * time.Second})
				if err == nil {
					ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
					stop := context.AfterFunc(ctx, func() { _ = reader.Close() })
					_, err = io.Copy(io.Discard, reader)
					stop()
					cancel()
					_ = reader.Close()
				}
				if took := time.Since(began); took > time.Minute || err == nil {
					t.Errorf("the reader ended after %v: %v", took, err)
				}
				began = time.Now()
				writer, err := c.OpenWriter(t.Context(), ref, iii.ChannelOptions{Idle: 5 * time.Second})
				if err == nil {
					_, err = writer.Write(make([]byte, 1<<20))
					_ = writer.Close()
				}
				if took := time.Since(began); took > 21*time.Second {
					t.Errorf("the writer ended after %v: %v", took, err)
				}
			})
		})
	}
}

// dialOnly is dial for the one address that is meant to get credentials.
func (n *network) dialOnly(t *testing.T, only string) func(ctx context.Context, network, address string) (net.Conn, error) {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		if address != only {
			t.Errorf("%s was dialled", address)
		}
		return n.dial(ctx, network, address)
	}
}
