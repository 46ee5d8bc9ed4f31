//go:build linux

package procs_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/agent/procs"
)

const patience = 60 * time.Second

func sh(script string) procs.Command {
	return procs.Command{Argv: []string{"/bin/sh", "-c", script}, Env: []string{"PATH=" + procs.DefaultPath}}
}

func start(t *testing.T, table *procs.Table, cmd procs.Command) *procs.Process {
	t.Helper()
	p, err := table.Start(cmd)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = p.Signal(syscall.SIGKILL)
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		status(t, p)
	})
	return p
}

func waitAll(t *testing.T, table *procs.Table) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := table.Wait(ctx); err != nil {
		t.Fatalf("processes left: %v", err)
	}
}

func status(t *testing.T, p *procs.Process) procs.Status {
	t.Helper()
	select {
	case <-p.Done():
		return p.Status()
	case <-time.After(patience):
		t.Fatal("the process was not reaped")
		panic("unreachable")
	}
}

func TestOwnOnlyLeavesOtherChildrenAlone(t *testing.T) {
	t.Parallel()
	table := procs.Open(procs.OwnOnly)
	for i := range 20 {
		other := exec.CommandContext(t.Context(), "/bin/sh", "-c", "exit 7")
		if err := other.Start(); err != nil {
			t.Fatal(err)
		}
		p := start(t, table, sh("exit 3"))
		if got := status(t, p).Code; got != 3 {
			t.Fatalf("run %d: own child's code %d, want 3", i, got)
		}
		var exit *exec.ExitError
		if err := other.Wait(); !errors.As(err, &exit) || exit.ExitCode() != 7 {
			t.Fatalf("run %d: the other child ended with %v, want exit status 7", i, err)
		}
	}
}

func TestStatus(t *testing.T) {
	t.Parallel()
	table := procs.Open(procs.OwnOnly)
	for script, want := range map[string]procs.Status{
		"exit 0":        {},
		"exit 255":      {Code: 255},
		"kill -9 $$":    {Code: 137, Signal: syscall.SIGKILL},
		"kill -TERM $$": {Code: 143, Signal: syscall.SIGTERM},
		"kill -SEGV $$": {Code: 139, Signal: syscall.SIGSEGV},
	} {
		got := status(t, start(t, table, sh(script)))
		if got.Code != want.Code || got.Signal != want.Signal {
			t.Errorf("%s: got %d, signal %d, want %d, signal %d", script, got.Code, got.Signal, want.Code, want.Signal)
		}
	}
}

// TestSignalReachesTheGroup kills a shell whose child would outlive it, and a
// group whose leader has already ended: the pipe's end shows that all are gone.
func TestSignalReachesTheGroup(t *testing.T) {
	t.Parallel()
	table := procs.Open(procs.OwnOnly)
	for name, script := range map[string]string{
		"leader alive": "sleep 1000 & echo up; wait",
		"leader gone":  "sleep 1000 & echo up",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := start(t, table, sh(script))
			expect(t, p.Stdout, "up\n")
			if name == "leader gone" {
				status(t, p)
			}
			if err := p.Signal(syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			atEOF(t, p.Stdout)
			status(t, p)
		})
	}
}

func TestSignalAfterTheEnd(t *testing.T) {
	t.Parallel()
	table := procs.Open(procs.OwnOnly)
	p := start(t, table, sh("exit 0"))
	atEOF(t, p.Stdout)
	status(t, p)
	if err := p.Signal(syscall.SIGKILL); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("signal to an ended group: %v, want os.ErrProcessDone", err)
	}
}

func TestSignalAll(t *testing.T) {
	t.Parallel()
	table := procs.Open(procs.OwnOnly)
	var all []*procs.Process
	for range 5 {
		p := start(t, table, sh("sleep 1000 & echo up; wait"))
		expect(t, p.Stdout, "up\n")
		all = append(all, p)
	}
	table.SignalAll(syscall.SIGTERM)
	for _, p := range all {
		atEOF(t, p.Stdout)
		if got := status(t, p); got.Signal != syscall.SIGTERM {
			t.Errorf("ended with %+v, want SIGTERM", got)
		}
	}
	waitAll(t, table)
}

func TestPipesAreSeparate(t *testing.T) {
	t.Parallel()
	table := procs.Open(procs.OwnOnly)
	p := start(t, table, sh("cat; echo err >&2"))
	if _, err := p.Stdin.WriteString("in"); err != nil {
		t.Fatal(err)
	}
	if err := p.Stdin.Close(); err != nil {
		t.Fatal(err)
	}
	out, _ := io.ReadAll(p.Stdout)
	errOut, _ := io.ReadAll(p.Stderr)
	if string(out) != "in" || string(errOut) != "err\n" {
		t.Errorf("stdout %q, stderr %q, want %q, %q", out, errOut, "in", "err\n")
	}
}

// TestNothingLeaksIntoTheProgram looks at its open files, signals and
// environment while other programs have pipes of ours.
func TestNothingLeaksIntoTheProgram(t *testing.T) {
	t.Parallel()
	table := procs.Open(procs.OwnOnly)
	others := map[string]bool{}
	for range 8 {
		p := start(t, table, sh("read x"))
		for _, f := range []*os.File{p.Stdin, p.Stdout, p.Stderr} {
			others[pipeName(t, f)] = true
		}
	}
	signals := start(t, table, procs.Command{Argv: []string{"grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status"}})
	out, _ := io.ReadAll(signals.Stdout)
	lines := strings.Fields(string(out))
	if len(lines) != 4 {
		t.Fatalf("signals blocked and ignored: %q", lines)
	}
	for _, field := range []string{lines[1], lines[3]} {
		mask, err := strconv.ParseUint(field, 16, 64)
		// Signals 32 and 33 are the C library's own: GNU make, for one, starts
		// its commands, this test among them, with those ignored.
		if mask &^= 3 << 31; err != nil || mask != 0 {
			t.Errorf("signals blocked and ignored: %q, want none", lines)
		}
	}
	p := start(t, table, sh(`tr '\0' '\n' </proc/$$/environ; for f in /proc/$$/fd/*; do readlink $f; done`))
	out, _ = io.ReadAll(p.Stdout)
	lines = strings.Fields(string(out))
	if len(lines) < 4 || lines[0] != "PATH="+procs.DefaultPath || !strings.HasPrefix(lines[1], "pipe:") {
		t.Fatalf("environment and open files: %q", lines)
	}
	for _, file := range lines[1:] {
		if others[file] {
			t.Errorf("the program has the pipe %s of another one", file)
		}
	}
}

func pipeName(t *testing.T, f *os.File) string {
	t.Helper()
	info, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		t.Fatal("no inode number")
	}
	return fmt.Sprintf("pipe:[%d]", stat.Ino)
}

func expect(t *testing.T, r *os.File, want string) {
	t.Helper()
	if err := r.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(want))
	if n, err := io.ReadFull(r, got); err != nil || string(got) != want {
		t.Fatalf("read %q, %v, want %q", got[:n], err, want)
	}
}

func atEOF(t *testing.T, r *os.File) {
	t.Helper()
	if err := r.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, r); err != nil {
		t.Fatalf("no end of file: %v", err)
	}
}

func BenchmarkStart(b *testing.B) {
	table := procs.Open(procs.OwnOnly)
	b.ReportMetric(float64(runtime.NumCPU()), "cpus")
	b.Run("table", func(b *testing.B) {
		for b.Loop() {
			p, err := table.Start(procs.Command{Argv: []string{"/bin/true"}})
			if err != nil {
				b.Fatal(err)
			}
			<-p.Done()
			_ = p.Close()
		}
	})
	b.Run("forkexec", func(b *testing.B) {
		for b.Loop() {
			pid, err := syscall.ForkExec("/bin/true", []string{"true"}, &syscall.ProcAttr{Dir: "/"})
			if err != nil {
				b.Fatal(err)
			}
			if _, err := syscall.Wait4(pid, nil, 0, nil); err != nil {
				b.Fatal(err)
			}
		}
	})
}
