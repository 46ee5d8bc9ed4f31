package libkrun_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
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

// playVMM as the first argument makes this program the child of Run; the second
// is what its VM does.
const playVMM = "play-vmm"

func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == playVMM {
		err := libkrun.Enter(os.Stdin, func(spec *bootspec.Spec) (libkrun.VM, error) {
			if os.Args[2] == "no library" {
				return nil, errors.New("load libkrun: there is none")
			}
			return &player{act: os.Args[2], spec: spec}, nil
		})
		_, _ = fmt.Fprintf(os.Stderr, "krun-shim: %v\n", err)
		os.Exit(libkrun.StatusRefused)
	}
	os.Exit(m.Run())
}

// player is a VM whose guest is this process.
type player struct {
	recorder
	act  string
	spec *bootspec.Spec
}

func (p *player) StartEnter() error {
	console := os.NewFile(3, "console")
	_, _ = fmt.Fprint(console, p.act)
	if code, err := strconv.Atoi(p.act); err == nil {
		os.Exit(code)
	}
	switch p.act {
	case "refuse":
		return &krun.Error{Call: "krun_start_enter", Errno: syscall.EINVAL}
	case "spec":
		dir, _ := os.Getwd()
		_, _ = fmt.Fprintf(console, ";%+v;%+v;%q;%s", p.spec, p.spec.Guest, os.Environ(), dir)
	case "dial":
		env, _ := io.ReadAll(os.NewFile(4, "env"))
		c, err := net.Dial("unix", layout.LinkName)
		if err != nil {
			return err
		}
		_, _ = c.Write(append(env, '\n'))
		// A VMM that is gone has nobody to be taken for.
		_, _ = io.Copy(io.Discard, c)
	case "kill":
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	case "crash":
		return syscall.Exec("/bin/sh", []string{"sh", "-c", "kill -BUS $$"}, nil) // Go would handle the signal
	case "abort":
		return syscall.Exec("/bin/sh", []string{"sh", "-c", "kill -ABRT $$"}, nil)
	case "hang":
		<-make(chan struct{})
	}
	os.Exit(0)
	return nil
}

// rig is what a shim gives to Run, and what came out of it.
type rig struct {
	dir     string
	console bytes.Buffer
	log     bytes.Buffer
	// env is the host's end of the port.
	env     *os.File
	offered chan net.Conn
	started chan int
	dev     shim.Devices
	pumps   sync.WaitGroup
}

func newRig(t *testing.T, dir string) *rig {
	t.Helper()
	r := &rig{dir: dir, offered: make(chan net.Conn, 8), started: make(chan int, 1)}
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

// run is Run with everything read that came out.
func (r *rig) run(ctx context.Context, act string) bootspec.End {
	s := spec()
	s.Dir = r.dir
	end := libkrun.Hypervisor{Command: []string{os.Args[0], playVMM, act}}.Run(ctx, s, r.dev)
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
	for act, want := range map[string]struct {
		class     bootspec.EndClass
		exit, sig int
		log       string
	}{
		"0":          {bootspec.EndGuest, 0, 0, ""},
		"7":          {bootspec.EndCrashed, 7, 0, ""},
		"99":         {bootspec.EndGuest, agentlink.StatusNoAgent, 0, ""}, // the shim knows whether it should have
		"refuse":     {bootspec.EndRefused, libkrun.StatusRefused, 0, "krun_start_enter: invalid argument"},
		"no library": {bootspec.EndRefused, libkrun.StatusRefused, 0, "krun-shim: load libkrun: there is none"},
		"kill":       {bootspec.EndKilled, -1, 9, ""},
		"crash":      {bootspec.EndCrashed, -1, int(syscall.SIGBUS), ""},
		"abort":      {bootspec.EndCrashed, -1, int(syscall.SIGABRT), ""},
	} {
		t.Run(act, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, shortDir(t))
			end := r.run(t.Context(), act)
			if end.Class != want.class || end.ExitCode != want.exit || end.Signal != want.sig {
				t.Errorf("end is %+v", end)
			}
			if !strings.Contains(r.log.String(), want.log) || strings.Contains(r.log.String(), "goroutine") {
				t.Errorf("the log is %q, want %q in it", r.log.String(), want.log)
			}
		})
	}
}

func TestVMMGetsNoSecrets(t *testing.T) {
	t.Parallel()
	r := newRig(t, shortDir(t))
	if end := r.run(t.Context(), "spec"); end.Class != bootspec.EndGuest {
		t.Fatalf("end is %v: %s", end, r.log.String())
	}
	got := r.console.String()
	if strings.Contains(got, "swordfish") || strings.Contains(got, "do-not-show") {
		t.Errorf("the VMM has secrets: %s", got)
	}
	if !strings.Contains(got, "box") || !strings.HasSuffix(got, `["HOSTNAME=vm-1" "RUST_BACKTRACE=0"];`+r.dir) {
		t.Errorf("the VMM got %s", got)
	}
}

// A machine directory may be anywhere: also where a socket's path is too long.
func TestGuestDialsTheShim(t *testing.T) {
	t.Parallel()
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
			r := newRig(t, dir)
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
	r := newRig(t, shortDir(t))
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
	child, err := os.StartProcess(os.Args[0], []string{os.Args[0], playVMM, "hang"}, &os.ProcAttr{
		Files: []*os.File{reader, nil, nil, console2, nil},
	})
	if err != nil {
		t.Fatal(err)
	}
	_ = errors.Join(reader.Close(), console2.Close())
	if _, err := writer.WriteString(`{"libkrun":{},"cpus":1}` + "\n"); err != nil {
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

func TestCheckNamesEachFaultAndItsCure(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("SKIP: what libraries and devices look like is checked on Linux")
	}
	dir := shortDir(t)
	file := func(name string, mode os.FileMode, content string) string {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(content), mode)); err != nil {
			t.Fatal(err)
		}
		return path
	}
	text, odd := file("text", 0o600, "no library"), file("odd", 0o600, strings.Repeat("x", 513))
	file("root/agent", 0o700, "agent")
	file("plain/agent", 0o600, "agent")
	for name, c := range map[string]struct {
		change func(*bootspec.Spec)
		device string
		want   []string
	}{
		"nothing of libkrun": {func(s *bootspec.Spec) { s.Libkrun = nil }, "", []string{"bad-spec", "libkrun part is missing"}},
		"everything at once": {
			func(s *bootspec.Spec) {
				s.Libkrun = &bootspec.LibkrunSpec{Library: "/no/k", Firmware: "/no/fw", Root: "/no/root"}
			}, "",
			[]string{"bad-spec", "/no/k", "/no/fw", "/no/root/agent", "adapter vmm setup --libkrun"},
		},
		"no library":               {func(s *bootspec.Spec) { s.Libkrun.Library = text }, "", []string{"is not a shared library"}},
		"a directory":              {func(s *bootspec.Spec) { s.Libkrun.Firmware = dir }, "", []string{"not a regular file"}},
		"agent that is no program": {func(s *bootspec.Spec) { s.Libkrun.Root = filepath.Join(dir, "plain") }, "", []string{"not an executable"}},
		"CPUs":                     {func(s *bootspec.Spec) { s.CPUs = 17 }, "", []string{"cpus is 17", "16"}},
		"half a sector":            {func(s *bootspec.Spec) { s.Lower.Path = odd }, "", []string{"lower", "512"}},
		"no device":                {func(*bootspec.Spec) {}, filepath.Join(dir, "none"), []string{"is missing", "adapter doctor", "--vmm qemu"}},
		"another device":           {func(*bootspec.Spec) {}, os.DevNull, []string{"is not the KVM device"}},
		"no device at all":         {func(*bootspec.Spec) {}, dir, []string{"open " + dir}},
	} {
		s := spec()
		s.Dir, s.Libkrun.Root = dir, filepath.Join(dir, "root")
		s.Libkrun.Library = realLibrary(t)
		s.Libkrun.Firmware = s.Libkrun.Library
		c.change(s)
		err := libkrun.Hypervisor{Device: c.device}.Check(s)
		for _, want := range c.want {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: error is %v, want %q in it", name, err, want)
			}
		}
		if err != nil && strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: the error has several lines: %v", name, err)
		}
	}
}

// realLibrary is some shared library of this host.
func realLibrary(t *testing.T) string {
	t.Helper()
	for _, pattern := range []string{"/lib/*/libc.so.6", "/lib64/libc.so.6", "/usr/lib/libc.so.6"} {
		if found, _ := filepath.Glob(pattern); len(found) > 0 {
			return found[0]
		}
	}
	t.Skip("SKIP: no libc.so.6 to play a library")
	return ""
}
