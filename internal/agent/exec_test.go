//go:build linux

package agent_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	guestv1 "github.com/iii-hq/workers/sandbox-libkrun/api/guest/v1"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/proc"
)

func TestExec(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	dir := t.TempDir()
	for _, c := range []struct {
		name           string
		start          *guestv1.ExecStart
		stdout, stderr string
		code           int32
		signal         uint32
	}{
		{name: "streams and code", start: sh("echo out; echo err >&2; exit 7"), stdout: "out\n", stderr: "err\n", code: 7},
		{name: "signal", start: sh("kill -KILL $$"), code: 137, signal: 9},
		{name: "empty stdin", start: sh("cat; echo end"), stdout: "end\n"},
		{name: "default workdir", start: sh("pwd"), stdout: "/\n"},
		{name: "workdir", start: &guestv1.ExecStart{Argv: [][]byte{[]byte("pwd")}, Workdir: []byte(dir)}, stdout: dir + "\n"},
		{name: "environment", start: &guestv1.ExecStart{
			Argv: [][]byte{[]byte("sh"), []byte("-c"), []byte(`echo "$BASE,$A,$B,$PATH"`)},
			Env:  [][]byte{[]byte("A=1"), []byte("B=x=y"), []byte("A=2")},
		}, stdout: "base,2,x=y,/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n"},
		{name: "bytes that are not UTF-8", start: &guestv1.ExecStart{
			Argv: [][]byte{[]byte("printf"), []byte("%s"), {0xff, 0xfe, '\n'}},
		}, stdout: "\xff\xfe\n"},
		{name: "closed output", start: sh("exec >&- 2>&-; exit 3"), code: 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			o := r.run(t, c.start)
			if o.stdout != c.stdout || o.stderr != c.stderr || o.exit.GetExitCode() != c.code || o.exit.GetSignal() != c.signal ||
				o.exit.GetTimedOut() || o.exit.GetSpawnError() != nil || o.pid == 0 {
				t.Errorf("got %+v", o)
			}
		})
	}
}

func TestSpawnErrors(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, []byte{1, 2, 3}, 0o600); err != nil {
		t.Fatal(err)
	}
	garbage := file + "x"
	if err := proc.WriteProgram(garbage, []byte{1, 2, 3}); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, program, workdir string
		code                   int32
		errno                  uint32
		what                   string
	}{
		{"missing", "/no/such", "", 127, 2, "program"},
		{"missing in PATH", "no-such-program", "", 127, 2, "program"},
		{"below a file", file + "/x", "", 127, 20, "program"},
		{"no permission", file, "", 126, 13, "program"},
		{"directory", "/", "", 126, 13, "program"},
		{"not a program", garbage, "", 126, 8, "program"},
		{"missing workdir", "true", "/no/such", 127, 2, "workdir"},
		{"file as workdir", "true", file, 127, 20, "workdir"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			o := r.run(t, &guestv1.ExecStart{Argv: [][]byte{[]byte(c.program)}, Workdir: []byte(c.workdir)})
			e := o.exit.GetSpawnError()
			if o.exit.GetExitCode() != c.code || e.GetErrno() != c.errno || e.GetWhat() != c.what || e.GetMessage() == "" || o.pid != 0 {
				t.Errorf("got %+v, want code %d, errno %d, %s", o, c.code, c.errno, c.what)
			}
		})
	}
}

// TestRefused breaks one rule of the .proto each; a program that was started
// before must be gone afterwards, which the rig checks.
func TestRefused(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	start := func(change func(*guestv1.ExecStart)) *guestv1.ExecStart {
		s := sh("exec sleep 1000")
		change(s)
		return s
	}
	refusedStarts := map[string]*guestv1.ExecStart{
		"no argv":         {},
		"NUL in argv":     start(func(s *guestv1.ExecStart) { s.Argv[2] = []byte("a\x00b") }),
		"NUL in env":      start(func(s *guestv1.ExecStart) { s.Env = [][]byte{[]byte("A=\x00")} }),
		"env without '='": start(func(s *guestv1.ExecStart) { s.Env = [][]byte{[]byte("A")} }),
		"env without key": start(func(s *guestv1.ExecStart) { s.Env = [][]byte{[]byte("=A")} }),
		"NUL in workdir":  start(func(s *guestv1.ExecStart) { s.Workdir = []byte("/\x00") }),
		"huge terminal":   start(func(s *guestv1.ExecStart) { s.Tty = &guestv1.Resize{Rows: 1 << 16} }),
	}
	for name, s := range refusedStarts {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if _, err := r.exec(t, s).finish(); status.Code(err) != codes.InvalidArgument {
				t.Errorf("error %v, want InvalidArgument", err)
			}
		})
	}
	for name, send := range map[string]func(*session) error{
		"chunk too long": func(s *session) error { return s.stdin(make([]byte, 64<<10+1)) },
		"second start": func(s *session) error {
			return s.send(&guestv1.ExecRequest{Request: &guestv1.ExecRequest_Start{Start: sh("true")}})
		},
		"stdin after its end": func(s *session) error { return errors.Join(s.eof(), s.stdin([]byte("x"))) },
		"signal 0":            func(s *session) error { return s.signal(0) },
		"signal 65":           func(s *session) error { return s.signal(65) },
		"empty message":       func(s *session) error { return s.send(&guestv1.ExecRequest{}) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := r.exec(t, sh("echo up; sleep 1000"))
			s.until("up\n")
			if err := send(s); err != nil {
				t.Fatal(err)
			}
			if _, err := s.finish(); status.Code(err) != codes.InvalidArgument {
				t.Errorf("error %v, want InvalidArgument", err)
			}
		})
	}
	t.Run("message too long", func(t *testing.T) {
		t.Parallel()
		s := r.exec(t, sh("echo up; sleep 1000"))
		s.until("up\n")
		if err := s.stdin(make([]byte, 2<<20)); err != nil {
			t.Fatal(err)
		}
		if _, err := s.finish(); status.Code(err) != codes.ResourceExhausted {
			t.Errorf("error %v, want ResourceExhausted", err)
		}
	})
	for name, send := range map[string]func(*session) error{
		"no start":         func(s *session) error { return s.eof() },
		"nothing sent":     func(s *session) error { return s.stream.CloseSend() },
		"stdin before all": func(s *session) error { return s.stdin([]byte("x")) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			stream, err := r.Exec(bounded(t))
			if err != nil {
				t.Fatal(err)
			}
			s := &session{t: t, stream: stream}
			if err := send(s); err != nil {
				t.Fatal(err)
			}
			if _, err := s.finish(); status.Code(err) != codes.InvalidArgument {
				t.Errorf("error %v, want InvalidArgument", err)
			}
		})
	}
}

func TestManyAtOnce(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	const calls = 1000
	jobs := make(chan int)
	var group sync.WaitGroup
	for range 25 {
		group.Go(func() {
			for i := range jobs {
				s := r.exec(t, sh(fmt.Sprintf("cat; echo $0 >&2; exit %d", i%256)))
				text := strconv.Itoa(i)
				if err := errors.Join(s.stdin([]byte(text)), s.eof()); err != nil && !errors.Is(err, io.EOF) {
					t.Errorf("call %d: %v", i, err)
				}
				o, err := s.finish()
				if err != nil || o.stdout != text || o.stderr != "sh\n" || int(o.exit.GetExitCode()) != i%256 {
					t.Errorf("call %d: %+v, %v", i, o, err)
				}
			}
		})
	}
	for i := range calls {
		jobs <- i
	}
	close(jobs)
	group.Wait()
}

func TestHugeArguments(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	argv := [][]byte{[]byte("sh"), []byte("-c"), []byte(`echo $#`), []byte("sh")}
	for range 6000 {
		argv = append(argv, bytes.Repeat([]byte("y"), 120))
	}
	if o := r.run(t, &guestv1.ExecStart{Argv: argv}); o.stdout != "6000\n" {
		t.Errorf("the program counts %q arguments", o.stdout)
	}
	argv[4] = bytes.Repeat([]byte("z"), 200<<10)
	o := r.run(t, &guestv1.ExecStart{Argv: argv})
	if o.exit.GetExitCode() != 126 || o.exit.GetSpawnError().GetErrno() != 7 {
		t.Errorf("an argument that is too long: %+v, want 126 with E2BIG", o.exit)
	}
}

func TestTerminal(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	start := sh(`stty size; read a; stty size; echo "$a"; stty -echo; echo ready; cat >/dev/null; echo over`)
	start.Tty = &guestv1.Resize{Rows: 10, Cols: 20}
	s := r.exec(t, start)
	s.until("10 20\r\n")
	if err := errors.Join(
		s.send(&guestv1.ExecRequest{Request: &guestv1.ExecRequest_Resize{Resize: &guestv1.Resize{Rows: 30, Cols: 40}}}),
		s.stdin([]byte("word\n")),
	); err != nil {
		t.Fatal(err)
	}
	s.until("word\r\n30 40\r\nword\r\nready\r\n")
	// The end of stdin reaches a program on a terminal too, behind an
	// unfinished line.
	if err := errors.Join(s.stdin([]byte("unfinished")), s.eof()); err != nil {
		t.Fatal(err)
	}
	o, err := s.finish()
	if err != nil || o.stdout != "over\r\n" || o.stderr != "" || o.exit.GetExitCode() != 0 {
		t.Errorf("got %+v, %v", o, err)
	}
}

func TestResizeWithoutTerminal(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	s := r.exec(t, sh("cat"))
	if err := errors.Join(
		s.send(&guestv1.ExecRequest{Request: &guestv1.ExecRequest_Resize{Resize: &guestv1.Resize{Rows: 30, Cols: 40}}}),
		s.stdin([]byte("still here")), s.eof(),
	); err != nil {
		t.Fatal(err)
	}
	if o, err := s.finish(); err != nil || o.stdout != "still here" {
		t.Errorf("got %+v, %v", o, err)
	}
}

func TestSignal(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	s := r.exec(t, sh("trap 'echo caught; exit 9' USR1; echo up; while :; do sleep 0.05; done"))
	s.until("up\n")
	// The program reads none of this, and the signal must not wait behind it.
	for range 4 {
		if err := s.stdin(make([]byte, 60<<10)); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.signal(10); err != nil {
		t.Fatal(err)
	}
	if o, err := s.finish(); err != nil || o.stdout != "caught\n" || o.exit.GetExitCode() != 9 {
		t.Errorf("got %+v, %v", o, err)
	}
}

func alive(pid string) bool {
	stat, err := os.ReadFile("/proc/" + strings.TrimSpace(pid) + "/stat")
	return err == nil && !strings.Contains(string(stat), ") Z ")
}
