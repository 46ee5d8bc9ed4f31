package libkrun_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/agentlink"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/krun"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/shim"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/shim/libkrun"
)

// patience bounds every wait: far more than a busy host needs.
const patience = 30 * time.Second

// fakeKrun builds a library in libkrun's place (testdata/fakekrun.c), whose guest
// does what the VM's id says. The child that loads it is real: this program.
func fakeKrun(t *testing.T, flags ...string) string {
	t.Helper()
	if !hasChild {
		t.Skip("SKIP: this program was built without cgo, the child of a VM is C")
	}
	library := filepath.Join(t.TempDir(), "libkrun.so.1")
	cc := exec.Command("cc", append(flags, "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, "testdata/fakekrun.c")...)
	if out, err := cc.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return library
}

// rig is what a shim gives to Run, and what came out of it.
type rig struct {
	library string
	dir     string
	console bytes.Buffer
	log     bytes.Buffer
	// env is the host's end of the port.
	env     *os.File
	offered chan net.Conn
	started chan int
	confine func(*bootspec.Spec) (*libkrun.Ruleset, error)
	dev     shim.Devices
	pumps   sync.WaitGroup
}

func newRig(t *testing.T, library, dir string) *rig {
	t.Helper()
	r := &rig{library: library, dir: dir, offered: make(chan net.Conn, 8), started: make(chan int, 1)}
	pipe := func(into *bytes.Buffer) *os.File {
		reader, writer, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		r.pumps.Go(func() {
			_, _ = io.Copy(into, reader)
			_ = reader.Close()
		})
		return writer
	}
	r.dev.Console, r.dev.Log = pipe(&r.console), pipe(&r.log)
	var err error
	if r.dev.Env, r.env, err = os.Pipe(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.env.Close() })
	if r.dev.Link, err = os.Open(os.DevNull); err != nil {
		t.Fatal(err)
	}
	r.dev.Started = func(pid int) { r.started <- pid }
	r.dev.Offer = func(c net.Conn) { r.offered <- c }
	return r
}

// run is Run with everything read that came out. act is what the guest does.
func (r *rig) run(ctx context.Context, act string) bootspec.End {
	s := spec()
	s.ID, s.Dir, s.Libkrun.Library, s.Libkrun.Firmware = act, r.dir, r.library, ""
	if r.dev.Network != nil {
		s.Guest.Interface = bootspec.NewInterface(1500, false)
	}
	end := libkrun.Hypervisor{Command: os.Args[0], Confine: r.confine}.Run(ctx, s, r.dev)
	r.pumps.Wait()
	return end
}

func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "krunrun-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func TestEndsOfTheVMM(t *testing.T) {
	t.Parallel()
	library := fakeKrun(t)
	for act, want := range map[string]struct {
		class     bootspec.EndClass
		exit, sig int
		message   string
	}{
		"0":        {bootspec.EndGuest, 0, 0, "libkrun ended"},
		"7":        {bootspec.EndCrashed, 7, 0, "status 7"},
		"99":       {bootspec.EndGuest, agentlink.StatusNoAgent, 0, ""}, // the shim knows whether it should have
		"125":      {bootspec.EndCrashed, krun.StatusRefused, 0, "status 125"},
		"refuse":   {bootspec.EndRefused, krun.StatusRefused, 0, "did not start the VM: krun_start_enter: invalid argument (errno 22): libkrun refused the VM"},
		"no-disks": {bootspec.EndRefused, krun.StatusRefused, 0, library + " was built without disks (BLK=1): install"},
		"kill":     {bootspec.EndKilled, -1, 9, "SIGKILL"},
		"crash":    {bootspec.EndCrashed, -1, int(syscall.SIGBUS), "signal 7"},
		"abort":    {bootspec.EndCrashed, -1, int(syscall.SIGABRT), "gave up"},
	} {
		t.Run(act, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, library, shortDir(t))
			end := r.run(t.Context(), act)
			if end.Class != want.class || end.ExitCode != want.exit || end.Signal != want.sig || !strings.Contains(end.Message, want.message) {
				t.Errorf("end is %+v", end)
			}
			if r.log.Len() > 0 {
				t.Errorf("the log is %q", r.log.String())
			}
		})
	}
}

// A library that cannot be asked for its features may have them.
func TestVMMOfAnOldLibrary(t *testing.T) {
	t.Parallel()
	r := newRig(t, fakeKrun(t, "-DBEFORE_1_17_3"), shortDir(t))
	if end := r.run(t.Context(), "0"); end.Class != bootspec.EndGuest {
		t.Errorf("end is %+v", end)
	}
}

// A VMM that leaves a process behind, which holds all that it had, is gone.
func TestEndOfAVMMThatForked(t *testing.T) {
	t.Parallel()
	r := newRig(t, fakeKrun(t), shortDir(t))
	ended := make(chan bootspec.End, 1)
	go func() { ended <- r.run(t.Context(), "fork") }()
	select {
	case end := <-ended:
		if end.Class != bootspec.EndGuest {
			t.Errorf("end is %+v", end)
		}
	case <-time.After(patience):
		t.Error("the VMM's end is not told")
	}
}

// What cannot be said to the child is told before there is one.
func TestVMMThatCannotBeNamed(t *testing.T) {
	t.Parallel()
	r := newRig(t, "/lib/libkrun\x00.so.1", shortDir(t))
	end := r.run(t.Context(), "0")
	if end.Class != bootspec.EndRefused || !strings.Contains(end.Message, "library has a zero byte") || len(r.started) > 0 {
		t.Errorf("end is %+v", end)
	}
}

func TestVMMThatIsNotThere(t *testing.T) {
	t.Parallel()
	text := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(text, []byte("no library"), 0o600); err != nil {
		t.Fatal(err)
	}
	fakeKrun(t)
	for library, want := range map[string]string{
		"/no/libkrun.so.1": "load libkrun: /no/libkrun.so.1", text: "load libkrun: " + text,
		"libc.so.6": "load libkrun: libc.so.6 has no krun_init_log, krun_create_ctx, krun_set_vm_config",
	} {
		if library == "libc.so.6" && runtime.GOOS != "linux" {
			continue
		}
		end := newRig(t, library, shortDir(t)).run(t.Context(), "0")
		if end.Class != bootspec.EndRefused || !strings.Contains(end.Message, want) {
			t.Errorf("%s: end is %+v", library, end)
		}
	}
}

// The VMM's world is its directory and two variables, and what Calls names.
func TestVMMGetsNoSecrets(t *testing.T) {
	t.Parallel()
	r := newRig(t, fakeKrun(t), shortDir(t))
	if end := r.run(t.Context(), "world"); end.Class != bootspec.EndGuest {
		t.Fatalf("end is %v: %s", end, r.log.String())
	}
	if got, want := r.console.String(), "world;HOSTNAME=world;RUST_BACKTRACE=0;"+r.dir; got != want {
		t.Errorf("the VMM got %s, want %s", got, want)
	}
}

func TestVMMHasTheNetworksSocket(t *testing.T) {
	t.Parallel()
	r := newRig(t, fakeKrun(t), shortDir(t))
	reader, writer, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	r.dev.Network = writer
	if end := r.run(t.Context(), "0"); end.Class != bootspec.EndGuest {
		t.Fatalf("end is %v", end)
	}
	if got, err := io.ReadAll(reader); string(got) != "frame" || err != nil {
		t.Errorf("the network got %q, %v", got, err)
	}
	_ = reader.Close()
}

// A VMM that shall be confined and cannot is none.
func TestVMMIsNotStartedUnconfined(t *testing.T) {
	t.Parallel()
	library := fakeKrun(t)
	for name, c := range map[string]struct {
		confine func(*bootspec.Spec) (*libkrun.Ruleset, error)
		want    string
	}{
		"no ruleset":      {func(*bootspec.Spec) (*libkrun.Ruleset, error) { return nil, errors.New("there are no rules") }, "there are no rules"},
		"another file":    {func(*bootspec.Spec) (*libkrun.Ruleset, error) { return nullRuleset() }, "confine the VMM with Landlock: "},
		"nothing to rule": {func(*bootspec.Spec) (*libkrun.Ruleset, error) { return nil, nil }, ""},
	} {
		r := newRig(t, library, shortDir(t))
		r.confine = c.confine
		end := r.run(t.Context(), "0")
		if refused := end.Class == bootspec.EndRefused; refused != (c.want != "") || !strings.Contains(end.Message, c.want) {
			t.Errorf("%s: end is %+v, want %q", name, end, c.want)
		}
	}
}

func nullRuleset() (*libkrun.Ruleset, error) {
	file, err := os.Open(os.DevNull)
	return &libkrun.Ruleset{File: file}, err
}

// A machine directory may be anywhere: also where a socket's path is too long.
func TestGuestDialsTheShim(t *testing.T) {
	t.Parallel()
	library := fakeKrun(t)
	for name, below := range map[string]string{"short": "", "long": strings.Repeat("d", 200)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if below != "" && runtime.GOOS != "linux" {
				t.Skip("SKIP: only Linux can name a socket by a descriptor")
			}
			dir := filepath.Join(shortDir(t), below)
			if err := os.MkdirAll(dir, 0o700); err != nil {
				t.Fatal(err)
			}
			r := newRig(t, library, dir)
			if _, err := r.env.WriteString("the frame"); err != nil {
				t.Fatal(err)
			}
			_ = r.env.Close()
			ended := make(chan bootspec.End, 1)
			go func() { ended <- r.run(t.Context(), "dial") }()
			select {
			case c := <-r.offered:
				if got, err := bufio.NewReader(c).ReadString('\n'); got != "the frame\n" {
					t.Errorf("the guest sent %q, %v", got, err)
				}
				_ = c.Close()
			case <-time.After(patience):
				t.Error("the guest has not dialled")
			}
			if end := <-ended; end.Class != bootspec.EndGuest {
				t.Fatalf("end is %v: %s", end, r.log.String())
			}
			if _, err := os.Lstat(filepath.Join(dir, layout.LinkName)); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the socket is left: %v", err)
			}
		})
	}
}

func TestContextKillsTheVMM(t *testing.T) {
	t.Parallel()
	r := newRig(t, fakeKrun(t), shortDir(t))
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	go func() {
		<-r.started
		cancel()
	}()
	if end := r.run(ctx, "hang"); end.Class != bootspec.EndKilled {
		t.Errorf("end is %+v", end)
	}
}

// Where the kernel does not kill the child with its parent, the end of its
// standard input does.
func TestVMMEndsWithItsStdin(t *testing.T) {
	t.Parallel()
	reader, writer, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	console, console2, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	report, report2, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = report.Close() }()
	calls := spec()
	calls.Libkrun.Library, calls.Libkrun.Firmware = fakeKrun(t), ""
	child, err := os.StartProcess(os.Args[0], []string{os.Args[0], krun.ChildCommand}, &os.ProcAttr{
		Env:   []string{"HOSTNAME=hang"},
		Files: []*os.File{reader, nil, nil, console2, nil, report2, report2},
	})
	if err != nil {
		t.Fatal(err)
	}
	_ = errors.Join(reader.Close(), console2.Close(), report2.Close())
	if _, err := libkrun.Calls(calls, nil).WriteTo(writer); err != nil {
		t.Fatal(err)
	}
	// It is in the VM now.
	if _, err := io.ReadFull(console, make([]byte, len("hang"))); err != nil {
		t.Fatal(err)
	}
	_ = writer.Close()
	state, err := child.Wait()
	if err != nil || state.String() != "signal: killed" {
		t.Errorf("the child ended: %v, %v", state, err)
	}
	_ = console.Close()
}
