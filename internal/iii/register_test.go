package iii_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii/iiitest"
)

// The welcome may come before anything is sent. A first connection that then took
// itself for its own predecessor was cut by the engine, once in a thousand times.
func TestFirstConnectionReplacesNone(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	reattached := 0
	engine := startEngine(t, iiitest.Options{Observe: func(_ string, text []byte) {
		if strings.Contains(string(text), `"reattach"`) {
			mu.Lock()
			defer mu.Unlock()
			reattached++
		}
	}})
	for i := range 500 {
		client, err := iii.Open(iii.Options{URL: engine.URL(), Name: fmt.Sprint("worker-", i), Log: new(logbook).logger()})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := client.Invoke(within(t), iii.Request{Function: "engine::workers::list"}); err != nil {
			t.Error(err)
		}
		if err := client.Close(context.Background()); err != nil {
			t.Error(err)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if reattached > 0 {
		t.Errorf("%d first connections replaced one", reattached)
	}
}
