package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	guestv1 "github.com/iii-hq/workers/sandbox-libkrun/api/guest/v1"
	shimv1 "github.com/iii-hq/workers/sandbox-libkrun/api/shim/v1"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/proc"
)

// patience bounds every wait: far more than a busy host needs.
const patience = 60 * time.Second

// commandLaunch makes this program a launcher: it starts a shim with the spec
// on stdin, prints the shim's process id, then "ready", and hangs.
const commandLaunch = "launch"

// playShim, set in the environment, makes this program krun-shim.
const playShim = "KRUN_SHIM_TEST_PLAYS_SHIM"

// This program also plays the shim, its VMM, and its launcher.
func TestMain(m *testing.M) {
	if os.Getenv(playShim) != "" {
		main()
	}
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case commandBoot, commandConfine:
			main()
		case "-name":
			os.Exit(playVMM(os.Args[1:]))
		case commandLaunch:
			os.Exit(playLauncher())
		}
	}
	os.Exit(m.Run())
}

func playLauncher() int {
	lock, err := os.OpenFile(os.Args[2], os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		panic(err)
	}
	// As on a host that keeps core dumps.
	var dumps syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_CORE, &dumps); err != nil {
		panic(err)
	}
	dumps.Cur = dumps.Max
	if err := syscall.Setrlimit(syscall.RLIMIT_CORE, &dumps); err != nil {
		panic(err)
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		panic(err)
	}
	readyR, readyW, _ := os.Pipe()
	lifelineR, lifelineW, _ := os.Pipe()
	child, err := proc.Start(proc.Command{
		Path: os.Args[0], Args: []string{commandBoot}, Stdin: os.Stdin, Stderr: os.Stderr,
		Files: []*os.File{readyW, lifelineR, lock},
	})
	if err != nil {
		panic(err)
	}
	_, _ = fmt.Println(child.PID())
	_ = readyW.Close()
	if _, err := readyR.Read(make([]byte, 1)); err == nil {
		_, _ = fmt.Println("ready")
	}
	if len(os.Args) > 3 {
		_, _ = lifelineW.WriteString(os.Args[3])
	}
	<-child.Done()
	_, _ = fmt.Println(child.Exit())
	_ = lifelineW.Close()
	return 0
}

// fixture is a spec whose files are there, in a directory of its own.
func fixture(t *testing.T, id string) *bootspec.Spec {
	t.Helper()
	// Not t.TempDir: a socket's path must be short.
	dir, err := os.MkdirTemp("/tmp", "krunshimtest-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	machine := "q35"
	if runtime.GOARCH != "amd64" {
		machine = "virt" // whose kernel is not looked into
	}
	spec := &bootspec.Spec{
		Version: bootspec.Version, ID: id, VMM: bootspec.QEMU, Lifetime: bootspec.Tied,
		Dir: filepath.Join(dir, "machine"), Socket: filepath.Join(dir, "run", "vm.sock"),
		CPUs: 1, MemoryMiB: 64,
		Lower: bootspec.Disk{Path: filepath.Join(dir, "lower"), ReadOnly: true},
		Upper: bootspec.Disk{Path: filepath.Join(dir, "machine", "upper.ext4")},
		QEMU:  &bootspec.QEMUSpec{Binary: self, Machine: machine, Kernel: self, Initramfs: filepath.Join(dir, "initramfs")},
		Guest: bootspec.Guest{Version: bootspec.Version, Token: strings.Repeat("ab", 16), Hostname: "box", Env: []string{"A=b"}},
	}
	if err := os.Mkdir(spec.Dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{spec.Lower.Path, spec.Upper.Path, spec.QEMU.Initramfs, filepath.Join(spec.Dir, "spec.json")} {
		if err := os.WriteFile(file, make([]byte, 4096), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return spec
}

// launched is a launcher with a shim.
type launched struct {
	t        *testing.T
	spec     *bootspec.Spec
	launcher *exec.Cmd
	out      *bufio.Reader
	log      *bytes.Buffer
	shim     proc.Identity
}

func launch(t *testing.T, spec *bootspec.Spec, lifeline string) *launched {
	t.Helper()
	l := &launched{t: t, spec: spec, log: &bytes.Buffer{}}
	l.launcher = exec.CommandContext(context.Background(), os.Args[0], commandLaunch, filepath.Join(spec.Dir, "lock"))
	if lifeline != "" {
		l.launcher.Args = append(l.launcher.Args, lifeline)
	}
	stdin, err := l.launcher.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := l.launcher.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	shimLog, err := os.Create(filepath.Join(filepath.Dir(spec.Dir), "shim.log"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = shimLog.Close() }()
	l.launcher.Stderr = shimLog
	if err := l.launcher.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = l.launcher.Process.Kill()
		_ = l.launcher.Wait()
		l.gone("shim", l.shim)
		if t.Failed() {
			body, _ := os.ReadFile(shimLog.Name())
			t.Logf("shim log:\n%s", body)
		}
	})
	l.out = bufio.NewReader(out)
	pid, err := strconv.Atoi(l.line())
	if err != nil {
		t.Fatal(err)
	}
	if l.shim, err = proc.Identify(pid); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(bootspec.Write(stdin, spec), stdin.Close()); err != nil {
		t.Fatal(err)
	}
	return l
}

func (l *launched) line() string {
	l.t.Helper()
	line, err := l.out.ReadString('\n')
	if err != nil && !errors.Is(err, io.EOF) {
		l.t.Fatal(err)
	}
	return strings.TrimSpace(line)
}

func (l *launched) ready() {
	l.t.Helper()
	if got := l.line(); got != "ready" {
		l.t.Fatalf("the launcher says %q", got)
	}
}

func (l *launched) dial() *grpc.ClientConn {
	l.t.Helper()
	conn, err := grpc.NewClient("passthrough:///shim",
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", l.spec.Socket)
		}),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func (l *launched) context() context.Context {
	ctx, cancel := context.WithTimeout(l.t.Context(), patience)
	l.t.Cleanup(cancel)
	return ctx
}

// hello waits until the guest has booted.
func (l *launched) hello() {
	l.t.Helper()
	if _, err := guestv1.NewAgentServiceClient(l.dial()).Hello(l.context(), &guestv1.HelloRequest{}); err != nil {
		l.t.Fatal(err)
	}
}

// vmm waits until the VMM runs and returns it.
func (l *launched) vmm() proc.Identity {
	l.t.Helper()
	control, ctx := shimv1.NewShimServiceClient(l.dial()), l.context()
	for {
		status, err := control.Status(ctx, &shimv1.StatusRequest{})
		if err != nil {
			l.t.Fatal(err)
		}
		if pid := int(status.GetVmmPid()); pid != l.shim.PID {
			identity, err := proc.Identify(pid)
			if err != nil {
				l.t.Fatal(err)
			}
			return identity
		}
	}
}

// gone waits until the process is gone.
func (l *launched) gone(name string, process proc.Identity) {
	l.t.Helper()
	deadline := time.Now().Add(patience)
	for process.Alive() {
		if time.Now().After(deadline) {
			l.t.Errorf("the %s (process %d) is still there", name, process.PID)
			return
		}
		<-time.After(5 * time.Millisecond)
	}
}

func (l *launched) report() bootspec.End {
	l.t.Helper()
	body, err := os.ReadFile(filepath.Join(l.spec.Dir, "end.json"))
	if err != nil {
		l.t.Fatal(err)
	}
	var end bootspec.End
	if err := json.Unmarshal(body, &end); err != nil {
		l.t.Fatal(err)
	}
	return end
}

func (l *launched) expectFiles(want bool) {
	l.t.Helper()
	for _, path := range []string{l.spec.Dir, l.spec.Socket} {
		if _, err := os.Lstat(path); err == nil && !want {
			l.t.Errorf("%s is left", path)
		}
	}
}

func (l *launched) expectExit(want string) {
	l.t.Helper()
	if got := l.line(); got != want {
		l.t.Errorf("the shim's end is %q, want %q", got, want)
	}
}

// steps of a boot: how far it gets before something is killed.
func steps() map[string]struct {
	id   string
	wait func(*launched)
} {
	return map[string]struct {
		id   string
		wait func(*launched)
	}{
		"booting": {"hang-1", (*launched).ready},
		"running": {"boot-1", func(l *launched) { l.ready(); l.hello() }},
	}
}

func TestKilledLauncherLeavesNothing(t *testing.T) {
	t.Parallel()
	for name, step := range steps() {
		for _, lifetime := range []string{bootspec.Tied, bootspec.Detached} {
			t.Run(name+"/"+lifetime, func(t *testing.T) {
				t.Parallel()
				spec := fixture(t, step.id)
				spec.Lifetime = lifetime
				l := launch(t, spec, "")
				step.wait(l)
				vmm := l.vmm()
				if err := l.launcher.Process.Kill(); err != nil {
					t.Fatal(err)
				}
				l.gone("VMM", vmm)
				l.gone("shim", l.shim)
				l.expectFiles(false)
			})
		}
	}
}

func TestLauncherKilledBeforeTheSpecIsWritten(t *testing.T) {
	t.Parallel()
	// The shim's stdin ends in the middle: it must end too.
	cmd := exec.CommandContext(t.Context(), os.Args[0], commandLaunch, filepath.Join(t.TempDir(), "lock"))
	cmd.Stdin = strings.NewReader("IIISPEC10000")
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "unexpected EOF") || !strings.Contains(string(out), "exit status 10") {
		t.Errorf("%s, %v", out, err)
	}
}

func TestKilledShimTakesTheVMMWithIt(t *testing.T) {
	t.Parallel()
	for name, step := range steps() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := launch(t, fixture(t, step.id), "")
			step.wait(l)
			vmm := l.vmm()
			if err := l.shim.Kill(); err != nil {
				t.Fatal(err)
			}
			l.gone("VMM", vmm)
			l.expectExit("killed by signal 9 (killed)")
			// The launcher is dead too, then: nobody holds the lock, which is how
			// the next one finds what is to be removed.
			_ = l.launcher.Wait()
			lock, err := os.Open(filepath.Join(l.spec.Dir, "lock"))
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = lock.Close() }()
			if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
				t.Errorf("the lock is still held: %v", err)
			}
		})
	}
}

func TestKilledVMMEndsTheShim(t *testing.T) {
	t.Parallel()
	for name, step := range steps() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := launch(t, fixture(t, step.id), "")
			step.wait(l)
			if err := l.vmm().Kill(); err != nil {
				t.Fatal(err)
			}
			l.expectExit("exit status 13")
			if end := l.report(); end.Class != bootspec.EndKilled || end.Signal != 9 || !strings.Contains(end.Message, "dmesg") {
				t.Errorf("the report is %+v", end)
			}
		})
	}
}

func TestSignalsEndTheVM(t *testing.T) {
	t.Parallel()
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP} {
		l := launch(t, fixture(t, "boot-1"), "")
		l.ready()
		vmm := l.vmm()
		if err := syscall.Kill(l.shim.PID, sig); err != nil {
			t.Fatal(err)
		}
		l.expectExit("exit status 13")
		l.gone("VMM", vmm)
		if end := l.report(); end.Class != bootspec.EndKilled || !strings.Contains(end.Message, "told to end ("+sig.String()) {
			t.Errorf("the report is %+v", end)
		}
	}
}

func TestReleasedVMSurvivesItsLauncher(t *testing.T) {
	t.Parallel()
	spec := fixture(t, "boot-1")
	spec.Lifetime = bootspec.Detached
	l := launch(t, spec, "D")
	l.ready()
	l.hello()
	// The shim logs the release, which came before the launcher's end.
	if err := l.launcher.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = l.launcher.Wait()
	l.hello()
	if !l.shim.Alive() {
		t.Fatal("the shim died with its launcher")
	}
	reply, err := guestv1.NewAgentServiceClient(l.dial()).Shutdown(l.context(), &guestv1.ShutdownRequest{})
	if err != nil {
		t.Fatal(reply, err)
	}
	l.gone("shim", l.shim)
	l.expectFiles(false)
}

func TestShutdown(t *testing.T) {
	t.Parallel()
	l := launch(t, fixture(t, "boot-1"), "")
	l.ready()
	if _, err := guestv1.NewAgentServiceClient(l.dial()).Shutdown(l.context(), &guestv1.ShutdownRequest{}); err != nil {
		t.Fatal(err)
	}
	l.expectExit("exit status 0")
	if end := l.report(); end.Class != bootspec.EndGuest || !end.Booted || !strings.Contains(end.Message, "as asked") {
		t.Errorf("the report is %+v", end)
	}
}

func TestEnds(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		id, exit, message string
		class             bootspec.EndClass
	}{
		{"refuse-1", "exit status 11", "QEMU ended with status 1: qemu: this option is unknown", bootspec.EndRefused},
		{"panic-1", "exit status 12", "not syncing: no init", bootspec.EndCrashed},
	} {
		l := launch(t, fixture(t, tt.id), "")
		l.ready()
		l.expectExit(tt.exit)
		if end := l.report(); end.Class != tt.class || !strings.Contains(end.Message, tt.message) {
			t.Errorf("%s: the report is %+v", tt.id, end)
		}
	}
}

func TestVMMIsConfined(t *testing.T) {
	t.Parallel()
	spec := fixture(t, "peek-1")
	if confinementIsOff() {
		t.Skip("the kernel has no Landlock")
	}
	l := launch(t, spec, "")
	l.ready()
	l.expectExit("exit status 12") // it never booted
	console, err := os.ReadFile(filepath.Join(spec.Dir, "console.log"))
	if err != nil {
		t.Fatal(err)
	}
	want := "write the upper: ok\r\nread the spec: no\r\nmake a file: no\r\nread the system: ok\r\nwrite the system: no\r\nbind a TCP port: no\r\ndump its memory: no\r\n"
	if string(console) != want {
		t.Errorf("the VMM could:\n%s\nwant:\n%s", console, want)
	}
}
