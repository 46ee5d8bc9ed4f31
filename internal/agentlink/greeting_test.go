package agentlink_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/agentlink"
)

const token = "00112233445566778899aabbccddeeff"

// pair is a link in memory: both ends closed at the test's end.
func pair(t testing.TB) (host, guest net.Conn) {
	t.Helper()
	host, guest = net.Pipe()
	t.Cleanup(func() { _ = host.Close(); _ = guest.Close() })
	return host, guest
}

type greeted struct {
	time time.Time
	err  error
}

func greet(c agentlink.Conn, token string) <-chan greeted {
	done := make(chan greeted, 1)
	go func() {
		at, err := agentlink.Greet(c, token)
		done <- greeted{at, err}
	}()
	return done
}

func TestGreetingTellsTheTimeAndLeavesWhatFollows(t *testing.T) {
	t.Parallel()
	host, guest := pair(t)
	now := time.Unix(1_800_000_000, 123_456_789)
	done := greet(guest, token)
	if err := agentlink.Welcome(host, token, now); err != nil {
		t.Fatal(err)
	}
	got := <-done
	if got.err != nil || !got.time.Equal(now) {
		t.Fatalf("Greet: %v, %v; want %v", got.time, got.err, now)
	}
	go func() { _, _ = guest.Write([]byte("PRI")); _ = guest.Close() }()
	if rest, err := io.ReadAll(host); string(rest) != "PRI" || err != nil {
		t.Errorf("host reads %q, %v after the greeting", rest, err)
	}
}

func TestWrongTokenIsRefusedAtBothEnds(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ name, theirs, ours string }{
		{"other", strings.Repeat("f", 32), token},
		{"prefix", token[:31], token},
		{"empty", "", token},
		{"both empty", "", ""},
		{"longest", strings.Repeat("x", 256), token},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			host, guest := pair(t)
			done := greet(guest, tt.theirs)
			err := agentlink.Welcome(host, tt.ours, time.Now())
			if err == nil || !strings.Contains(err.Error(), "wrong token") {
				t.Errorf("Welcome: %v", err)
			}
			got := <-done
			if !errors.Is(got.err, agentlink.ErrRefused) || !strings.Contains(got.err.Error(), "wrong token") {
				t.Errorf("Greet: %v", got.err)
			}
			for _, err := range []error{err, got.err} {
				if tt.ours != "" && strings.Contains(err.Error(), tt.ours) {
					t.Errorf("error shows the token: %v", err)
				}
			}
		})
	}
}

func TestOtherVersionOfTheAgentIsNamedToBoth(t *testing.T) {
	t.Parallel()
	host, guest := pair(t)
	answer := make(chan []byte, 1)
	go func() {
		msg := binary.BigEndian.AppendUint32([]byte("IIIG"), 9)
		msg = binary.BigEndian.AppendUint16(msg, 0)
		_, _ = guest.Write(msg)
		b, _ := io.ReadAll(guest)
		answer <- b
	}()
	err := agentlink.Welcome(host, token, time.Now())
	if err == nil || !strings.Contains(err.Error(), "version 9") || !strings.Contains(err.Error(), "this one 1") {
		t.Errorf("Welcome: %v", err)
	}
	_ = host.Close()
	if got := <-answer; !bytes.Contains(got, []byte("version 9")) {
		t.Errorf("the agent was told %q", got)
	}
}

func TestOtherVersionOfTheHost(t *testing.T) {
	t.Parallel()
	host, guest := pair(t)
	done := greet(guest, token)
	if _, err := io.ReadFull(host, make([]byte, 10+len(token))); err != nil {
		t.Fatal(err)
	}
	msg := binary.BigEndian.AppendUint32([]byte("IIIW"), 5)
	msg = append(msg, make([]byte, 11)...)
	if _, err := host.Write(msg); err != nil {
		t.Fatal(err)
	}
	if got := <-done; got.err == nil || !strings.Contains(got.err.Error(), "version 5") {
		t.Errorf("Greet: %v", got.err)
	}
}

func TestWelcomeOfHostileGreetings(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ name, in, want string }{
		{"http2 preface", "PRI * HTTP/2.0\r\n\r\n", "begins with"},
		{"nothing", "", "EOF"},
		{"cut", "IIIG\x00\x00", "unexpected EOF"},
		{"lying length", "IIIG\x00\x00\x00\x01\xff\xff", "claims"},
		{"cut token", "IIIG\x00\x00\x00\x01\x00\x20abc", "unexpected EOF"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			host, guest := pair(t)
			go func() { _, _ = guest.Write([]byte(tt.in)); _ = guest.Close() }()
			if err := agentlink.Welcome(host, token, time.Now()); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error is %v, want one with %q", err, tt.want)
			}
		})
	}
}

// script is a link whose other end says a fixed text and takes everything.
type script struct{ io.Reader }

func (script) Write(p []byte) (int, error) { return len(p), nil }
func (script) SetDeadline(time.Time) error { return nil }

func FuzzWelcome(f *testing.F) {
	f.Add([]byte("IIIG\x00\x00\x00\x01\x00\x20" + token))
	f.Add([]byte("IIIG\x00\x00\x00\x02"))
	f.Add([]byte("IIIG\x00\x00\x00\x01\xff\xff"))
	f.Fuzz(func(t *testing.T, in []byte) {
		err := agentlink.Welcome(script{bytes.NewReader(in)}, token, time.Now())
		good := bytes.HasPrefix(in, []byte("IIIG\x00\x00\x00\x01\x00\x20"+token))
		if good != (err == nil) {
			t.Errorf("%q: %v", in, err)
		}
	})
}

func FuzzGreet(f *testing.F) {
	f.Add([]byte("IIIW\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"))
	f.Add([]byte("IIIW\x00\x00\x00\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02no"))
	f.Add([]byte("IIIW\x00\x00\x00\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\xff\xff"))
	f.Fuzz(func(t *testing.T, in []byte) {
		_, err := agentlink.Greet(script{bytes.NewReader(in)}, token)
		if err == nil && !bytes.HasPrefix(in, []byte("IIIW\x00\x00\x00\x01\x00")) {
			t.Errorf("took %q for a welcome", in)
		}
	})
}
