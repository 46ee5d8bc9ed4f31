package proc_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/proc"
)

// sleepForEver waits for a signal that kills. A bare select would not do: the
// runtime of a child with nothing else to run calls that a deadlock and ends it.
func sleepForEver() {
	for {
		_ = syscall.Pause()
	}
}

// The test binary plays the children: PROC_TEST names the part.
func TestMain(m *testing.M) {
	switch os.Getenv("PROC_TEST") {
	case "":
		os.Exit(m.Run())
	case "exit7":
		os.Exit(7)
	case "suicide":
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		sleepForEver()
	case "environ":
		fmt.Println(strings.Join(os.Environ(), " "))
		for fd := 3; fd < 256; fd++ {
			link, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(fd))
			if err != nil {
				continue
			}
			// The Go runtime opens some for itself, all close-on-exec.
			flags, _, _ := syscall.Syscall(syscall.SYS_FCNTL, uintptr(fd), syscall.F_GETFD, 0)
			if flags&syscall.FD_CLOEXEC == 0 {
				fmt.Println(fd, link)
			}
		}
	case "sleeper":
		fmt.Println(os.Getpid())
		sleepForEver()
	case "family":
		// A child of the child, in its group, that ignores what can be ignored.
		signal.Ignore(syscall.SIGTERM, syscall.SIGHUP)
		child := exec.Command(os.Args[0])
		child.Env = []string{"PROC_TEST=sleeper"}
		child.Stdout = os.Stdout
		if err := child.Start(); err != nil {
			panic(err)
		}
		if os.Getenv("LEAVE") != "" {
			_, _ = io.ReadAll(os.Stdin)
			os.Exit(0)
		}
		sleepForEver()
	}
	os.Exit(0)
}

func start(t *testing.T, c proc.Command, part string, env ...string) (*proc.Process, *bufio.Reader) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	c.Path, c.Env, c.Stdout = exe, append([]string{"PROC_TEST=" + part}, env...), w
	p, err := proc.Start(c)
	_ = w.Close()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Kill(); err != nil {
			t.Error(err)
		}
		wait(t, p)
	})
	return p, bufio.NewReader(r)
}

func wait(t *testing.T, p *proc.Process) {
	t.Helper()
	select {
	case <-p.Done():
	case <-time.After(20 * time.Second):
		t.Fatal("the process did not end")
	}
}

func line(t *testing.T, r *bufio.Reader) string {
	t.Helper()
	s, err := r.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(s)
}

func number(t *testing.T, r *bufio.Reader) int {
	t.Helper()
	n, err := strconv.Atoi(line(t, r))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestExit(t *testing.T) {
	t.Parallel()
	for part, want := range map[string]proc.Exit{
		"exit7":   {Code: 7},
		"suicide": {Code: -1, Signal: syscall.SIGKILL},
	} {
		p, _ := start(t, proc.Command{}, part)
		wait(t, p)
		if got := p.Exit(); got != want {
			t.Errorf("%s: %v, want %v", part, got, want)
		}
		if err := p.Kill(); err != nil {
			t.Errorf("Kill after the end: %v", err)
		}
	}
}

func TestChildGetsOnlyWhatItIsGiven(t *testing.T) {
	t.Parallel()
	file, err := os.CreateTemp(t.TempDir(), "given")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	// What this process got from its own parent is not the child's either.
	leak, err := syscall.Dup(int(file.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = syscall.Close(leak) }()
	p, out := start(t, proc.Command{Files: []*os.File{file}}, "environ", "A=b")
	all, err := io.ReadAll(out)
	if err != nil {
		t.Fatal(err)
	}
	wait(t, p)
	want := "PROC_TEST=environ A=b\n3 " + file.Name() + "\n"
	if string(all) != want {
		t.Errorf("the child sees %q, want %q", all, want)
	}
}

func TestStartOfMissingProgram(t *testing.T) {
	t.Parallel()
	_, err := proc.Start(proc.Command{Path: "/no/such/program"})
	if !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "/no/such/program") {
		t.Errorf("error is %v", err)
	}
}

func TestOwnSession(t *testing.T) {
	t.Parallel()
	p, out := start(t, proc.Command{}, "sleeper")
	pid := number(t, out)
	if pid != p.PID() {
		t.Errorf("PID is %d, the child says %d", p.PID(), pid)
	}
	if pgid, err := syscall.Getpgid(pid); err != nil || pgid != pid {
		t.Errorf("its group is %d (%v), want %d", pgid, err, pid)
	}
}

func TestKillTakesTheGroup(t *testing.T) {
	t.Parallel()
	p, out := start(t, proc.Command{}, "family")
	grandchild, err := proc.Identify(number(t, out))
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
	wait(t, p)
	if p.Exit().Signal != syscall.SIGKILL {
		t.Errorf("exit is %v", p.Exit())
	}
	if grandchild.Alive() {
		t.Error("Done was closed while a member of the group was alive")
	}
}

func TestLeaderThatLeavesTakesItsGroupWithIt(t *testing.T) {
	t.Parallel()
	stdin, hold, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = stdin.Close() }()
	p, out := start(t, proc.Command{Stdin: stdin}, "family", "LEAVE=1")
	grandchild, err := proc.Identify(number(t, out))
	if err != nil {
		t.Fatal(err)
	}
	if !grandchild.Alive() {
		t.Fatal("the grandchild is not alive")
	}
	if err := hold.Close(); err != nil {
		t.Fatal(err)
	}
	wait(t, p)
	if want := (proc.Exit{}); p.Exit() != want {
		t.Errorf("exit is %v, want %v", p.Exit(), want)
	}
	if grandchild.Alive() {
		t.Error("Done was closed while a member of the group was alive")
	}
}

func TestIdentity(t *testing.T) {
	t.Parallel()
	p, out := start(t, proc.Command{}, "sleeper")
	id, err := proc.Identify(number(t, out))
	if err != nil {
		t.Fatal(err)
	}
	other := id
	other.Birth += "0"
	if other.Alive() {
		t.Error("an identity of another birth is alive")
	}
	if err := other.Kill(); !errors.Is(err, proc.ErrGone) {
		t.Errorf("Kill of another birth: %v", err)
	}
	if !id.Alive() {
		t.Fatal("the process is gone")
	}
	if err := id.Kill(); err != nil {
		t.Fatal(err)
	}
	wait(t, p)
	if p.Exit().Signal != syscall.SIGKILL {
		t.Errorf("exit is %v", p.Exit())
	}
	if id.Alive() {
		t.Error("alive after its end")
	}
	if err := id.Kill(); !errors.Is(err, proc.ErrGone) {
		t.Errorf("second Kill: %v", err)
	}
	if _, err := proc.Identify(id.PID); !errors.Is(err, proc.ErrGone) {
		t.Errorf("Identify after the end: %v", err)
	}
}

func TestIdentityNeverKillsWhatItMustNot(t *testing.T) {
	t.Parallel()
	for _, pid := range []int{-1, 0, 1} {
		if err := (proc.Identity{PID: pid}).Kill(); !errors.Is(err, proc.ErrGone) {
			t.Errorf("pid %d: %v", pid, err)
		}
	}
}
