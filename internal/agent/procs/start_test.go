//go:build linux

package procs_test

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/agent/procs"
)

func write(t *testing.T, path, content string, mode os.FileMode) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), mode); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestLookup(t *testing.T) {
	t.Parallel()
	table := procs.Open(procs.OwnOnly)
	dir := t.TempDir()
	script := func(name, says string) { write(t, filepath.Join(dir, name), "#!/bin/sh\necho "+says+"\n", 0o755) }
	script("first/tool", "first")
	script("second/tool", "second")
	script("here", "here")
	write(t, filepath.Join(dir, "plain/tool"), "not executable", 0o644)
	path := func(entries ...string) []string {
		return []string{"PATH=/ignored", "PATH=" + strings.Join(entries, ":")}
	}
	in := func(name string) string { return filepath.Join(dir, name) }

	for _, c := range []struct {
		name, program string
		env           []string
		want          string
	}{
		{"first in the child's PATH", "tool", path(in("first"), in("second")), "first"},
		{"missing and unfit entries are passed over", "tool", path(in("none"), in("plain"), in("second")), "second"},
		{"relative entry, relative to the working directory", "tool", path("second"), "second"},
		{"empty entry is the working directory", "here", path("/none", ""), "here"},
		{"relative name, after the change of directory", "./here", nil, "here"},
		{"relative name with a directory", "second/tool", path(in("first")), "second"},
		{"no PATH", "sh", nil, "sh"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			argv := []string{c.program}
			if c.program == "sh" {
				argv = append(argv, "-c", "echo sh")
			}
			p := start(t, table, procs.Command{Argv: argv, Env: c.env, Dir: dir})
			out, _ := io.ReadAll(p.Stdout)
			if string(out) != c.want+"\n" {
				t.Errorf("printed %q, want %q", out, c.want)
			}
		})
	}
}

func TestSpawnErrors(t *testing.T) {
	t.Parallel()
	table := procs.Open(procs.OwnOnly)
	dir := t.TempDir()
	plain := write(t, filepath.Join(dir, "plain"), "x", 0o644)
	noLoader := write(t, filepath.Join(dir, "noloader"), "#!/no/such/interpreter\n", 0o755)
	garbage := write(t, filepath.Join(dir, "garbage"), "\x01\x02\x03", 0o755)
	big := strings.Repeat("x", 256<<10)

	for _, c := range []struct {
		name  string
		cmd   procs.Command
		what  string
		errno syscall.Errno
		says  string
	}{
		{"missing", procs.Command{Argv: []string{"/no/such"}}, procs.WhatProgram, syscall.ENOENT, "/no/such"},
		{"missing in PATH", procs.Command{Argv: []string{"no-such-program"}}, procs.WhatProgram, syscall.ENOENT, "no-such-program"},
		{"empty name", procs.Command{Argv: []string{""}}, procs.WhatProgram, syscall.ENOENT, ""},
		{"below a file", procs.Command{Argv: []string{plain + "/x"}}, procs.WhatProgram, syscall.ENOTDIR, plain},
		{"not executable", procs.Command{Argv: []string{plain}}, procs.WhatProgram, syscall.EACCES, plain},
		{"not executable in PATH", procs.Command{Argv: []string{"plain"}, Env: []string{"PATH=/no:" + dir}}, procs.WhatProgram, syscall.EACCES, "plain"},
		{"directory", procs.Command{Argv: []string{dir}}, procs.WhatProgram, syscall.EACCES, dir},
		{"no interpreter", procs.Command{Argv: []string{noLoader}}, procs.WhatProgram, syscall.ENOENT, "interpreter"},
		{"not a program", procs.Command{Argv: []string{garbage}}, procs.WhatProgram, syscall.ENOEXEC, "#!"},
		{"argument too long", procs.Command{Argv: []string{"/bin/true", big}}, procs.WhatProgram, syscall.E2BIG, "/bin/true"},
		{"NUL in an argument", procs.Command{Argv: []string{"/bin/true", "a\x00b"}}, procs.WhatProgram, syscall.EINVAL, "/bin/true"},
		{"no workdir", procs.Command{Argv: []string{"/bin/true"}, Dir: dir + "/none"}, procs.WhatWorkdir, syscall.ENOENT, dir + "/none"},
		{"file as workdir", procs.Command{Argv: []string{"/bin/true"}, Dir: plain}, procs.WhatWorkdir, syscall.ENOTDIR, plain},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			p, err := table.Start(c.cmd)
			if err == nil {
				_ = p.Close()
				t.Fatal("it started")
			}
			var spawn *procs.SpawnError
			if !errors.As(err, &spawn) || spawn.What != c.what || spawn.Errno != c.errno || !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %#v (%v), want %s, errno %d, naming %q", spawn, err, c.what, c.errno, c.says)
			}
		})
	}
	t.Cleanup(func() { waitAll(t, table) })
}

// TestTimerSlack: the slack of the agent's threads is not the program's.
func TestTimerSlack(t *testing.T) {
	t.Parallel()
	// Not unlocked: the thread ends with this goroutine.
	runtime.LockOSThread()
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, 4_000_000, 0, 0, 0); err != nil {
		t.Fatal(err)
	}
	table := procs.Open(procs.OwnOnly)
	p := start(t, table, sh("cat /proc/self/timerslack_ns"))
	out, _ := io.ReadAll(p.Stdout)
	if string(out) != "50000\n" {
		t.Errorf("the program's timer slack is %q ns, want 50000", out)
	}
}

func TestManyArguments(t *testing.T) {
	t.Parallel()
	table := procs.Open(procs.OwnOnly)
	argv := []string{"/bin/sh", "-c", `echo $#`, "sh"}
	for range 20000 {
		argv = append(argv, strings.Repeat("y", 60))
	}
	p := start(t, table, procs.Command{Argv: argv})
	out, _ := io.ReadAll(p.Stdout)
	if string(out) != "20000\n" {
		t.Errorf("the program counts %q arguments", out)
	}
}

func TestTerminal(t *testing.T) {
	t.Parallel()
	table := procs.Open(procs.OwnOnly)
	cmd := sh(`tty -s && stty size; read line; stty size; echo "got $line"; exit 5`)
	cmd.TTY = &procs.Size{Rows: 24, Cols: 80}
	p := start(t, table, cmd)
	expect(t, p.Stdout, "24 80\r\n")
	if err := p.Resize(procs.Size{Rows: 50, Cols: 132}); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Stdin.WriteString("hello\n"); err != nil {
		t.Fatal(err)
	}
	expect(t, p.Stdout, "hello\r\n50 132\r\ngot hello\r\n")
	if got := status(t, p).Code; got != 5 {
		t.Errorf("exit code %d, want 5", got)
	}
	// The end of a terminal is EIO.
	if err := p.Stdout.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Stdout.Read(make([]byte, 1)); !errors.Is(err, syscall.EIO) {
		t.Errorf("read after the end: %v, want EIO", err)
	}
}

// TestTerminalInterrupt types the interrupt character: only a program with a
// controlling terminal and its own session gets the signal.
func TestTerminalInterrupt(t *testing.T) {
	t.Parallel()
	table := procs.Open(procs.OwnOnly)
	cmd := sh(`echo up; exec sleep 1000`)
	cmd.TTY = &procs.Size{Rows: 24, Cols: 80}
	p := start(t, table, cmd)
	expect(t, p.Stdout, "up\r\n")
	if _, err := p.Stdin.WriteString("\x03"); err != nil {
		t.Fatal(err)
	}
	if got := status(t, p); got.Signal != syscall.SIGINT {
		t.Errorf("ended with %+v, want SIGINT", got)
	}
}
