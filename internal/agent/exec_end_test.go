//go:build linux

package agent_test

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	guestv1 "github.com/iii-hq/workers/sandbox-libkrun/api/guest/v1"
)

const volume = 100 << 20

// TestVolume sends 100 MiB through stdin and takes 100 MiB from stdout, with the
// checksums made by other programs, and looks at the heap meanwhile.
func TestVolume(t *testing.T) {
	r := newRig(t, nil)
	chunk := make([]byte, 64<<10)
	for i := range chunk {
		chunk[i] = byte(i * 7)
	}
	sum := sha256.New()
	for range volume / len(chunk) {
		_, _ = sum.Write(chunk)
	}
	want := fmt.Sprintf("%x", sum.Sum(nil))
	var before, during runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)

	s := r.exec(t, sh("sha256sum"))
	for range volume / len(chunk) {
		if err := s.stdin(chunk); err != nil {
			t.Fatal(err)
		}
	}
	runtime.ReadMemStats(&during)
	if err := s.eof(); err != nil {
		t.Fatal(err)
	}
	if o, err := s.finish(); err != nil || !strings.HasPrefix(o.stdout, want) {
		t.Errorf("stdin: got %q, %v, want %s", o.stdout, err, want)
	}

	s = r.exec(t, sh(fmt.Sprintf("head -c %d /dev/zero | tr '\\0' x | tee /dev/stderr", volume)))
	sums := map[bool][]byte{}
	out, errOut := sha256.New(), sha256.New()
	for {
		msg, err := s.stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if len(msg.GetStdout()) > 64<<10 || len(msg.GetStderr()) > 64<<10 {
			t.Fatalf("a chunk of %d bytes", len(msg.GetStdout())+len(msg.GetStderr()))
		}
		_, _ = out.Write(msg.GetStdout())
		_, _ = errOut.Write(msg.GetStderr())
	}
	sums[false], sums[true] = out.Sum(nil), errOut.Sum(nil)
	all := sha256.New()
	for range volume >> 10 {
		_, _ = io.WriteString(all, strings.Repeat("x", 1<<10))
	}
	for stderr, got := range sums {
		if string(got) != string(all.Sum(nil)) {
			t.Errorf("100 MiB came out changed, stderr: %v", stderr)
		}
	}
	runtime.GC()
	if grown := int64(during.HeapAlloc) - int64(before.HeapAlloc); grown > 48<<20 {
		t.Errorf("the heap of both ends grew by %d MiB while data went through", grown>>20)
	}
}

func TestStuckReaderStallsOnlyItself(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	var stuck []*session
	for range 10 { // more than one connection's window of output
		s := r.exec(t, sh("exec cat /dev/zero"))
		if _, err := s.stream.Recv(); err != nil {
			t.Fatal(err)
		}
		stuck = append(stuck, s)
	}
	if o := r.run(t, sh("head -c 3000000 /dev/zero | wc -c")); strings.TrimSpace(o.stdout) != "3000000" {
		t.Errorf("beside stuck readers: %+v", o)
	}
	for _, s := range stuck {
		s.cancel()
	}
}

func TestUnreadStdinStallsOnlyItself(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	for range 10 {
		s := r.exec(t, sh("exec sleep 1000"))
		go func() { // ends when the test cancels the call
			for s.stdin(make([]byte, 64<<10)) == nil {
				continue
			}
		}()
	}
	if o := r.run(t, sh("echo fine")); o.stdout != "fine\n" {
		t.Errorf("beside unread stdin: %+v", o)
	}
}

func TestProgramThatEndsWithoutReading(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	for name, script := range map[string]string{
		"ends":         "exit 4",
		"closes stdin": "exec <&-; sleep 0.2; exit 4",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := r.exec(t, sh(script))
			go func() {
				for s.stdin(make([]byte, 64<<10)) == nil {
					continue
				}
			}()
			if o, err := s.finish(); err != nil || o.exit.GetExitCode() != 4 {
				t.Errorf("got %+v, %v", o.exit, err)
			}
		})
	}
}

// TestBackgroundChild: the call lasts as long as somebody holds the output.
func TestBackgroundChild(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	o := r.run(t, sh("(sleep 0.3; echo late) & exit 5"))
	if o.stdout != "late\n" || o.exit.GetExitCode() != 5 || o.exit.GetTimedOut() {
		t.Errorf("got %+v", o)
	}
	o = r.run(t, sh("sleep 1000 >/dev/null 2>&1 & echo $!"))
	if !alive(o.stdout) {
		t.Error("a background child without our pipes is gone")
	}
	pid, err := strconv.Atoi(strings.TrimSpace(o.stdout))
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Error(err)
	}
}

// TestTerminalThatIsHeld: a terminal is hung up when its program ends, so a child
// that still holds it keeps the call no longer, but not before all output has come.
func TestTerminalThatIsHeld(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	const size = 1 << 20
	ready := filepath.Join(t.TempDir(), "ready")
	start := sh(fmt.Sprintf(`(trap '' HUP; : >%[1]s; exec sleep 1000) & echo $!
		until [ -e %[1]s ]; do :; done
		head -c %[2]d /dev/zero | tr '\0' x; exit 3`, ready, size))
	start.Tty = &guestv1.Resize{Rows: 10, Cols: 20}
	o := r.run(t, start)
	child, output, _ := strings.Cut(o.stdout, "\r\n")
	if o.exit.GetExitCode() != 3 || o.exit.GetTimedOut() {
		t.Errorf("got %+v", o.exit)
	}
	// The end of stdin is echoed as ^D.
	if n := strings.Count(output, "x"); n != size {
		t.Errorf("%d of %d bytes came", n, size)
	}
	if !alive(child) {
		t.Error("the child is gone, which nobody killed")
	}
	pid, err := strconv.Atoi(child)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Error(err)
	}
}

func TestTimeout(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	for _, c := range []struct {
		name, script string
		code         int32
		signal       uint32
	}{
		{"leader and child", "sleep 1000 & echo $!; wait", 137, 9},
		{"ignores every signal", "trap '' TERM INT HUP; sleep 1000 & echo $!; wait; wait", 137, 9},
		{"only the child is left", "sleep 1000 & echo $!; exit 6", 6, 0},
		// A child in a session of its own survives, as any daemon would, but
		// its hold on the output is not waited for.
		{"escaped child", "setsid sleep 3 & echo $$; wait", 137, 9},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			start := sh(c.script)
			start.TimeoutMs = 1000
			begun := time.Now()
			o := r.run(t, start)
			if !o.exit.GetTimedOut() || o.exit.GetExitCode() != c.code || o.exit.GetSignal() != c.signal {
				t.Errorf("got %+v", o.exit)
			}
			if o.stdout == "" {
				t.Error("output from before the time-out is lost")
			}
			// They were killed; on a busy host they take their time to die.
			eventually(t, func() bool { return !alive(o.stdout) })
			if took := time.Since(begun); took > 30*time.Second {
				t.Errorf("it took %v", took)
			}
		})
	}
}

// TestTimeoutOfAStuckClient: what the pipe held at the kill still comes, long
// after the grace, when the client reads again.
func TestTimeoutOfAStuckClient(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	start := sh("echo $$; exec cat /dev/zero")
	start.TimeoutMs = 500
	s := r.exec(t, start)
	msg, err := s.stream.Recv()
	if err != nil {
		t.Fatal(err)
	}
	pid := fmt.Sprint(msg.GetStarted().GetPid())
	eventually(t, func() bool { return !alive(pid) })
	o, err := s.finish()
	if err != nil || !o.exit.GetTimedOut() || len(o.stdout) < 1<<20 {
		t.Errorf("got %d bytes, exit %+v, %v", len(o.stdout), o.exit, err)
	}
}

func TestCancelKillsTheGroup(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	s := r.exec(t, sh("trap '' TERM HUP; sleep 1000 & echo $!; wait"))
	var child string
	for child == "" {
		msg, err := s.stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		child = string(msg.GetStdout())
	}
	s.cancel()
	if _, err := s.finish(); status.Code(err) != codes.Canceled {
		t.Errorf("error %v, want Canceled", err)
	}
	eventually(t, func() bool { return !alive(child) })
}

func TestLostConnectionKillsTheGroup(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	s := r.exec(t, sh("sleep 1000 & echo $!; wait"))
	var child string
	for child == "" {
		msg, err := s.stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		child = string(msg.GetStdout())
	}
	if err := r.conn.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() bool { return !alive(child) })
}

// eventually polls a state outside of this process that no event tells of.
func eventually(t *testing.T, cond func() bool) {
	t.Helper()
	deadline := time.After(patience)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !cond() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatal("it does not come true")
		}
	}
}
