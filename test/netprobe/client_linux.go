package main

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/test/netprobe/wire"
)

// dialWait bounds each connection's making.
const dialWait = 20 * time.Second

// open connects and asks.
func open(address string, request wire.Request) (net.Conn, error) {
	c, err := net.DialTimeout("tcp", address, dialWait)
	if err != nil {
		return nil, err
	}
	if err := request.Write(c); err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}

// flooded is the outcome of flood.
type flooded struct {
	OK     int
	Errors []string
}

// flood opens n connections, all of which are open before the first is used.
func flood(address string, n int) (flooded, error) {
	var work sync.WaitGroup
	open1 := make(chan struct{})
	failures := make(chan error, n)
	var opened sync.WaitGroup
	opened.Add(n)
	for i := range n {
		work.Go(func() {
			c, err := open(address, wire.Request{Op: wire.Echo})
			opened.Done()
			if err != nil {
				failures <- err
				return
			}
			defer c.Close() //nolint:errcheck // everything was read
			<-open1
			if err := echoed(c, fmt.Sprintf("connection %d", i)); err != nil {
				failures <- err
			}
		})
	}
	opened.Wait()
	close(open1)
	work.Wait()
	close(failures)
	out := flooded{OK: n}
	for err := range failures {
		out.OK--
		if text := err.Error(); !slices.Contains(out.Errors, text) && len(out.Errors) < 10 {
			out.Errors = append(out.Errors, text)
		}
	}
	return out, nil
}

func echoed(c net.Conn, text string) error {
	if _, err := io.WriteString(c, text); err != nil {
		return err
	}
	// Half-closed: the server's answer must still come, and then its end.
	if tcp, ok := c.(*net.TCPConn); ok {
		if err := tcp.CloseWrite(); err != nil {
			return err
		}
	}
	got, err := io.ReadAll(c)
	if err == nil && !bytes.Equal(got, []byte(text)) {
		err = fmt.Errorf("the echo of %q is %q", text, got)
	}
	return err
}

// latencies are of round trips, in microseconds.
type latencies struct{ P50, P90, P99 int64 }

func roundTrips(address string, n int) (latencies, error) {
	c, err := open(address, wire.Request{Op: wire.Echo})
	if err != nil {
		return latencies{}, err
	}
	defer c.Close() //nolint:errcheck // everything was read
	times := make([]time.Duration, n)
	b := []byte{1}
	for i := range times {
		begin := time.Now()
		if _, err := c.Write(b); err != nil {
			return latencies{}, err
		}
		if _, err := io.ReadFull(c, b); err != nil {
			return latencies{}, err
		}
		times[i] = time.Since(begin)
	}
	slices.Sort(times)
	at := func(percent int) int64 { return times[min(n-1, n*percent/100)].Microseconds() }
	return latencies{at(50), at(90), at(99)}, nil
}

// speed is how long a transfer took.
type speed struct{ Micros int64 }

func get(address string, size int64) (speed, error) {
	c, err := open(address, wire.Request{Op: wire.Get, Size: size})
	if err != nil {
		return speed{}, err
	}
	defer c.Close() //nolint:errcheck // only read
	begin := time.Now()
	if err := wire.Drain(c, size); err != nil {
		return speed{}, err
	}
	return speed{time.Since(begin).Microseconds()}, nil
}

func put(address string, size int64) (speed, error) {
	c, err := open(address, wire.Request{Op: wire.Put, Size: size})
	if err != nil {
		return speed{}, err
	}
	defer c.Close() //nolint:errcheck // the answer tells
	begin := time.Now()
	if err := wire.Fill(c, size); err != nil {
		return speed{}, err
	}
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		return speed{}, err
	}
	return speed{time.Since(begin).Microseconds()}, nil
}

// echo serves n connections on a port and ends. It says when it listens.
func echo(port string, n int, out io.Writer) error {
	l, err := net.Listen("tcp", ":"+port)
	if err != nil {
		return err
	}
	defer l.Close() //nolint:errcheck // nothing is lost
	if _, err := fmt.Fprintln(out, "listening"); err != nil {
		return err
	}
	for range n {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		_, _ = io.Copy(c, c) // until the client's end, of whatever kind
		_ = c.Close()        // as above
	}
	return nil
}
