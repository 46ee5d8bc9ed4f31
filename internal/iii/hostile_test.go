package iii_test

import (
	"context"
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
					URL: "ws://engine:1", Dial: net.dial, Log: log.logger(), Functions: []iii.Function{{ID: "f::echo", Handler: echo}},
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
