package vmtest

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/guest"
)

// longStream is from what size on another program must have got on beside a
// stream, rather than only after it.
const longStream = 32 << 20

// stuckVolume is what a reader that takes nothing is owed: more than all the
// buffers on the way.
const stuckVolume = 32 << 20

// testStreams sends large volumes both ways through one link, while a program
// talks with its caller all the time and another one's reader is stuck. Nothing
// may be lost, not even what waited for the stuck reader.
func testStreams(t *testing.T, e *Env) {
	r := &running{Env: e, machine: e.Launch(t, e.Launcher(t), e.Request())}
	source := r.newSource(t)
	stuck := source.startStuck(t, r)
	talk := r.startTalk(t, r.machine.Guest())
	for _, size := range e.load(t).Streams {
		for _, way := range []struct {
			name string
			send func(*testing.T, *running, int64)
		}{{"in", streamIn}, {"out", source.streamOut}} {
			before, begin := talk.rounds.Load(), time.Now()
			way.send(t, r, size)
			took, rounds := time.Since(begin), talk.rounds.Load()-before
			t.Logf("%d MiB %s in %v, %.1f MiB/s; beside it %d round trips of another program",
				size>>20, way.name, took.Round(time.Millisecond), float64(size>>20)/took.Seconds(), rounds)
			if size >= longStream && rounds == 0 {
				t.Errorf("nothing of another program came through beside %d MiB %s", size>>20, way.name)
			}
		}
	}
	talk.end(t)
	stuck.end(t)
	source.remove(t, r)
	if err := r.machine.Stop(e.Context(t), time.Second); err != nil {
		t.Errorf("stop: %v", err)
	}
	e.CheckEmpty(t)
}

// streamIn sends bytes to a program that sums them up.
func streamIn(t *testing.T, r *running, size int64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), r.streamTime(size))
	defer cancel()
	in := newNoise(size)
	got := mustExec(ctx, t, r.machine, Shell("sha256sum"), in)
	if want := hex.EncodeToString(in.sum.Sum(nil)); got.ExitCode != 0 || !strings.HasPrefix(got.stdout, want) {
		t.Errorf("%d bytes in: %+v, the guest got %q, want %s", size, got.Result, got.stdout, want)
	}
}

// block is what a guest's program repeats to make a long stream: numbered, so
// that no two parts of the stream are alike, and cheap for an emulated CPU.
const block = 4 << 20

// source makes long streams in a VM.
type source struct {
	file  string
	block []byte
}

// newSource puts the block into the VM.
func (r *running) newSource(t *testing.T) *source {
	t.Helper()
	s := &source{file: "/tmp/vmtest-block-" + r.machine.ID(), block: make([]byte, block)}
	_, _ = rand.NewChaCha8([32]byte{1}).Read(s.block) // never fails
	client := r.machine.Guest()
	if _, err := client.WriteFile(r.Context(t), s.file, guest.WriteOptions{Mode: 0o600}, bytes.NewReader(s.block)); err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *source) remove(t *testing.T, r *running) {
	t.Helper()
	if err := r.machine.Guest().Remove(r.Context(t), s.file, false); err != nil {
		t.Error(err)
	}
}

// script prints a stream of the size.
func (s *source) script(size int64) string {
	return fmt.Sprintf(`i=0; while printf '%%016d' $i && cat %s; do i=$((i+1)); done 2>/dev/null | head -c %d`, s.file, size)
}

// checked is a writer that fails at the first byte which is not the stream's.
type checked struct {
	source *source
	n      int64
}

// Write implements io.Writer.
func (c *checked) Write(p []byte) (int, error) {
	for done := 0; done < len(p); {
		period := int64(16 + len(c.source.block))
		want := c.source.block
		if at := c.n % period; at < 16 {
			want = fmt.Appendf(nil, "%016d", c.n/period)[at:]
		} else {
			want = want[at-16:]
		}
		part := p[done:min(len(p), done+len(want))]
		if !bytes.Equal(part, want[:len(part)]) {
			return done, fmt.Errorf("the stream is wrong behind byte %d", c.n)
		}
		done += len(part)
		c.n += int64(len(part))
	}
	return len(p), nil
}

// streamOut receives bytes that must be exactly the stream's.
func (s *source) streamOut(t *testing.T, r *running, size int64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), r.streamTime(size))
	defer cancel()
	out := &checked{source: s}
	result, err := r.machine.Guest().Exec(ctx, Shell(s.script(size)), guest.IO{Stdout: out})
	if err != nil || result.ExitCode != 0 || out.n != size {
		t.Fatalf("%d bytes out: %+v, %v after %d of them", size, result, err, out.n)
	}
}

// stuckStream is a stream whose reader takes nothing until it is let go.
type stuckStream struct {
	gate  *gate
	out   checked
	ended chan error
}

// Write implements io.Writer.
func (s *stuckStream) Write(p []byte) (int, error) {
	_, _ = s.gate.Write(p) // never fails
	return s.out.Write(p)
}

func (s *source) startStuck(t *testing.T, r *running) *stuckStream {
	t.Helper()
	k := &stuckStream{gate: newGate(), out: checked{source: s}, ended: make(chan error, 1)}
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	go func() {
		_, err := r.machine.Guest().Exec(ctx, Shell(s.script(stuckVolume)), guest.IO{Stdout: k})
		k.ended <- err
	}()
	r.Await(t, k.gate.arrived, "output for the stuck reader")
	t.Cleanup(func() {
		select {
		case <-k.gate.open:
		default: // the test failed
			close(k.gate.open)
		}
	})
	return k
}

// end lets the reader go and checks that it gets everything.
func (s *stuckStream) end(t *testing.T) {
	t.Helper()
	select {
	case err := <-s.ended:
		t.Errorf("the program of the stuck reader ended before it was read: %v", err)
		return
	default:
	}
	close(s.gate.open)
	if err := <-s.ended; err != nil || s.out.n != stuckVolume {
		t.Errorf("the stuck reader got %d bytes in the end: %v", s.out.n, err)
	}
}

// talk is a program that answers each line with that line.
type talk struct {
	rounds atomic.Int64
	stop   chan struct{}
	ended  chan error
}

func (r *running) startTalk(t *testing.T, client *guest.Client) *talk {
	t.Helper()
	k := &talk{stop: make(chan struct{}), ended: make(chan error, 1)}
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	first := make(chan struct{})
	go func() { k.ended <- k.run(ctx, client, first) }()
	r.Await(t, first, "answer of a program")
	return k
}

func (k *talk) run(ctx context.Context, client *guest.Client, first chan<- struct{}) error {
	question, stdin := io.Pipe()
	stdout, answer := io.Pipe()
	program := make(chan error, 1)
	go func() {
		result, err := client.Exec(ctx, Shell("exec cat"), guest.IO{Stdin: question, Stdout: answer})
		if err == nil && result.ExitCode != 0 {
			err = fmt.Errorf("cat: %+v", result)
		}
		_ = answer.CloseWithError(err)
		_ = question.CloseWithError(io.ErrClosedPipe)
		program <- err
	}()
	lines := bufio.NewReader(stdout)
	for i := int64(1); ; i++ {
		want := fmt.Sprintf("round %d\n", i)
		if _, err := io.WriteString(stdin, want); err != nil {
			return fmt.Errorf("round %d: %w, %w", i, err, <-program)
		}
		got, err := lines.ReadString('\n')
		if err != nil {
			return fmt.Errorf("round %d: %w, %w", i, err, <-program)
		}
		if got != want {
			_ = stdin.CloseWithError(io.ErrUnexpectedEOF)
			return fmt.Errorf("round %d came back as %q", i, got)
		}
		if k.rounds.Store(i); i == 1 {
			close(first)
		}
		select {
		case <-k.stop:
			_ = stdin.Close()
			return <-program
		default:
		}
	}
}

// end stops the program, which must have got back every line it was sent.
func (k *talk) end(t *testing.T) {
	t.Helper()
	close(k.stop)
	if err := <-k.ended; err != nil {
		t.Errorf("the talking program: %v", err)
	}
}
