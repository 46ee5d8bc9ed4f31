package iii_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/coder/websocket"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii/iiitest"
)

// ends makes a channel of buffer messages and connects both ends.
func ends(t *testing.T, c *iii.Client, buffer int, o iii.ChannelOptions) (*iii.Writer, *iii.Reader) {
	t.Helper()
	w, r, err := c.CreateChannel(t.Context(), buffer)
	if err != nil {
		t.Fatal(err)
	}
	writer, err := c.OpenWriter(t.Context(), w, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = writer.Close() })
	reader, err := c.OpenReader(t.Context(), r, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = reader.Close() })
	return writer, reader
}

// A writer that waits already takes a new bound at once.
func TestSetIdleWakesAWriter(t *testing.T) {
	t.Parallel()
	inBubble(t, func(t *testing.T, _ *iiitest.Engine, c *iii.Client) {
		writer, _ := ends(t, c, 1, iii.ChannelOptions{Idle: time.Hour})
		ended := make(chan error, 1)
		go func() {
			_, err := writer.Write(make([]byte, 10<<20))
			ended <- err
		}()
		<-time.After(time.Minute)
		began := time.Now()
		writer.SetIdle(10 * time.Second)
		if err := <-ended; !errors.Is(err, iii.ErrStalled) || time.Since(began) != 10*time.Second {
			t.Errorf("got %v after %v", err, time.Since(began))
		}
		_ = writer.Close()
		if took := time.Since(began); took != 10*time.Second {
			t.Errorf("closed after %v", took)
		}
	})
}

// inBubble runs f with fake time and an engine of its own.
func inBubble(t *testing.T, f func(t *testing.T, e *iiitest.Engine, c *iii.Client)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		var net network
		engine := startEngine(t, iiitest.Options{Listener: net.listen()})
		f(t, engine, open(t, iii.Options{URL: engine.URL(), Dial: net.dial}))
	})
}

func TestNoSuchChannel(t *testing.T) {
	t.Parallel()
	ctx := within(t)
	engine := startEngine(t, iiitest.Options{})
	c := open(t, iii.Options{URL: engine.URL()})
	_, good, err := c.CreateChannel(ctx, 0)
	if err != nil {
		t.Fatal(err)
	}
	for name, ref := range map[string]iii.ChannelRef{
		"wrong key": {ChannelID: good.ChannelID, AccessKey: "wrong & wrong"},
		"unknown":   {ChannelID: uuidText, AccessKey: good.AccessKey},
		"no id":     {AccessKey: good.AccessKey},
		"no key":    {ChannelID: good.ChannelID},
		"path":      {ChannelID: "../" + good.ChannelID, AccessKey: good.AccessKey},
		"query":     {ChannelID: good.ChannelID + "?dir=write", AccessKey: good.AccessKey},
		"long":      {ChannelID: strings.Repeat("a", 1<<20), AccessKey: good.AccessKey},
	} {
		if r, err := c.OpenReader(ctx, ref, iii.ChannelOptions{}); !errors.Is(err, iii.ErrNoChannel) {
			t.Errorf("%s: got %v, %v", name, r, err)
		}
		if w, err := c.OpenWriter(ctx, ref, iii.ChannelOptions{}); !errors.Is(err, iii.ErrNoChannel) || strings.Contains(err.Error(), good.AccessKey) {
			t.Errorf("%s: got %v, %v", name, w, err)
		}
	}
}

func TestTakenEnds(t *testing.T) {
	t.Parallel()
	ctx := within(t)
	engine := startEngine(t, iiitest.Options{})
	c := open(t, iii.Options{URL: engine.URL()})
	w, r, err := c.CreateChannel(ctx, 0)
	if err != nil {
		t.Fatal(err)
	}
	writer, err := c.OpenWriter(ctx, w, iii.ChannelOptions{})
	if err != nil {
		t.Fatal(err)
	}
	reader, err := c.OpenReader(ctx, r, iii.ChannelOptions{})
	if err != nil {
		t.Fatal(err)
	}
	second, err := c.OpenReader(ctx, r, iii.ChannelOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(second); err != nil || len(got) != 0 {
		t.Errorf("a second reader got %q, %v", got, err)
	}
	other, err := c.OpenWriter(ctx, w, iii.ChannelOptions{})
	if err != nil {
		t.Fatal(err)
	}
	<-other.Done()
	if _, err := other.Write([]byte("x")); !errors.Is(err, iii.ErrChannelLost) {
		t.Errorf("a second writer got %v", err)
	}
	_ = other.Close()
	if _, err := writer.Write([]byte("mine")); err != nil {
		t.Error(err)
	}
	_ = writer.Close()
	if got, err := io.ReadAll(reader); err != nil || string(got) != "mine" {
		t.Errorf("got %q, %v", got, err)
	}
}

func TestSlowReaderSlowsTheWriter(t *testing.T) {
	t.Parallel()
	inBubble(t, func(t *testing.T, _ *iiitest.Engine, c *iii.Client) {
		writer, reader := ends(t, c, 4, iii.ChannelOptions{})
		data := bytes.Repeat([]byte{1}, 2<<20)
		wrote := make(chan error, 1)
		go func() {
			_, err := writer.Write(data)
			_ = writer.Close()
			wrote <- err
		}()
		<-time.After(time.Hour)
		select {
		case err := <-wrote:
			t.Fatalf("2 MiB went into a channel of 4 frames that nobody read: %v", err)
		default:
		}
		if got, err := io.ReadAll(reader); err != nil || !bytes.Equal(got, data) {
			t.Errorf("got %d bytes, %v", len(got), err)
		}
		if err := <-wrote; err != nil {
			t.Error(err)
		}
	})
}

func TestStalledEnds(t *testing.T) {
	t.Parallel()
	inBubble(t, func(t *testing.T, _ *iiitest.Engine, c *iii.Client) {
		writer, reader := ends(t, c, 1, iii.ChannelOptions{Idle: 5 * time.Second})
		began := time.Now()
		if _, err := io.ReadAll(reader); !errors.Is(err, iii.ErrStalled) || time.Since(began) != 5*time.Second {
			t.Errorf("the reader got %v after %v", err, time.Since(began))
		}
		if _, err := reader.Read(make([]byte, 1)); !errors.Is(err, iii.ErrStalled) {
			t.Errorf("the reader then got %v", err)
		}
		_ = writer.Close()

		// Not stalled: a little comes now and then, and reading pauses.
		writer, reader = ends(t, c, 1, iii.ChannelOptions{Idle: 5 * time.Second})
		go func() {
			for range 20 {
				<-time.After(4 * time.Second)
				_, _ = writer.Write([]byte("x"))
			}
			_ = writer.Close()
		}()
		<-time.After(7 * time.Second)
		if got, err := io.ReadAll(reader); err != nil || len(got) != 20 {
			t.Errorf("got %d bytes, %v", len(got), err)
		}

		writer, _ = ends(t, c, 1, iii.ChannelOptions{Idle: 5 * time.Second})
		if _, err := writer.Write(make([]byte, 10<<20)); !errors.Is(err, iii.ErrStalled) {
			t.Errorf("the writer got %v", err)
		}
		if err := writer.WriteText([]byte("x")); !errors.Is(err, iii.ErrStalled) {
			t.Errorf("the writer then got %v", err)
		}
	})
}

func TestReaderThatLeavesEndsTheWriter(t *testing.T) {
	t.Parallel()
	ctx := within(t)
	engine := startEngine(t, iiitest.Options{})
	c := open(t, iii.Options{URL: engine.URL()})
	writer, reader := ends(t, c, 1, iii.ChannelOptions{})
	wrote := make(chan error, 1)
	go func() {
		for {
			if _, err := writer.Write(make([]byte, 64<<10)); err != nil {
				wrote <- err
				return
			}
		}
	}()
	if _, err := io.ReadFull(reader, make([]byte, 100_000)); err != nil {
		t.Fatal(err)
	}
	_ = reader.Close()
	_ = reader.Close()
	if err := <-wrote; !errors.Is(err, iii.ErrChannelLost) {
		t.Errorf("got %v", err)
	}
	<-writer.Done()
	_ = writer.Close()
	_ = writer.Close()
	if err := engine.Await(ctx, func() bool { return engine.Channels() == 0 }); err != nil {
		t.Errorf("the engine keeps the channel: %v", err)
	}
}

func TestContextEndsAnEnd(t *testing.T) {
	t.Parallel()
	inBubble(t, func(t *testing.T, _ *iiitest.Engine, c *iii.Client) {
		w, r, err := c.CreateChannel(t.Context(), 1)
		if err != nil {
			t.Fatal(err)
		}
		errMine := errors.New("mine")
		ctx, cancel := context.WithCancelCause(t.Context())
		writer, err := c.OpenWriter(ctx, w, iii.ChannelOptions{})
		if err != nil {
			t.Fatal(err)
		}
		reader, err := c.OpenReader(ctx, r, iii.ChannelOptions{})
		if err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 2)
		go func() {
			for {
				if _, err := writer.Write(make([]byte, 1<<20)); err != nil {
					ended <- err
					return
				}
			}
		}()
		synctest.Wait()
		cancel(errMine)
		if err := <-ended; !errors.Is(err, errMine) {
			t.Errorf("the writer got %v", err)
		}
		if _, err := io.Copy(io.Discard, reader); !errors.Is(err, errMine) {
			t.Errorf("the reader got %v", err)
		}
		_ = writer.Close()
	})
}

func TestUnusedChannelIsSwept(t *testing.T) {
	t.Parallel()
	inBubble(t, func(t *testing.T, engine *iiitest.Engine, c *iii.Client) {
		w1, _, err := c.CreateChannel(t.Context(), 1)
		if err != nil {
			t.Fatal(err)
		}
		_, r2, err := c.CreateChannel(t.Context(), 1)
		if err != nil {
			t.Fatal(err)
		}
		writer, err := c.OpenWriter(t.Context(), w1, iii.ChannelOptions{})
		if err != nil {
			t.Fatal(err)
		}
		reader, err := c.OpenReader(t.Context(), r2, iii.ChannelOptions{})
		if err != nil {
			t.Fatal(err)
		}
		<-writer.Done()
		if _, err := writer.Write([]byte("x")); !errors.Is(err, iii.ErrChannelLost) {
			t.Errorf("the writer got %v", err)
		}
		_ = writer.Close()
		if got, err := io.ReadAll(reader); err != nil || len(got) != 0 {
			t.Errorf("the reader got %q, %v", got, err)
		}
		if n := engine.Channels(); n != 0 {
			t.Errorf("%d channels are left", n)
		}
		if _, err := c.OpenReader(t.Context(), r2, iii.ChannelOptions{}); !errors.Is(err, iii.ErrNoChannel) {
			t.Errorf("got %v", err)
		}
	})
}

func TestEngineThatDiesIsNotTheEndOfAStream(t *testing.T) {
	t.Parallel()
	engine := startEngine(t, iiitest.Options{})
	c := open(t, iii.Options{URL: engine.URL()})
	writer, reader := ends(t, c, 1, iii.ChannelOptions{})
	if _, err := writer.Write([]byte("half")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(reader, make([]byte, 4)); err != nil {
		t.Fatal(err)
	}
	engine.Close()
	if _, err := reader.Read(make([]byte, 1)); !errors.Is(err, iii.ErrChannelLost) {
		t.Errorf("got %v", err)
	}
	<-writer.Done()
	_ = writer.Close()
}

// The engine does not wait for the echo of its Close, nor read what readers send.
func TestReaderTakesAnAbruptEnd(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var net network
		l := net.listen()
		server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if !strings.HasPrefix(r.URL.Path, "/base/ws/channels/") || r.URL.Query().Get("dir") != "read" || r.URL.Query().Get("key") != "k&y" {
				http.NotFound(w, r)
				return
			}
			socket, err := websocket.Accept(w, r, nil)
			if err != nil {
				t.Error(err)
				return
			}
			if err := socket.Write(r.Context(), websocket.MessageBinary, []byte("data")); err != nil {
				t.Error(err)
			}
			closed := make(chan struct{})
			go func() {
				defer close(closed)
				_ = socket.Close(websocket.StatusNoStatusRcvd, "")
			}()
			<-closed
		})}
		go func() { _ = server.Serve(l) }()
		t.Cleanup(func() { _ = server.Close() })
		c := open(t, iii.Options{URL: "ws://engine:1/base/?token=x", Dial: net.dial})
		reader, err := c.OpenReader(t.Context(), iii.ChannelRef{ChannelID: "abc", AccessKey: "k&y"}, iii.ChannelOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(reader); err != nil || string(got) != "data" {
			t.Errorf("got %q, %v", got, err)
		}
	})
}
