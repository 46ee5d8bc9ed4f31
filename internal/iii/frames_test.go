package iii_test

import (
	"context"
	"io"
	"net"
	"sync/atomic"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii/iiitest"
)

// countingConn counts its writes.
type countingConn struct {
	net.Conn
	writes *atomic.Int64
}

func (c countingConn) Write(p []byte) (int, error) {
	c.writes.Add(1)
	return c.Conn.Write(p)
}

// The library writes a frame in pieces of 4 KiB; a system call for each made
// downloads half as fast again.
func TestWriterSendsAFrameAtOnce(t *testing.T) {
	t.Parallel()
	engine := startEngine(t, iiitest.Options{})
	var writes atomic.Int64
	c := open(t, iii.Options{URL: engine.URL(), Dial: func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
		return countingConn{conn, &writes}, err
	}})
	writer, reader := ends(t, c, 0, iii.ChannelOptions{})
	before := writes.Load()
	const frames = 16
	if _, err := writer.Write(make([]byte, frames*64<<10)); err != nil {
		t.Fatal(err)
	}
	if err := writer.WriteText(make([]byte, 1<<20)); err != nil {
		t.Fatal(err)
	}
	// The text is gathered in parts of 128 KiB at most.
	if n := writes.Load() - before; n > frames+9 {
		t.Errorf("%d frames of 64 KiB and a text of 1 MiB took %d writes", frames, n)
	}
	if err := writer.Close(); err != nil {
		t.Fatal(err)
	}
	if n, err := io.Copy(io.Discard, reader); err != nil || n != frames*64<<10 {
		t.Errorf("%d bytes came, %v", n, err)
	}
}
