package adapter_test

import (
	"context"
	"net"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/vmtest"
)

// Downloads that nobody reads take no more than their places, and files that fit
// into their channel none.
func TestRead_PlacesAreBounded(t *testing.T) {
	t.Parallel()
	h := newHost(t, setup{downloads: 2})
	id := h.create(t)
	big, small := h.file(t, "big", strings.Repeat("x", 32<<20)), h.file(t, "small", strings.Repeat("x", 1<<20))
	first := h.ok(t, "fs::read", at(id, big))
	h.ok(t, "fs::read", at(id, big))
	h.fails(t, "fs::read", at(id, big), "S400", "2 downloads")
	h.fails(t, "fs::read", at(id, "/no/such"), "S211") // what is wrong with the request comes first
	if data, texts := h.download(t, first["content"]); len(data) != 32<<20 || len(texts) != 0 {
		t.Errorf("%d bytes came, texts %q", len(data), texts)
	}
	read := func(path string) func() bool {
		return func() bool {
			_, err := h.invoke("fs::read", at(id, path))
			return err == nil
		}
	}
	for range 5 { // one after the other has the place, and gives it back
		eventually(t, "a place", read(small))
	}
}

// A download that waits for its reader does not wait on when its sandbox ends.
func TestRead_EndsWithItsSandbox(t *testing.T) {
	t.Parallel()
	var sent atomic.Int64
	h := newHost(t, setup{downloads: 1, dial: func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
		return countedConn{conn, &sent}, err
	}})
	id, other := h.create(t), h.create(t)
	big := h.file(t, "big", strings.Repeat("x", 32<<20))
	h.ok(t, "fs::read", at(id, big))
	var last int64
	quiet := 0
	eventually(t, "a full channel", func() bool {
		quiet++
		if now := sent.Load(); now != last {
			last, quiet = now, 0
		}
		return last > 4<<20 && quiet > 20
	})
	h.fails(t, "fs::read", at(other, big), "S400")
	h.ok(t, "stop", obj{"sandbox_id": id})
	eventually(t, "a place", func() bool {
		_, err := h.invoke("fs::read", at(other, big))
		return err == nil
	})
}

// countedConn counts what is written.
type countedConn struct {
	net.Conn
	sent *atomic.Int64
}

func (c countedConn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	c.sent.Add(int64(n))
	return n, err
}

// An agent of an older build has no file operations: that is S219, in its
// envelope, and programs run all the same.
func TestOldAgentIsS219(t *testing.T) {
	t.Parallel()
	h := newHost(t, setup{fake: vmtest.Fake{Old: true}})
	id := h.create(t)
	for function, more := range map[string]obj{
		"fs::ls": {}, "fs::stat": {}, "fs::mkdir": {}, "fs::rm": {}, "fs::chmod": {"mode": "0644"}, "fs::read": {}, "fs::write": {"content": "x"},
		"fs::grep": {"pattern": "x"}, "fs::sed": {"pattern": "x", "replacement": ""}, "fs::mv": {"src": "/a", "dst": "/b"},
	} {
		e := h.fails(t, function, at(id, "/tmp/x", more), "S219", "supervisor")
		if len(e) != 7 || e["type"] != "filesystem" || e["retryable"] != false || e["docs_url"] != "https://iii.dev/docs/creating-workers/sandboxes#S219" {
			t.Errorf("%s: %v", function, e)
		}
	}
	h.sh(t, id, "true")
	e := h.fails(t, "run", obj{"image": "python", "code": "true", "lang": "sh"}, "S219", "fs::write (code)")
	if fix, _ := e["fix"].(obj); fix["inner_code"] != "S219" {
		t.Errorf("%v", e)
	}
}
