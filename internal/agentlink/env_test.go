package agentlink_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"runtime"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/agentlink"
)

func frame(t testing.TB, payload []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := agentlink.WriteEnv(&b, payload); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestEnvRoundTripLeavesWhatFollows(t *testing.T) {
	t.Parallel()
	for _, size := range []int{0, 1, 4095, 1 << 16, agentlink.MaxEnv} {
		payload := bytes.Repeat([]byte{0, 0xff, '\n'}, size/3+1)[:size]
		in := append(frame(t, payload), "next"...)
		r := iotest.HalfReader(bytes.NewReader(in))
		got, err := agentlink.ReadEnv(r)
		if err != nil {
			t.Fatalf("%d bytes: %v", size, err)
		}
		if !bytes.Equal(got, payload) {
			t.Fatalf("%d bytes came back changed", size)
		}
		rest, err := io.ReadAll(r)
		if err != nil || string(rest) != "next" {
			t.Fatalf("after the frame: %q, %v", rest, err)
		}
	}
}

func TestEnvRefusesTooMuch(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	if err := agentlink.WriteEnv(&b, make([]byte, agentlink.MaxEnv+1)); err == nil {
		t.Error("WriteEnv took a payload above the limit")
	}
	if b.Len() != 0 {
		t.Errorf("WriteEnv wrote %d bytes before refusing", b.Len())
	}
}

func TestEnvFaults(t *testing.T) {
	t.Parallel()
	good := frame(t, []byte("payload"))
	change := func(f func(b []byte)) []byte {
		b := bytes.Clone(good)
		f(b)
		return b
	}
	for _, tt := range []struct {
		name string
		in   []byte
		want string
	}{
		{"magic", change(func(b []byte) { b[0] = 'X' }), "begins with"},
		{"version", change(func(b []byte) { binary.BigEndian.PutUint32(b[4:], 7) }), "version 7"},
		{"one over the limit", change(func(b []byte) { binary.BigEndian.PutUint32(b[8:], agentlink.MaxEnv+1) }), "claims"},
		{"4 GiB", change(func(b []byte) { binary.BigEndian.PutUint32(b[8:], 1<<32-1) }), "claims"},
		{"payload bit", change(func(b []byte) { b[12] ^= 1 }), "checksum"},
		{"checksum bit", change(func(b []byte) { b[len(b)-1] ^= 1 }), "checksum"},
		{"shorter length", change(func(b []byte) { binary.BigEndian.PutUint32(b[8:], 6) }), "checksum"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			_, err := agentlink.ReadEnv(bytes.NewReader(tt.in))
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error is %v, want one with %q", err, tt.want)
			}
			if err != nil && strings.Contains(err.Error(), "payload") {
				t.Errorf("error shows the payload: %v", err)
			}
		})
	}
}

func TestEnvCutShort(t *testing.T) {
	t.Parallel()
	good := frame(t, []byte("payload"))
	for n := range good {
		_, err := agentlink.ReadEnv(bytes.NewReader(good[:n]))
		want := io.ErrUnexpectedEOF
		if n == 0 {
			want = io.EOF
		}
		if !errors.Is(err, want) {
			t.Errorf("%d of %d bytes: %v, want %v", n, len(good), err, want)
		}
	}
}

// A frame that claims much and delivers little must not cost what it claims.
func TestEnvLyingLengthAllocatesNothing(t *testing.T) {
	head := frame(t, nil)[:12]
	binary.BigEndian.PutUint32(head[8:], 1<<31)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range 100 {
		if _, err := agentlink.ReadEnv(bytes.NewReader(head)); err == nil {
			t.Fatal("no error")
		}
	}
	runtime.ReadMemStats(&after)
	if got := after.TotalAlloc - before.TotalAlloc; got > agentlink.MaxEnv {
		t.Errorf("100 refusals allocated %d bytes", got)
	}
}

func FuzzReadEnv(f *testing.F) {
	f.Add([]byte(nil))
	f.Add([]byte("IIIE"))
	f.Add(frame(f, nil))
	f.Add(frame(f, []byte(`{"version":1}`)))
	f.Add(append(frame(f, []byte("a")), frame(f, []byte("b"))...))
	f.Add([]byte("IIIE\x00\x00\x00\x01\xff\xff\xff\xff"))
	f.Fuzz(func(t *testing.T, in []byte) {
		r := bytes.NewReader(in)
		payload, err := agentlink.ReadEnv(r)
		if err != nil {
			return
		}
		taken := in[:len(in)-r.Len()]
		if !bytes.Equal(taken, frame(t, payload)) {
			t.Errorf("accepted %x, which is not the frame of its payload", taken)
		}
	})
}
