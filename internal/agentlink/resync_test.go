package agentlink_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/agentlink"
)

// socketPair is a link through the kernel, which buffers as QEMU's does.
func socketPair(t testing.TB) (host, guest net.Conn) {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	var conns [2]net.Conn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "link")
		c, err := net.FileConn(f)
		_ = f.Close()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		conns[i] = c
	}
	return conns[0], conns[1]
}

// torn hands out reads and takes writes in pieces of random size.
type torn struct {
	net.Conn
	rnd *rand.Rand
}

func (c torn) Read(p []byte) (int, error) {
	if len(p) > 1 {
		p = p[:1+c.rnd.IntN(len(p))]
	}
	return c.Conn.Read(p)
}

func (c torn) Write(p []byte) (int, error) {
	done := 0
	for done < len(p) {
		n, err := c.Conn.Write(p[done : done+1+c.rnd.IntN(len(p)-done)])
		done += n
		if err != nil {
			return done, err
		}
	}
	return done, nil
}

// exchange resynchronises both ends and then sends a message each way right
// behind the last line; both must arrive whole.
func exchange(t *testing.T, host, guest agentlink.Conn) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	guestDone := make(chan error, 1)
	go func() {
		err := agentlink.ResyncGuest(ctx, guest)
		if err == nil {
			_, err = guest.Write([]byte("\nfrom guest"))
		}
		guestDone <- err
	}()
	if err := agentlink.ResyncHost(ctx, host); err != nil {
		t.Fatalf("host: %v", err)
	}
	expect(t, host, "\nfrom guest")
	if err := <-guestDone; err != nil {
		t.Fatalf("guest: %v", err)
	}
	hostDone := make(chan error, 1)
	go func() {
		_, err := host.Write([]byte("\nfrom host"))
		hostDone <- err
	}()
	expect(t, guest, "\nfrom host")
	if err := <-hostDone; err != nil {
		t.Fatal(err)
	}
}

func expect(t *testing.T, r io.Reader, want string) {
	t.Helper()
	got := make([]byte, len(want))
	if _, err := io.ReadFull(r, got); err != nil || string(got) != want {
		t.Fatalf("after the resync comes %q, %v; want %q", got, err, want)
	}
}

func TestResyncOnAFreshLink(t *testing.T) {
	t.Parallel()
	host, guest := pair(t)
	exchange(t, host, guest)
	// And again: the next session of the same link.
	exchange(t, host, guest)
}

func TestResyncSkipsStaleBytes(t *testing.T) {
	t.Parallel()
	const line = "\nIII-LINK HEL 0123456789abcdef0123456789abcdef\n"
	rnd := rand.New(rand.NewPCG(1, 2))
	noise := make([]byte, 90_000)
	for i := range noise {
		noise[i] = byte(rnd.Uint32())
	}
	for _, tt := range []struct{ name, stale string }{
		{"noise", string(noise)},
		{"newlines", string(bytes.Repeat([]byte("\n"), 30_000))},
		{"half a line", line[:20]},
		{"all but the end", line[:len(line)-1]},
		{"old hello", line},
		{"old lines of each kind", line + "\nIII-LINK ACK 0123456789abcdef0123456789abcdef\n" +
			"\nIII-LINK GO_ 0123456789abcdef0123456789abcdef\n\nIII-LINK UP_ 0123456789abcdef0123456789abcdef\n"},
		{"unknown verb", "\nIII-LINK XYZ 0123456789abcdef0123456789abcdef\n"},
		{"prefix in prefix", "\nIII-LI\nIII-LINK HEL 01234567\nIII-LINK "},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			host, guest := socketPair(t)
			for _, c := range []net.Conn{host, guest} {
				if _, err := c.Write([]byte(tt.stale)); err != nil {
					t.Fatal(err)
				}
			}
			exchange(t, host, guest)
		})
	}
}

func TestResyncOfTornReadsAndWrites(t *testing.T) {
	t.Parallel()
	for seed := range uint64(20) {
		host, guest := socketPair(t)
		exchange(t, torn{host, rand.New(rand.NewPCG(seed, 1))}, torn{guest, rand.New(rand.NewPCG(seed, 2))})
	}
}

// The guest boots long after the host began to ask.
func TestResyncWithALateGuest(t *testing.T) {
	t.Parallel()
	host, guest := socketPair(t)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	hostDone := make(chan error, 1)
	go func() { hostDone <- agentlink.ResyncHost(ctx, host) }()
	// The padded HEL proves that the host has asked several times already.
	if _, err := io.CopyN(io.Discard, guest, 10_000); err != nil {
		t.Fatal(err)
	}
	if err := agentlink.ResyncGuest(ctx, guest); err != nil {
		t.Fatalf("guest: %v", err)
	}
	if err := <-hostDone; err != nil {
		t.Fatalf("host: %v", err)
	}
	if _, err := guest.Write([]byte("first")); err != nil {
		t.Fatal(err)
	}
	expect(t, host, "first")
}

// The guest gives up in the middle and starts over, as an agent does whose
// greeting failed.
func TestResyncSurvivesAGuestThatStartsOver(t *testing.T) {
	t.Parallel()
	host, guest := socketPair(t)
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	hostDone := make(chan error, 1)
	go func() { hostDone <- agentlink.ResyncHost(ctx, host) }()
	// Answer the first HEL by hand as guest 1, and see its GO_.
	line := make([]byte, 47)
	if _, err := io.ReadFull(guest, line); err != nil {
		t.Fatal(err)
	}
	ack := "\nIII-LINK ACK " + string(line[14:30])
	if _, err := io.WriteString(guest, ack+"1111111111111111\n"); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(guest, line); err != nil || !bytes.Contains(line, []byte("GO_")) {
		t.Fatalf("the host sent %q, %v", line, err)
	}
	// Guest 2 answers an old HEL, and must get a GO_ of its own.
	if _, err := io.WriteString(guest, ack+"2222222222222222\n"); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(guest, line); err != nil || !bytes.Contains(line, []byte("2222222222222222")) {
		t.Fatalf("the host sent %q, %v", line, err)
	}
	// Guest 3 comes so late that nothing of the old attempt is left.
	if err := agentlink.ResyncGuest(ctx, guest); err != nil {
		t.Fatalf("guest: %v", err)
	}
	if err := <-hostDone; err != nil {
		t.Fatalf("host: %v", err)
	}
}

// The host believes in a session that the guest has left: the guest's request
// must look like a broken frame to it, wherever in a frame it is.
func TestGuestEndsTheSessionOfAHostThatDoesNotKnow(t *testing.T) {
	t.Parallel()
	host, guest := socketPair(t)
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	guestDone := make(chan error, 1)
	go func() { guestDone <- agentlink.ResyncGuest(ctx, guest) }()
	const largestFrame = 16384 + 9
	rest := make([]byte, largestFrame)
	if _, err := io.ReadFull(host, rest); err != nil {
		t.Fatal(err)
	}
	// What follows is read as the next frame's length of 24 bits.
	head := make([]byte, 9)
	if _, err := io.ReadFull(host, head); err != nil {
		t.Fatal(err)
	}
	if length := int(head[0])<<16 | int(head[1])<<8 | int(head[2]); length <= 16384 {
		t.Errorf("it claims a frame of %d bytes, which HTTP/2 would read", length)
	}
	if err := agentlink.ResyncHost(ctx, host); err != nil {
		t.Fatalf("host: %v", err)
	}
	if err := <-guestDone; err != nil {
		t.Fatalf("guest: %v", err)
	}
	if _, err := guest.Write([]byte("first")); err != nil {
		t.Fatal(err)
	}
	expect(t, host, "first")
}

func TestResyncEndsWithItsContext(t *testing.T) {
	t.Parallel()
	for name, resync := range map[string]func(context.Context, agentlink.Conn) error{
		"host": agentlink.ResyncHost, "guest": agentlink.ResyncGuest,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			// The peer neither reads nor writes; net.Pipe blocks both ways.
			c, _ := pair(t)
			ctx, cancel := context.WithTimeout(t.Context(), 150*time.Millisecond)
			defer cancel()
			if err := resync(ctx, c); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("error is %v", err)
			}
		})
	}
}

func TestResyncEndsWithTheLink(t *testing.T) {
	t.Parallel()
	for name, resync := range map[string]func(context.Context, agentlink.Conn) error{
		"host": agentlink.ResyncHost, "guest": agentlink.ResyncGuest,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c, peer := pair(t)
			_ = peer.Close()
			err := resync(t.Context(), c)
			if !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrClosedPipe) {
				t.Errorf("error is %v", err)
			}
		})
	}
}

func FuzzResyncStaleBytes(f *testing.F) {
	f.Add([]byte("\nIII-LINK HEL 0123"), []byte("PRI * HTTP/2.0"), uint64(1))
	f.Add([]byte("\n\n\n\nIII-LINK GO_ "), []byte("\nIII-LINK ACK 00000000000000000000000000000000\n"), uint64(2))
	f.Fuzz(func(t *testing.T, toGuest, toHost []byte, seed uint64) {
		if len(toGuest)+len(toHost) > 100_000 {
			t.Skip("more than the kernel buffers")
		}
		host, guest := socketPair(t)
		if _, err := host.Write(toGuest); err != nil {
			t.Fatal(err)
		}
		if _, err := guest.Write(toHost); err != nil {
			t.Fatal(err)
		}
		exchange(t, torn{host, rand.New(rand.NewPCG(seed, 1))}, torn{guest, rand.New(rand.NewPCG(seed, 2))})
	})
}
