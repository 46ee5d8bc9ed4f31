package vm_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/vmtest"
)

// stub is a driver whose steps a test scripts; VMs that work are vmtest's.
type stub struct {
	prepare func(*bootspec.Spec) error
	start   func(context.Context, *bootspec.Spec) error
}

func (s stub) Prepare(_ context.Context, spec *bootspec.Spec) error {
	spec.VMM = bootspec.Libkrun
	if s.prepare == nil {
		return nil
	}
	return s.prepare(spec)
}

func (s stub) Start(ctx context.Context, spec *bootspec.Spec, _ *os.File) (vm.Process, error) {
	return nil, s.start(ctx, spec)
}

func (s stub) env(t testing.TB, roots layout.Roots) *vmtest.Env {
	return &vmtest.Env{Driver: s, Roots: roots, Lower: "/lower", Patience: 20 * time.Second}
}

// The test binary plays a launcher that gets killed: see TestKilledLauncher.
func TestMain(m *testing.M) {
	if dir := os.Getenv("VM_TEST_ROOT"); dir != "" {
		launchForEver(rootsIn(dir))
	}
	os.Exit(m.Run())
}

func rootsIn(dir string) layout.Roots {
	return layout.Roots{Cache: dir + "/c", Data: dir + "/d", State: dir + "/s", Run: dir + "/r"}
}

func TestFailedPrepareLeavesNothing(t *testing.T) {
	t.Parallel()
	cause := errors.New("no kernel")
	e := stub{prepare: func(spec *bootspec.Spec) error {
		return errors.Join(cause, os.WriteFile(spec.Upper.Path, []byte("x"), 0o600))
	}}.env(t, vmtest.Roots(t))
	_, err := e.Launcher(t).Launch(e.Context(t), e.Request())
	if !errors.Is(err, cause) {
		t.Errorf("error is %v", err)
	}
	e.CheckEmpty(t)
	if _, err := os.Stat(e.Roots.FailedSpecs()); !errors.Is(err, fs.ErrNotExist) {
		t.Error("a spec was kept of a boot that was not begun")
	}
}

// Preparing may take longer than a boot may: files that many VMs share are made.
func TestBootTimeoutBeginsAfterPrepare(t *testing.T) {
	t.Parallel()
	const timeout = time.Minute
	var prepared time.Time
	var rest time.Duration
	s := stub{
		prepare: func(*bootspec.Spec) error {
			prepared = time.Now()
			return nil
		},
		start: func(ctx context.Context, _ *bootspec.Spec) error {
			if deadline, ok := ctx.Deadline(); ok {
				rest = deadline.Sub(prepared)
			}
			return errors.New("no VM")
		},
	}
	l := vm.New(vm.Config{Driver: s, Roots: vmtest.Roots(t), Log: vmtest.Logger(t), BootTimeout: timeout})
	if _, err := l.Launch(t.Context(), vm.Request{Lower: "/lower"}); err == nil {
		t.Fatal("the VM is up")
	}
	if rest < timeout {
		t.Errorf("%v are left of %v", rest, timeout)
	}
}

func TestFailedBootTellsWhatTheVMPrinted(t *testing.T) {
	t.Parallel()
	var console strings.Builder
	for i := range 100 {
		fmt.Fprintf(&console, "\x1b[31mline %d\x1b[0m\r\n", i)
	}
	console.WriteString("panic: \x00\xff\x9b\u009bdead\tend\x1b]0;title\n\n")
	e := stub{start: func(_ context.Context, spec *bootspec.Spec) error {
		files := layout.Machine{Dir: spec.Dir}
		if err := errors.Join(
			os.WriteFile(files.Console(), []byte(console.String()), 0o600),
			os.WriteFile(files.ShimLog(), []byte("qemu: cannot\n"), 0o600),
		); err != nil {
			return err
		}
		return bootspec.End{Class: bootspec.EndRefused, Message: "no room"}
	}}.env(t, vmtest.Roots(t))
	_, err := e.Launcher(t).Launch(e.Context(t), e.Request())
	var end bootspec.End
	var boot *vm.BootError
	if !errors.As(err, &end) || end.Class != bootspec.EndRefused || !errors.As(err, &boot) {
		t.Fatalf("error is %v", err)
	}
	text := err.Error()
	if !strings.HasSuffix(text, "    panic: ????dead end0;title") {
		t.Errorf("the error does not end with the console: %q", text)
	}
	for _, part := range []string{"no room", boot.ID, "qemu: cannot", boot.SpecFile, "    line 69\n", "    line 99\n"} {
		if !strings.Contains(text, part) {
			t.Errorf("the error lacks %q: %s", part, text)
		}
	}
	if strings.Contains(text, "line 68\n") || strings.ContainsAny(text, "\x1b\r\x00") {
		t.Errorf("the tail is too long or not clean: %q", text)
	}
	e.CheckEmpty(t)
}

func TestHugeConsoleLine(t *testing.T) {
	t.Parallel()
	e := stub{start: func(_ context.Context, spec *bootspec.Spec) error {
		line := strings.Repeat("ä", 1<<20)
		return errors.Join(os.WriteFile(layout.Machine{Dir: spec.Dir}.Console(), []byte(line), 0o600), errors.New("x"))
	}}.env(t, vmtest.Roots(t))
	_, err := e.Launcher(t).Launch(e.Context(t), e.Request())
	var boot *vm.BootError
	if !errors.As(err, &boot) {
		t.Fatal(err)
	}
	if n := len(boot.Tails.Console); n == 0 || n > 4<<10 || strings.Trim(boot.Tails.Console, "ä") != "" {
		t.Errorf("the tail has %d bytes: %.20q...", n, boot.Tails.Console)
	}
}

func TestTenSpecsOfFailedBootsAreKept(t *testing.T) {
	t.Parallel()
	e := stub{start: func(context.Context, *bootspec.Spec) error { return errors.New("x") }}.env(t, vmtest.Roots(t))
	l := e.Launcher(t)
	var last *vm.BootError
	for range 13 {
		if _, err := l.Launch(e.Context(t), e.Request()); !errors.As(err, &last) {
			t.Fatal(err)
		}
	}
	kept, err := os.ReadDir(e.Roots.FailedSpecs())
	if err != nil || len(kept) != 10 {
		t.Errorf("%d specs are kept, %v", len(kept), err)
	}
	info, err := os.Stat(last.SpecFile)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the latest spec: %v, %v", info, err)
	}
}

func TestLongSocketPathIsRefused(t *testing.T) {
	t.Parallel()
	roots := vmtest.Roots(t)
	roots.Run = filepath.Join(roots.Run, strings.Repeat("long", 25))
	e := stub{}.env(t, roots)
	_, err := e.Launcher(t).Launch(e.Context(t), e.Request())
	if err == nil || !strings.Contains(err.Error(), "III_SANDBOX_RUN_DIR") {
		t.Errorf("error is %v", err)
	}
	e.CheckEmpty(t)
}

func TestForeignRootIsRefused(t *testing.T) {
	t.Parallel()
	roots := vmtest.Roots(t)
	if err := os.Mkdir(roots.Run, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(roots.Run, 0o777); err != nil {
		t.Fatal(err)
	}
	e := stub{}.env(t, roots)
	if _, err := e.Launcher(t).Launch(e.Context(t), e.Request()); err == nil || !strings.Contains(err.Error(), "chmod 700") {
		t.Errorf("error is %v", err)
	}
}

// Launchers and collectors at work on one root must never take a directory from
// each other.
func TestCollectSparesWhatIsBeingMade(t *testing.T) {
	t.Parallel()
	e := stub{
		prepare: func(spec *bootspec.Spec) error {
			return os.WriteFile(spec.Upper.Path, nil, 0o600)
		},
		start: func(_ context.Context, spec *bootspec.Spec) error {
			if _, err := os.Stat(spec.Upper.Path); err != nil {
				return err
			}
			return errPlanned
		},
	}.env(t, vmtest.Roots(t))
	ctx, cancel := context.WithCancel(e.Context(t))
	var collectors, launchers sync.WaitGroup
	for range 2 {
		l := e.Launcher(t)
		collectors.Go(func() {
			for ctx.Err() == nil {
				if err := l.Collect(ctx); err != nil && ctx.Err() == nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for range 2 {
		l := e.Launcher(t)
		launchers.Go(func() {
			for range 50 {
				if _, err := l.Launch(ctx, e.Request()); !errors.Is(err, errPlanned) {
					t.Error(err)
				}
			}
		})
	}
	launchers.Wait()
	cancel()
	collectors.Wait()
	e.CheckEmpty(t)
}

var errPlanned = errors.New("planned")

// launchForEver gets as far as the driver's Start and stays there.
func launchForEver(roots layout.Roots) {
	s := stub{start: func(ctx context.Context, spec *bootspec.Spec) error {
		if err := os.WriteFile(spec.Socket, nil, 0o600); err != nil {
			return err
		}
		fmt.Println(spec.ID)
		<-ctx.Done()
		return ctx.Err()
	}}
	l := vm.New(vm.Config{Driver: s, Roots: roots, Log: vmtest.Discard(), MaxBoots: 1})
	_, err := l.Launch(context.Background(), vm.Request{Lower: "/lower"})
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// A launcher killed with -9 in the middle of a boot holds nobody up and leaves
// nothing that the next launch does not remove.
func TestKilledLauncher(t *testing.T) {
	t.Parallel()
	dir := vmtest.ShortDir(t)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	other := exec.Command(exe)
	other.Env = []string{"VM_TEST_ROOT=" + dir}
	other.Stderr = os.Stderr
	stdout, err := other.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	killed := false
	kill := func() {
		if !killed {
			killed = true
			_ = other.Process.Kill()
			_ = other.Wait()
		}
	}
	defer kill()
	id, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}

	started := make(chan struct{})
	e := stub{start: func(context.Context, *bootspec.Spec) error {
		close(started)
		return errPlanned
	}}.env(t, rootsIn(dir))
	l := vm.New(vm.Config{Driver: e.Driver, Roots: e.Roots, Log: vmtest.Logger(t), MaxBoots: 1})
	hurried, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	if _, err := l.Launch(hurried, e.Request()); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "boot slot") {
		t.Errorf("while another process boots: %v", err)
	}
	if err := l.Collect(e.Context(t)); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(e.Roots.Machine(strings.TrimSpace(id)).Dir); err != nil {
		t.Fatalf("the directory of a live launcher was collected: %v", err)
	}
	result := make(chan error, 1)
	go func() {
		_, err := l.Launch(e.Context(t), e.Request())
		result <- err
	}()
	kill()
	e.Await(t, started, "the boot after the kill")
	if err := <-result; !errors.Is(err, errPlanned) {
		t.Errorf("error is %v", err)
	}
	e.CheckEmpty(t)
	if _, err := os.Lstat(e.Roots.Machine(strings.TrimSpace(id)).Socket); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the killed launcher's socket is left (%v)", err)
	}
}

func TestListIgnoresWhatIsNotKept(t *testing.T) {
	t.Parallel()
	e := stub{}.env(t, vmtest.Roots(t))
	l := e.Launcher(t)
	if kept, err := l.List(e.Context(t)); err != nil || kept != nil {
		t.Errorf("without any root: %v, %v", kept, err)
	}
	for _, name := range []string{"dead", "Not-An-ID", ".hidden"} {
		if err := os.MkdirAll(filepath.Join(e.Roots.Machines(), name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if kept, err := l.List(e.Context(t)); err != nil || kept != nil {
		t.Errorf("among rubbish: %v, %v", kept, err)
	}
	for _, id := range []string{"dead", "../x", "", "none"} {
		if _, err := l.Attach(e.Context(t), id); !errors.Is(err, vm.ErrNotKept) {
			t.Errorf("attach %q: %v", id, err)
		}
	}
}
