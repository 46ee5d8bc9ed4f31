//go:build linux

package boot

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/agentlink"
)

const (
	patience = 60 * time.Second
	token    = "00112233445566778899aabbccddeeff"
)

// wire is a port whose host end is a socket.
func wire(t *testing.T) (guest *port, host net.Conn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	guest = &port{File: os.NewFile(uintptr(fds[0]), "port")}
	f := os.NewFile(uintptr(fds[1]), "host")
	host, err = net.FileConn(f)
	if err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
	t.Cleanup(func() {
		_ = host.Close()
		_ = guest.Close()
	})
	return guest, host
}

func newListener(t *testing.T, guest *port) *listener {
	t.Helper()
	l := listen(&serialLink{port: guest}, token, slog.New(slog.DiscardHandler))
	t.Cleanup(func() { _ = l.Close() })
	return l
}

func bounded(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// welcome opens the next session at the host's end.
func welcome(t *testing.T, host net.Conn) {
	t.Helper()
	if err := agentlink.ResyncHost(bounded(t), host); err != nil {
		t.Fatal(err)
	}
	// The clock of the machine that runs this test stays as it is.
	if err := agentlink.Welcome(host, token, time.Now()); err != nil {
		t.Fatal(err)
	}
}

func accept(t *testing.T, l *listener) net.Conn {
	t.Helper()
	conn, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	return conn
}

func roundTrip(t *testing.T, from, to net.Conn, text string) {
	t.Helper()
	if err := to.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(from, text); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(text))
	if _, err := io.ReadFull(to, got); err != nil || string(got) != text {
		t.Fatalf("got %q, %v, want %q", got, err, text)
	}
}

func TestSessionsFollowOneAnother(t *testing.T) {
	t.Parallel()
	guest, host := wire(t)
	l := newListener(t, guest)
	for range 3 {
		welcome(t, host)
		if err := l.first(bounded(t)); err != nil {
			t.Fatal(err)
		}
		conn := accept(t, l)
		roundTrip(t, host, conn, "to the guest")
		roundTrip(t, conn, host, "to the host")
		// What is left of this session must not reach the next one.
		if _, err := io.WriteString(host, strings.Repeat("left over ", 1000)); err != nil {
			t.Fatal(err)
		}
		reading := make(chan error, 1)
		go func() {
			_, err := io.Copy(io.Discard, conn)
			reading <- err
		}()
		if err := conn.Close(); err != nil {
			t.Fatal(err)
		}
		if err := <-reading; err == nil {
			t.Error("a read of the closed session ended without an error")
		}
		if _, err := conn.Write([]byte("x")); !errors.Is(err, net.ErrClosed) {
			t.Errorf("write to the closed session: %v", err)
		}
		if err := conn.SetDeadline(time.Time{}); !errors.Is(err, net.ErrClosed) {
			t.Errorf("deadline of the closed session: %v", err)
		}
	}
}

func TestWrongTokenIsRefused(t *testing.T) {
	t.Parallel()
	guest, host := wire(t)
	l := newListener(t, guest)
	if err := agentlink.ResyncHost(bounded(t), host); err != nil {
		t.Fatal(err)
	}
	if err := agentlink.Welcome(host, strings.Repeat("f", 32), time.Now()); err == nil {
		t.Fatal("the host took a wrong token")
	}
	if err := l.first(bounded(t)); !errors.Is(err, agentlink.ErrRefused) {
		t.Errorf("error %v, want the refusal", err)
	}
}

// TestGarbageIsRetried: an answer that makes no sense is not the end.
func TestGarbageIsRetried(t *testing.T) {
	t.Parallel()
	guest, host := wire(t)
	l := newListener(t, guest)
	if err := agentlink.ResyncHost(bounded(t), host); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(host, strings.Repeat("garbage ", 100)); err != nil {
		t.Fatal(err)
	}
	welcome(t, host)
	if err := l.first(bounded(t)); err != nil {
		t.Fatal(err)
	}
	roundTrip(t, host, accept(t, l), "fine")
}

func TestCloseEndsAccept(t *testing.T) {
	t.Parallel()
	guest, _ := wire(t)
	l := newListener(t, guest)
	accepted := make(chan error, 1)
	go func() {
		_, err := l.Accept()
		accepted <- err
	}()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-accepted:
		if !errors.Is(err, net.ErrClosed) {
			t.Errorf("error %v, want net.ErrClosed", err)
		}
	case <-time.After(patience):
		t.Error("Accept does not end")
	}
}

// TestPortWaitsForItsHost: end of file, which is how a port says that its host
// end is not connected, is waited out up to the deadline.
func TestPortWaitsForItsHost(t *testing.T) {
	t.Parallel()
	guest, host := wire(t)
	if err := host.Close(); err != nil {
		t.Fatal(err)
	}
	if err := guest.SetDeadline(time.Now().Add(50 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if _, err := guest.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("error %v, want the deadline", err)
	}
}
