package shim_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	shimv1 "github.com/iii-hq/workers/sandbox-libkrun/api/shim/v1"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/shim"
)

// patience bounds every wait: far more than a busy host needs.
const patience = 60 * time.Second

const token = "00112233445566778899aabbccddeeff"

// vm is a shim in this process with a fake machine behind it.
type vm struct {
	t        *testing.T
	spec     *bootspec.Spec
	machine  *machine
	log      *lockedBuffer
	lifeline *os.File
	lock     *os.File
	kill     context.CancelCauseFunc
	done     chan struct{}
	end      bootspec.End // valid once done is closed
	conn     *grpc.ClientConn
	console  *lockedBuffer
}

// newVM makes spec and machine; the test may change them before start.
func newVM(t *testing.T) *vm {
	t.Helper()
	// Not t.TempDir: a socket's path must be short.
	dir, err := os.MkdirTemp("/tmp", "shimtest-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	v := &vm{t: t, log: &lockedBuffer{}, console: &lockedBuffer{}, done: make(chan struct{})}
	v.spec = &bootspec.Spec{
		Version: bootspec.Version, ID: "vm-1", VMM: bootspec.Libkrun, Lifetime: bootspec.Detached,
		Dir: filepath.Join(dir, "machine"), Socket: filepath.Join(dir, "run", "vm-1.sock"),
		CPUs: 1, MemoryMiB: 64,
		Lower: bootspec.Disk{Path: filepath.Join(dir, "lower"), ReadOnly: true},
		Upper: bootspec.Disk{Path: filepath.Join(dir, "upper")},
		Guest: bootspec.Guest{Version: bootspec.Version, Token: token, Hostname: "box", Env: []string{"SECRET=swordfish"}},
	}
	if err := os.Mkdir(v.spec.Dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, disk := range []string{v.spec.Lower.Path, v.spec.Upper.Path} {
		if err := os.WriteFile(disk, make([]byte, 4096), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	v.machine = newMachine()
	return v
}

// start runs the shim and waits until it listens, or has ended.
func (v *vm) start() *vm {
	v.t.Helper()
	lifelineR, lifelineW, err := os.Pipe()
	if err != nil {
		v.t.Fatal(err)
	}
	v.lifeline = lifelineW
	readyR, readyW, err := os.Pipe()
	if err != nil {
		v.t.Fatal(err)
	}
	ctx, kill := context.WithCancelCause(context.Background())
	v.kill = kill
	go func() {
		defer close(v.done)
		v.end = shim.Run(ctx, v.spec, shim.Options{
			Hypervisor: v.machine, Version: "test",
			Log:    slog.New(slog.NewTextHandler(v.log, nil)),
			VMMLog: v.log, Console: v.console,
			Lifeline: lifelineR, Ready: readyW, Lock: v.lock,
		})
	}()
	v.t.Cleanup(func() {
		kill(errors.New("the test is over"))
		v.wait()
		_ = lifelineW.Close()
		_ = readyR.Close()
	})
	if _, err := readyR.Read(make([]byte, 1)); err != nil && !errors.Is(err, io.EOF) {
		v.t.Fatal(err)
	}
	return v
}

func (v *vm) wait() bootspec.End {
	v.t.Helper()
	select {
	case <-v.done:
		return v.end
	case <-time.After(patience):
		v.t.Fatal("the shim did not end")
		return bootspec.End{}
	}
}

// client is a connection to the socket, closed at the test's end.
func (v *vm) client() *grpc.ClientConn {
	v.t.Helper()
	conn, err := grpc.NewClient("passthrough:///shim",
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", v.spec.Socket)
		}),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		v.t.Fatal(err)
	}
	v.t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func (v *vm) control() shimv1.ShimServiceClient { return shimv1.NewShimServiceClient(v.client()) }

func (v *vm) context() context.Context {
	ctx, cancel := context.WithTimeout(v.t.Context(), patience)
	v.t.Cleanup(cancel)
	return ctx
}

// until polls the status until ok.
func (v *vm) until(what string, ok func(*shimv1.StatusResponse) bool) *shimv1.StatusResponse {
	v.t.Helper()
	control, ctx := v.control(), v.context()
	for {
		status, err := control.Status(ctx, &shimv1.StatusRequest{})
		if err != nil {
			v.t.Fatalf("waiting until %s: %v", what, err)
		}
		if ok(status) {
			return status
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-ctx.Done():
			v.t.Fatalf("waiting until %s: %v", what, status)
		}
	}
}

func running(s *shimv1.StatusResponse) bool { return s.GetState() == shimv1.State_STATE_RUNNING }

func (v *vm) expectEnd(class bootspec.EndClass, message string) bootspec.End {
	v.t.Helper()
	end := v.wait()
	if end.Class != class || !strings.Contains(end.Message, message) {
		v.t.Errorf("the end is %v, want %s with %q", end, class, message)
	}
	return end
}

// reported is the end as the machine directory has it.
func (v *vm) reported() bootspec.End {
	v.t.Helper()
	body, err := os.ReadFile(filepath.Join(v.spec.Dir, "end.json"))
	if err != nil {
		v.t.Fatal(err)
	}
	var end bootspec.End
	if err := json.Unmarshal(body, &end); err != nil {
		v.t.Fatal(err)
	}
	return end
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// lockedBuffer is a bytes.Buffer for several goroutines.
type lockedBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

func TestLife(t *testing.T) {
	t.Parallel()
	v := newVM(t).start()
	if info, err := os.Lstat(v.spec.Socket); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("socket: %v, %v", info, err)
	}
	watch, err := v.control().Watch(v.context(), &shimv1.WatchRequest{})
	if err != nil {
		t.Fatal(err)
	}
	var states []shimv1.State
	var last *shimv1.StatusResponse
	for {
		event, err := watch.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		last = event.GetStatus()
		states = append(states, last.GetState())
		if running(last) {
			v.machine.powerOff(bootspec.End{Class: bootspec.EndGuest})
		}
	}
	if n := len(states); n < 2 || states[n-2] != shimv1.State_STATE_RUNNING || states[n-1] != shimv1.State_STATE_ENDED {
		t.Errorf("the states were %v", states)
	}
	if last.GetId() != "vm-1" || last.GetVmm() != "libkrun" || last.GetVmmPid() != uint32(os.Getpid()) || last.GetShimVersion() != "test" ||
		last.GetRunningUnixMs() < last.GetStartedUnixMs() || last.GetStartedUnixMs() == 0 {
		t.Errorf("the last status is %v", last)
	}
	end := v.expectEnd(bootspec.EndGuest, "powered off by itself")
	if got := last.GetEnd(); got.GetClass() != string(end.Class) || got.GetMessage() != end.Message {
		t.Errorf("Watch told %v, Run %v", got, end)
	}
	if v.reported() != end || !end.Booted {
		t.Errorf("the report is %+v, Run told %+v", v.reported(), end)
	}
	// The launcher is alive: the directory is its own.
	if !exists(v.spec.Dir) || exists(v.spec.Socket) {
		t.Errorf("directory there: %v, socket there: %v", exists(v.spec.Dir), exists(v.spec.Socket))
	}
	if log := v.log.String(); strings.Contains(log, "swordfish") || strings.Contains(log, token) {
		t.Errorf("the log has secrets: %s", log)
	}
}

func TestEnvironmentReachesTheGuestAndThePortStaysOpen(t *testing.T) {
	t.Parallel()
	v := newVM(t)
	v.spec.Guest.Env = []string{"A=1", "B=" + strings.Repeat("x", 200_000)}
	v.start()
	v.until("the VM runs", running)
	guest := v.machine.guestSpec()
	if !slices.Equal(guest.Env, v.spec.Guest.Env) || guest.Hostname != "box" || guest.Token != token {
		t.Error("the guest got another environment")
	}
	if v.machine.envAtEnd() {
		t.Error("the shim closed its end of iii.env while the VM runs")
	}
}

func TestKill(t *testing.T) {
	t.Parallel()
	v := newVM(t).start()
	v.until("the VM runs", running)
	control := v.control()
	for range 2 {
		reply, err := control.Kill(v.context(), &shimv1.KillRequest{})
		if err != nil {
			// The second may find the shim gone.
			break
		}
		if reply.GetEnd().GetClass() != string(bootspec.EndKilled) {
			t.Errorf("Kill: %v", reply)
		}
	}
	v.expectEnd(bootspec.EndKilled, "Kill was called")
}

func TestLifelineEndsTheVMAndItsFiles(t *testing.T) {
	t.Parallel()
	for _, lifetime := range []string{bootspec.Tied, bootspec.Detached} {
		for _, booted := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/booted=%v", lifetime, booted), func(t *testing.T) {
				t.Parallel()
				v := newVM(t)
				v.spec.Lifetime = lifetime
				v.machine.hang = !booted
				v.start()
				if booted {
					v.until("the VM runs", running)
				}
				if err := v.lifeline.Close(); err != nil {
					t.Fatal(err)
				}
				v.expectEnd(bootspec.EndKilled, "launcher is gone")
				if exists(v.spec.Dir) || exists(v.spec.Socket) {
					t.Error("directory or socket is left")
				}
			})
		}
	}
}

func TestTiedVMCannotBeReleased(t *testing.T) {
	t.Parallel()
	v := newVM(t)
	v.spec.Lifetime = bootspec.Tied
	v.start()
	if _, err := v.lifeline.Write([]byte("D")); err != nil {
		t.Fatal(err)
	}
	if err := v.lifeline.Close(); err != nil {
		t.Fatal(err)
	}
	v.expectEnd(bootspec.EndKilled, "launcher is gone")
}

func TestReleasedVMLivesOnUntilItIsIdle(t *testing.T) {
	t.Parallel()
	v := newVM(t)
	v.spec.IdleTimeoutMs = 300
	v.start()
	stream := v.open(v.context(), "/guest.v1.Test/Echo")
	if _, err := v.lifeline.Write([]byte("D")); err != nil {
		t.Fatal(err)
	}
	if err := v.lifeline.Close(); err != nil {
		t.Fatal(err)
	}
	// A call in flight keeps it alive, longer than the idle time.
	for range 5 {
		roundTrip(t, stream, []byte("still there"))
		select {
		case <-v.done:
			t.Fatalf("it ended with a call in flight: %v", v.end)
		case <-time.After(100 * time.Millisecond):
		}
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	v.expectEnd(bootspec.EndKilled, "idle for 300ms")
	if exists(v.spec.Dir) || exists(v.spec.Socket) {
		t.Error("directory or socket is left")
	}
}

func TestNotReleasedVMIsNeverIdle(t *testing.T) {
	t.Parallel()
	v := newVM(t)
	v.spec.IdleTimeoutMs = 1
	v.start()
	v.until("the VM runs", running)
	select {
	case <-v.done:
		t.Fatalf("it ended: %v", v.end)
	case <-time.After(200 * time.Millisecond):
	}
}

func TestEndsOfTheGuest(t *testing.T) {
	t.Parallel()
	const panicked = "[    1.2] Kernel panic - not syncing: Attempted to kill init! exitcode=0x00000100\r\n[    1.3] CPU: 0 PID: 1\r\n"
	status1 := bootspec.End{Class: bootspec.EndCrashed, Message: "VMM ended with status 1", ExitCode: 1}
	guest := bootspec.End{Class: bootspec.EndGuest, Message: "VMM ended"}
	for _, tt := range []struct {
		name         string
		boot         bool
		console, vmm string
		end          bootspec.End
		class        bootspec.EndClass
		want         string
	}{
		{"panic with exit 0", true, panicked, "", guest, bootspec.EndCrashed, "Kernel panic - not syncing: Attempted to kill init! exitcode=0x00000100 ("},
		{"panic during boot", false, panicked, "", guest, bootspec.EndCrashed, "Attempted to kill init"},
		{"panic long ago", true, panicked + strings.Repeat("line\r\n", 10_000), "", guest, bootspec.EndGuest, "by itself"},
		{"early end", false, "agent: no disk\r\n", "", guest, bootspec.EndCrashed, "its console ends with: agent: no disk"},
		{"early end, hostile console", false, "\x1b[2Jevil\x00\xff\u202e\n\n \n", "", guest, bootspec.EndCrashed, "[2Jevil"},
		{"silent end", false, "", "", guest, bootspec.EndCrashed, "printed nothing"},
		{"refused", false, "", "warning\nqemu: -m 99999999: out of range\n", status1, bootspec.EndRefused, "status 1: qemu: -m 99999999: out of range"},
		{"crashed before boot", false, "Linux version\r\n", "oops\n", status1, bootspec.EndCrashed, "status 1: oops"},
		{"crashed", true, "", "assertion\n", status1, bootspec.EndCrashed, "status 1: assertion"},
		{"told to end", true, "", "qemu: terminating on signal 15 from pid 1 (init)\n", guest, bootspec.EndKilled, "terminating on signal 15"},
		{"out of memory", true, "", "", bootspec.End{Class: bootspec.EndKilled, Message: "killed by SIGKILL", Signal: 9, ExitCode: -1}, bootspec.EndKilled, "killed by SIGKILL"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			v := newVM(t)
			v.machine.hang = !tt.boot
			v.start()
			if tt.boot {
				v.until("the VM runs", running)
			}
			v.machine.print(tt.console, tt.vmm)
			v.machine.powerOff(tt.end)
			end := v.expectEnd(tt.class, tt.want)
			if end.Booted != tt.boot || end.ExitCode != tt.end.ExitCode || end.Signal != tt.end.Signal {
				t.Errorf("the end is %+v", end)
			}
			for _, c := range end.Message {
				if c < ' ' || c == '\u202e' {
					t.Errorf("the message has character %q", c)
				}
			}
		})
	}
}

func TestStats(t *testing.T) {
	t.Parallel()
	v := newVM(t).start()
	stats, err := v.control().Stats(v.context(), &shimv1.StatsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	// The fake machine is this process.
	if stats.GetCpuMs() == 0 || stats.GetRssBytes() < 1<<20 || stats.GetRssAnonBytes() > stats.GetRssBytes() ||
		stats.GetShimRssAnonBytes() == 0 || stats.GetUpperBytes() != 4096 {
		t.Errorf("stats: %v", stats)
	}
}

func TestBadSpecs(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		spec func(*vm)
		want []string
	}{
		{"many faults at once", func(v *vm) { v.spec.CPUs, v.spec.MemoryMiB = 0, 1 }, []string{"cpus is 0", "memory_mib is 1"}},
		{"id", func(v *vm) { v.spec.ID = "../x" }, []string{`"../x"`}},
		{"long socket", func(v *vm) { v.spec.Socket = "/tmp/" + strings.Repeat("x", 96) }, []string{"101 bytes"}},
		{"no lower", func(v *vm) { v.spec.Lower.Path += "x" }, []string{"lower: open", "no such file"}},
		{"empty lower", func(v *vm) { _ = os.Truncate(v.spec.Lower.Path, 0) }, []string{"lower: ", "is empty"}},
		{"lower is a directory", func(v *vm) { v.spec.Lower.Path = v.spec.Dir }, []string{"lower: ", "not a regular file"}},
		{"upper is a fifo", func(v *vm) {
			v.spec.Upper.Path = filepath.Join(v.spec.Dir, "fifo")
			_ = syscall.Mkfifo(v.spec.Upper.Path, 0o600)
		}, []string{"upper: ", "not a regular file"}},
		{"writable lower", func(v *vm) { v.spec.Lower.ReadOnly = false }, []string{"lower.read_only"}},
		{"environment that swells as JSON", func(v *vm) {
			v.spec.Guest.Env = []string{"A=" + strings.Repeat("\x01", bootspec.MaxEnv-3)}
		}, []string{"as JSON"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			v := newVM(t)
			tt.spec(v)
			v.start()
			end := v.expectEnd(bootspec.EndBadSpec, "")
			for _, want := range tt.want {
				if !strings.Contains(end.Message, want) {
					t.Errorf("the message is %q, want %q in it", end.Message, want)
				}
			}
			if v.machine.ran() {
				t.Error("a machine was started")
			}
			if v.reported() != end {
				t.Errorf("the report is %+v, Run told %+v", v.reported(), end)
			}
			if exists(v.spec.Socket) {
				t.Error("a socket is left")
			}
		})
	}
}

func TestHypervisorMayRefuse(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		err   error
		class bootspec.EndClass
	}{
		{errors.New("no emulator: install it"), bootspec.EndRefused},
		{bootspec.End{Class: bootspec.EndBadSpec, Message: "no emulator: install it"}, bootspec.EndBadSpec},
	} {
		v := newVM(t)
		v.machine.refuse = tt.err
		v.start()
		v.expectEnd(tt.class, "no emulator: install it")
	}
}

func TestDisksAreLocked(t *testing.T) {
	t.Parallel()
	first := newVM(t).start()
	first.until("the VM runs", running)

	// The image may serve another VM, the upper may not.
	second := newVM(t)
	second.spec.Lower = first.spec.Lower
	second.start()
	second.until("the VM runs", running)

	third := newVM(t)
	third.spec.Upper = first.spec.Upper
	third.start()
	third.expectEnd(bootspec.EndRefused, "in use by another VM")
	if third.machine.ran() {
		t.Error("a machine was started")
	}

	// A VM that is just ending is waited for.
	fourth := newVM(t)
	fourth.spec.Upper = first.spec.Upper
	first.kill(nil)
	fourth.start()
	fourth.until("the VM runs", running)
}

func TestMachineDirectoryHasOneShim(t *testing.T) {
	t.Parallel()
	first := newVM(t).start()
	first.until("the VM runs", running)
	second := newVM(t)
	second.spec.Dir = first.spec.Dir
	second.start()
	second.expectEnd(bootspec.EndBadSpec, "belongs to a VM that runs")
}

func TestInheritedLockIsKeptUntilTheEnd(t *testing.T) {
	t.Parallel()
	v := newVM(t)
	launcher, err := os.OpenFile(filepath.Join(v.spec.Dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Flock(int(launcher.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		t.Fatal(err)
	}
	fd, err := syscall.Dup(int(launcher.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	v.lock = os.NewFile(uintptr(fd), "lock")
	v.start()
	v.until("the VM runs", running)
	if err := launcher.Close(); err != nil {
		t.Fatal(err)
	}
	other, err := os.Open(filepath.Join(v.spec.Dir, "lock"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = other.Close() }()
	if err := syscall.Flock(int(other.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); !errors.Is(err, syscall.EWOULDBLOCK) {
		t.Errorf("the lock can be taken while the VM runs: %v", err)
	}
	v.kill(nil)
	v.wait()
	if err := syscall.Flock(int(other.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		t.Errorf("the lock cannot be taken after the end: %v", err)
	}
}

func TestSocketInUse(t *testing.T) {
	t.Parallel()
	v := newVM(t)
	dir := filepath.Dir(v.spec.Socket)
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	lis, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", v.spec.Socket)
	if err != nil {
		t.Fatal(err)
	}
	unixListener, ok := lis.(*net.UnixListener)
	if !ok {
		t.Fatal("not a unix listener")
	}
	unixListener.SetUnlinkOnClose(false)

	second := newVM(t)
	second.spec.Socket = v.spec.Socket
	second.start()
	second.expectEnd(bootspec.EndRefused, "served by another shim")
	if !exists(v.spec.Socket) {
		t.Fatal("the other's socket was removed")
	}

	// Nobody behind it any more: it is replaced.
	if err := lis.Close(); err != nil {
		t.Fatal(err)
	}
	v.start()
	v.until("the VM runs", running)
}

func TestSocketDirectoryOfOthersIsRefused(t *testing.T) {
	t.Parallel()
	v := newVM(t)
	dir := filepath.Dir(v.spec.Socket)
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o777); err != nil { //nolint:gosec // the fault under test
		t.Fatal(err)
	}
	v.start()
	v.expectEnd(bootspec.EndRefused, "may be written to by other users")
}

func TestConsoleLogIsBoundedAndKeepsBothEnds(t *testing.T) {
	t.Parallel()
	v := newVM(t).start()
	v.until("the VM runs", running)
	v.machine.print("first line\r\n", "")
	for range 300 {
		v.machine.print(strings.Repeat("a noisy guest\r\n", 1000), "")
	}
	v.machine.print("last line\r\n", "")
	v.machine.powerOff(bootspec.End{Class: bootspec.EndGuest})
	v.wait()
	log, err := os.ReadFile(filepath.Join(v.spec.Dir, "console.log"))
	if err != nil {
		t.Fatal(err)
	}
	if len(log) > 256<<10 {
		t.Errorf("it has %d bytes", len(log))
	}
	for _, want := range []string{"first line\r\n", "last line\r\n", " bytes left out ...]"} {
		if !bytes.Contains(log, []byte(want)) {
			t.Errorf("%q is missing", want)
		}
	}
	if got := len(v.console.String()); got < 4_500_000 {
		t.Errorf("the copy has %d bytes", got)
	}
}

func TestVMMLogIsBounded(t *testing.T) {
	t.Parallel()
	v := newVM(t).start()
	for range 100 {
		v.machine.print("", strings.Repeat("noise\n", 1000))
	}
	v.machine.powerOff(bootspec.End{Class: bootspec.EndCrashed, Message: "crash", ExitCode: 1})
	v.expectEnd(bootspec.EndCrashed, "crash: noise")
	if got := len(v.log.String()); got > 80<<10 {
		t.Errorf("the shim log has %d bytes", got)
	}
}
