package vmtest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/guest"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
)

// running is one VM that many tests use at once.
type running struct {
	*Env
	machine *vm.Machine
}

// runPrograms boots one VM and runs the tests of programs in it, in parallel.
func runPrograms(t *testing.T, e *Env) {
	r := &running{Env: e, machine: e.Launch(t, e.Launcher(t), e.Request())}
	t.Run("group", func(t *testing.T) {
		for name, run := range map[string]func(*testing.T, *running){
			"Hello": testHello, "Exit": testExit, "SpawnErrors": testSpawnErrors,
			"Surroundings": testSurroundings, "Stdin": testStdin, "Volume": testVolume,
			"StuckReader": testStuckReader, "Timeout": testTimeout, "BackgroundChild": testBackgroundChild,
			"Parallel": testParallel, "LostClient": testLostClient, "Signals": testSignals, "Terminal": testTerminal, "Files": testFiles,
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				run(t, r)
			})
		}
	})
	if err := r.machine.Stop(e.Context(t), time.Second); err != nil {
		t.Errorf("stop: %v", err)
	}
	e.CheckEmpty(t)
}

// outcome is a program's result and output.
type outcome struct {
	guest.Result
	stdout, stderr string
}

func (r *running) exec(t testing.TB, cmd guest.Command, stdin io.Reader) outcome {
	t.Helper()
	return mustExec(r.Context(t), t, r.machine, cmd, stdin)
}

func mustExec(ctx context.Context, t testing.TB, m *vm.Machine, cmd guest.Command, stdin io.Reader) outcome {
	t.Helper()
	var stdout, stderr bytes.Buffer
	result, err := m.Guest().Exec(ctx, cmd, guest.IO{Stdin: stdin, Stdout: &stdout, Stderr: &stderr})
	if err != nil {
		t.Fatalf("%q: %v", cmd.Argv, err)
	}
	return outcome{result, stdout.String(), stderr.String()}
}

func testHello(t *testing.T, r *running) {
	info, err := r.machine.Guest().Hello(r.Context(t), "again")
	if err != nil {
		t.Fatal(err)
	}
	if info.AgentVersion == "" || info.KernelRelease == "" {
		t.Errorf("info is %+v", info)
	}
	status, err := r.machine.Status(r.Context(t))
	if err != nil {
		t.Fatal(err)
	}
	if status.State != vm.Running || status.Running.Before(status.Started) || status.Started.IsZero() {
		t.Errorf("status is %+v", status)
	}
	if _, err := r.machine.Stats(r.Context(t)); err != nil {
		t.Errorf("stats: %v", err)
	}
}

func testExit(t *testing.T, r *running) {
	for script, want := range map[string]guest.Result{
		"exit 0":                        {},
		"exit 7":                        {ExitCode: 7},
		"exit 255":                      {ExitCode: 255},
		"kill -TERM $$; sleep 60":       {ExitCode: 143, Signal: 15},
		"kill -KILL $$; sleep 60":       {ExitCode: 137, Signal: 9},
		"printf out; printf err >&2":    {},
		"exec 1>&- 2>&-; sleep 0.1":     {},
		"sh -c 'kill -SEGV $$'; exit 5": {ExitCode: 5},
	} {
		got := r.exec(t, Shell(script), nil)
		got.Duration = 0
		if got.Result != want {
			t.Errorf("%q: %+v, want %+v", script, got.Result, want)
		}
		if strings.HasPrefix(script, "printf") && (got.stdout != "out" || got.stderr != "err") {
			t.Errorf("%q: stdout %q, stderr %q", script, got.stdout, got.stderr)
		}
	}
}

func testSpawnErrors(t *testing.T, r *running) {
	for _, tt := range []struct {
		cmd  guest.Command
		code int
		what string
	}{
		{guest.Command{Argv: []string{"no-such-program"}}, 127, "program"},
		{guest.Command{Argv: []string{"/no/such/program"}}, 127, "program"},
		{guest.Command{Argv: []string{"/etc/passwd"}}, 126, "program"},
		{guest.Command{Argv: []string{"/"}}, 126, "program"},
		{guest.Command{Argv: []string{"sh"}, Workdir: "/no/such/dir"}, 127, "workdir"},
	} {
		got := r.exec(t, tt.cmd, nil)
		if got.ExitCode != tt.code || got.SpawnError == nil || got.SpawnError.What != tt.what {
			t.Errorf("%q in %q: %d %+v, want %d %s", tt.cmd.Argv, tt.cmd.Workdir, got.ExitCode, got.SpawnError, tt.code, tt.what)
		}
	}
	if _, err := r.machine.Guest().Exec(r.Context(t), guest.Command{}, guest.IO{}); err == nil {
		t.Error("an empty argv was accepted")
	}
}

func testSurroundings(t *testing.T, r *running) {
	cmd := Shell(`printf '%s|%s|%s|' "$GREETING" "$OWN" "$PATH"; pwd; printf %s "$1"`)
	cmd.Env = []string{"OWN=first", "OWN=se cond", "GREETING=bye"}
	cmd.Workdir = "/tmp"
	cmd.Argv = append(cmd.Argv, "sh", "any\xff\n bytes")
	want := "bye|se cond|" + strings.TrimPrefix(guestPath, "PATH=") + "|/tmp\nany\xff\n bytes"
	if got := r.exec(t, cmd, nil); got.stdout != want {
		t.Errorf("stdout is %q, want %q", got.stdout, want)
	}
	if got := r.exec(t, Shell(`printf %s "$GREETING$OWN"`), nil); got.stdout != "hello" {
		t.Errorf("one program's environment reached another: %q", got.stdout)
	}
}

func testStdin(t *testing.T, r *running) {
	if got := r.exec(t, Shell("cat; echo end"), nil); got.stdout != "end\n" {
		t.Errorf("without stdin: %q", got.stdout)
	}
	if got := r.exec(t, Shell("cat; echo end"), strings.NewReader("data")); got.stdout != "dataend\n" {
		t.Errorf("with stdin: %q", got.stdout)
	}
	// A program that reads nothing ends although there is a lot to read, and
	// although nothing ever comes.
	if got := r.exec(t, Shell("exit 3"), &noise{left: 1 << 40}); got.ExitCode != 3 {
		t.Errorf("unread stdin: %+v", got.Result)
	}
	stuck, w := io.Pipe()
	defer func() { _ = w.Close() }()
	if got := r.exec(t, Shell("exit 3"), stuck); got.ExitCode != 3 {
		t.Errorf("silent stdin: %+v", got.Result)
	}
}

// noise is a reader of random bytes that keeps their checksum.
type noise struct {
	left int64
	rng  *rand.ChaCha8
	sum  hash.Hash
}

func newNoise(size int64) *noise {
	return &noise{left: size, rng: rand.NewChaCha8([32]byte{}), sum: sha256.New()}
}

func (n *noise) Read(p []byte) (int, error) {
	if n.left == 0 {
		return 0, io.EOF
	}
	p = p[:min(int64(len(p)), n.left)]
	n.left -= int64(len(p))
	if n.rng != nil {
		_, _ = n.rng.Read(p) // never fails
		_, _ = n.sum.Write(p)
	}
	return len(p), nil
}

// volume is what goes through stdin and comes back through stdout.
const volume = 100 << 20

func testVolume(t *testing.T, r *running) {
	in, out := newNoise(volume), sha256.New()
	begin := time.Now()
	result, err := r.machine.Guest().Exec(r.Context(t), guest.Command{Argv: []string{"cat"}}, guest.IO{Stdin: in, Stdout: out})
	if err != nil || result.ExitCode != 0 {
		t.Fatalf("%+v, %v", result, err)
	}
	if !bytes.Equal(in.sum.Sum(nil), out.Sum(nil)) {
		t.Error("the bytes changed on their way there and back")
	}
	t.Logf("%d MiB there and back in %v, beside other tests", volume>>20, time.Since(begin).Round(time.Millisecond))
}

// gate is a writer that blocks from the first byte until it is opened.
type gate struct {
	arrived, open chan struct{}
	once          sync.Once
}

func newGate() *gate { return &gate{arrived: make(chan struct{}), open: make(chan struct{})} }

func (g *gate) Write(p []byte) (int, error) {
	g.once.Do(func() { close(g.arrived) })
	<-g.open
	return len(p), nil
}

func testStuckReader(t *testing.T, r *running) {
	g := newGate()
	ctx, cancel := context.WithCancel(r.Context(t))
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		_, err := r.machine.Guest().Exec(ctx, Shell("cat /dev/zero"), guest.IO{Stdout: g})
		ended <- err
	}()
	r.Await(t, g.arrived, "output")
	for range 3 {
		if got := r.exec(t, Shell("head -c 1000000 /dev/zero | wc -c"), nil); strings.TrimSpace(got.stdout) != "1000000" {
			t.Errorf("beside a stuck reader: %+v %q", got.Result, got.stdout)
		}
	}
	cancel()
	close(g.open)
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("the cancelled call: %v", err)
	}
}

// alive reports whether the process runs in the guest.
func (r *running) alive(t testing.TB, pid string) bool {
	t.Helper()
	// A zombie of another parent would still count; the agent reaps all.
	return r.exec(t, Shell("kill -0 "+pid), nil).ExitCode == 0
}

func testTimeout(t *testing.T, r *running) {
	cmd := Shell("sleep 1000 & echo $!; exec sleep 1000")
	cmd.Timeout = 2 * time.Second
	got := r.exec(t, cmd, nil)
	if !got.TimedOut || got.ExitCode != 137 || got.Duration < cmd.Timeout {
		t.Errorf("result is %+v", got.Result)
	}
	child := strings.TrimSpace(got.stdout)
	if child == "" {
		t.Fatal("output before the time-out is lost")
	}
	Eventually(t, r.Patience, "the end of the background child", func() bool { return !r.alive(t, child) })
}

func testBackgroundChild(t *testing.T, r *running) {
	got := r.exec(t, Shell("(sleep 1; echo late) & exit 4"), nil)
	if got.ExitCode != 4 || got.stdout != "late\n" {
		t.Errorf("a child that holds stdout: %+v %q", got.Result, got.stdout)
	}
	got = r.exec(t, Shell("sleep 1000 >/dev/null 2>&1 </dev/null & echo $!"), nil)
	child := strings.TrimSpace(got.stdout)
	if !r.alive(t, child) {
		t.Error("a child that holds nothing was killed with its parent")
	}
	if got := r.exec(t, Shell("kill -9 "+child), nil); got.ExitCode != 0 {
		t.Errorf("kill: %q", got.stderr)
	}
}

func testParallel(t *testing.T, r *running) {
	var calls sync.WaitGroup
	for i := range 20 {
		calls.Go(func() {
			var stdout bytes.Buffer
			result, err := r.machine.Guest().Exec(r.Context(t), Shell(fmt.Sprintf("cat; exit %d", i)),
				guest.IO{Stdin: strings.NewReader(fmt.Sprint("call ", i)), Stdout: &stdout})
			if err != nil || result.ExitCode != i || stdout.String() != fmt.Sprint("call ", i) {
				t.Errorf("call %d: %+v %q %v", i, result, &stdout, err)
			}
		})
	}
	calls.Wait()
}

func testLostClient(t *testing.T, r *running) {
	ctx, cancel := context.WithCancel(r.Context(t))
	defer cancel()
	pidR, pidW := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		_, err := r.machine.Guest().Exec(ctx, Shell("trap '' TERM HUP; sleep 1000 & echo $!; wait"), guest.IO{Stdout: pidW})
		ended <- err
	}()
	var child string
	if _, err := fmt.Fscan(pidR, &child); err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("error is %v", err)
	}
	Eventually(t, r.Patience, "the end of the lost client's program", func() bool { return !r.alive(t, child) })
}

func testSignals(t *testing.T, r *running) {
	signals := make(chan int, 1)
	ready := newGate()
	close(ready.open)
	go func() {
		<-ready.arrived
		signals <- 10 // SIGUSR1
	}()
	result, err := r.machine.Guest().Exec(r.Context(t), Shell("trap 'exit 42' USR1; echo ready; while :; do sleep 0.1; done"),
		guest.IO{Stdout: ready, Signals: signals})
	if err != nil || result.ExitCode != 42 {
		t.Errorf("%+v, %v", result, err)
	}
}

func testTerminal(t *testing.T, r *running) {
	cmd := Shell("test -t 0 && test -t 1 && test -t 2 && stty size; read line; echo got $line >&2")
	cmd.TTY = &guest.Size{Rows: 33, Cols: 77}
	got := r.exec(t, cmd, strings.NewReader("typed\n"))
	if !strings.Contains(got.stdout, "33 77") || !strings.Contains(got.stdout, "got typed") || got.stderr != "" || got.ExitCode != 0 {
		t.Errorf("%+v stdout %q stderr %q", got.Result, got.stdout, got.stderr)
	}
}

// Output runs a shell command that has to succeed and returns its stdout.
func Output(ctx context.Context, m *vm.Machine, script string) (string, error) {
	var stdout, stderr bytes.Buffer
	result, err := m.Guest().Exec(ctx, Shell(script), guest.IO{Stdout: &stdout, Stderr: &stderr})
	if err == nil && result.ExitCode != 0 {
		err = fmt.Errorf("exit code %d: %s", result.ExitCode, &stderr)
	}
	return stdout.String(), err
}

func testFiles(t *testing.T, r *running) {
	ctx, files := r.Context(t), r.machine.Guest()
	dir := "/tmp/vmtest-" + r.machine.ID()
	path := dir + "/below/file"
	in, out := newNoise(8<<20), sha256.New()
	if n, err := files.WriteFile(ctx, path, guest.WriteOptions{Mode: 0o640, Parents: true}, in); err != nil || n != 8<<20 {
		t.Fatalf("write: %d bytes, %v", n, err)
	}
	if entry, err := files.Stat(ctx, path); err != nil || entry.Size != 8<<20 || entry.Mode&0o7777 != 0o640 {
		t.Errorf("stat: %+v, %v", entry, err)
	}
	file, err := files.OpenFile(ctx, path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(out, file); err != nil || !bytes.Equal(in.sum.Sum(nil), out.Sum(nil)) {
		t.Errorf("the content changed on its way there and back (%v)", err)
	}
	if err := file.Close(); err != nil {
		t.Error(err)
	}
	if got := r.exec(t, Shell("wc -c < "+path), nil); strings.TrimSpace(got.stdout) != "8388608" {
		t.Errorf("a program sees %q bytes", got.stdout)
	}
	if err := files.Remove(ctx, dir, true); err != nil {
		t.Error(err)
	}
	if _, err := files.Stat(ctx, dir); err == nil {
		t.Error("the removed directory is there")
	}
}
