package shimdriver_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/proc"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/shimdriver"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/vmtest"
)

const secret = "hunter2"

// rig is a driver whose shim is a shell script.
type rig struct {
	driver *shimdriver.Driver
	spec   *bootspec.Spec
	files  layout.Machine
	lock   *os.File
}

// newRig has a script in the place of the shim. It finds the file descriptors
// of a shim, and may write to $DIR.
func newRig(t *testing.T, script string) *rig {
	t.Helper()
	roots := vmtest.Roots(t)
	files := roots.Machine("test")
	for _, dir := range []string{files.Dir, roots.Run} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	shim := filepath.Join(files.Dir, "script")
	if err := proc.WriteProgram(shim, []byte("#!/bin/sh\nDIR="+files.Dir+"\n"+script)); err != nil {
		t.Fatal(err)
	}
	lock, err := os.Create(files.Lock())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = lock.Close() })
	return &rig{
		driver: newDriver(t, roots, map[string]string{"III_KRUN_SHIM": shim, "PATH": os.Getenv("PATH"), "TOKEN": secret}),
		spec: &bootspec.Spec{
			Version: bootspec.Version, ID: "test", VMM: bootspec.QEMU, Lifetime: bootspec.Detached,
			Dir: files.Dir, Socket: files.Socket, CPUs: 1, MemoryMiB: 256,
			Lower: bootspec.Disk{Path: "/lower", ReadOnly: true}, Upper: bootspec.Disk{Path: files.Upper()},
			QEMU: &bootspec.QEMUSpec{Binary: "/qemu", Machine: "q35", Kernel: "/kernel", Initramfs: "/initramfs"},
			Guest: bootspec.Guest{
				Version: bootspec.Version, Token: strings.Repeat("0f", 16), Hostname: "h",
				Env: []string{"SECRET=" + secret, "FILL=" + strings.Repeat("x", 200<<10)},
			},
		},
		files: files, lock: lock,
	}
}

func newDriver(t *testing.T, roots layout.Roots, env map[string]string) *shimdriver.Driver {
	t.Helper()
	d, err := shimdriver.New(shimdriver.Config{VMM: bootspec.QEMU, Roots: roots, Log: vmtest.Logger(t), Getenv: func(k string) string { return env[k] }})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func (r *rig) start(t *testing.T) (vm.Process, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	return r.driver.Start(ctx, r.spec, r.lock)
}

func (r *rig) mustStart(t *testing.T) vm.Process {
	t.Helper()
	p, err := r.start(t)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Kill(); err != nil {
			t.Error(err)
		}
		await(t, p)
	})
	return p
}

func await(t *testing.T, p vm.Process) bootspec.End {
	t.Helper()
	select {
	case <-p.Done():
	case <-time.After(20 * time.Second):
		t.Fatal("the shim did not end")
	}
	return p.End()
}

func (r *rig) read(t *testing.T, name string) string {
	t.Helper()
	body, err := os.ReadFile(filepath.Join(r.files.Dir, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(body)
}

func TestShimGetsItsSpecAndNoSecretElsewhere(t *testing.T) {
	t.Parallel()
	r := newRig(t, `
		cat > $DIR/spec
		tr '\0' '\n' < /proc/$$/environ > $DIR/env
		tr '\0' ' ' < /proc/$$/cmdline > $DIR/argv
		readlink /proc/$$/fd/5 > $DIR/fd5
		echo out; echo err >&2
		echo >&3
		exec sleep 1000`)
	p := r.mustStart(t)
	if p.PID() <= 1 {
		t.Errorf("pid is %d", p.PID())
	}
	spec, err := bootspec.Read(strings.NewReader(r.read(t, "spec")))
	if err != nil {
		t.Fatal(err)
	}
	if spec.ID != "test" || spec.Guest.Env[0] != "SECRET="+secret {
		t.Errorf("the spec changed on its way: %+v", spec)
	}
	if got := r.read(t, "argv"); !strings.HasSuffix(got, "/script __vm-boot ") {
		t.Errorf("argv is %q", got)
	}
	if got := r.read(t, "env"); strings.Contains(got, secret) || strings.Count(got, "=") > 1 {
		t.Errorf("environment is %q", got)
	}
	if got := r.read(t, "fd5"); strings.TrimSpace(got) != r.files.Lock() {
		t.Errorf("file 5 is %q", got)
	}
	if got := r.read(t, "shim.log"); got != "out\nerr\n" {
		t.Errorf("the log is %q", got)
	}
}

func TestEndsBeforeReady(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		script string
		class  bootspec.EndClass
		words  []string
	}{
		"status": {"cat >/dev/null; echo first; echo 'no such option' >&2; exit 3", bootspec.EndRefused, []string{"status 3", "no such option"}},
		"report": {
			`echo '{"class":"bad-spec","message":"cpus is 0","exit_code":2,"booted":false}' > $DIR/end.json; exit 2`,
			bootspec.EndBadSpec,
			[]string{"cpus is 0"},
		},
		"damaged report": {`echo '{"class":' > $DIR/end.json; exit 2`, bootspec.EndCrashed, []string{"damaged", "exit status 2"}},
		"killed":         {"kill -KILL $$", bootspec.EndKilled, []string{"SIGKILL", "dmesg"}},
		"terminated":     {"kill -TERM $$", bootspec.EndKilled, []string{"signal 15"}},
		"aborted":        {"echo 'assertion failed' >&2; kill -ABRT $$", bootspec.EndCrashed, []string{"signal 6", "assertion failed"}},
		"broken pipe":    {"kill -PIPE $$", bootspec.EndCrashed, []string{"signal 13"}},
		"silent":         {"exit 0", bootspec.EndCrashed, []string{"without a report"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, tt.script)
			_, err := r.start(t)
			var end bootspec.End
			if !errors.As(err, &end) || end.Class != tt.class {
				t.Fatalf("error is %v, want class %s", err, tt.class)
			}
			for _, word := range tt.words {
				if !strings.Contains(err.Error(), word) {
					t.Errorf("%q lacks %q", err, word)
				}
			}
		})
	}
}

func TestShimThatNeverGetsReadyIsKilled(t *testing.T) {
	t.Parallel()
	// It reads nothing either: the spec does not fit the pipe.
	r := newRig(t, "echo $$ > $DIR/pid; sleep 1000 & echo $! >> $DIR/pid; : > $DIR/go; wait")
	cause := errors.New("too late")
	ctx, cancel := context.WithCancelCause(context.Background())
	started := make(chan error, 1)
	go func() {
		_, err := r.driver.Start(ctx, r.spec, r.lock)
		started <- err
	}()
	vmtest.Eventually(t, 20*time.Second, "start of the script", func() bool {
		_, err := os.Stat(filepath.Join(r.files.Dir, "go"))
		return err == nil
	})
	cancel(cause)
	if err := <-started; !errors.Is(err, cause) {
		t.Errorf("error is %v", err)
	}
	for field := range strings.FieldsSeq(r.read(t, "pid")) {
		pid, err := strconv.Atoi(field)
		if err != nil {
			t.Fatal(err)
		}
		if id, err := proc.Identify(pid); !errors.Is(err, proc.ErrGone) {
			t.Errorf("process %+v is left (%v)", id, err)
		}
	}
}

func TestKill(t *testing.T) {
	t.Parallel()
	r := newRig(t, "cat > /dev/null; echo >&3; sleep 1000 & wait")
	p := r.mustStart(t)
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
	if end := await(t, p); end.Class != bootspec.EndKilled || end.Signal != 9 {
		t.Errorf("end is %+v", end)
	}
	if err := p.Kill(); err != nil {
		t.Errorf("second kill: %v", err)
	}
}

func TestReleaseTellsTheShim(t *testing.T) {
	t.Parallel()
	r := newRig(t, "cat > /dev/null; echo >&3; head -c 1 <&4 > $DIR/lifeline; exit 0")
	p := r.mustStart(t)
	if err := p.Release(); err != nil {
		t.Fatal(err)
	}
	await(t, p)
	if got := r.read(t, "lifeline"); got != "D" {
		t.Errorf("the lifeline carried %q", got)
	}
	if err := p.Release(); err == nil {
		t.Error("a release after the end says nothing")
	}
}

func TestNoProgram(t *testing.T) {
	t.Parallel()
	r := newRig(t, "")
	if err := proc.WriteProgram(filepath.Join(r.files.Dir, "script"), []byte("\x7fELFnonsense")); err != nil {
		t.Fatal(err)
	}
	if _, err := r.start(t); err == nil || !strings.Contains(err.Error(), "must be a program for this host") {
		t.Errorf("error is %v", err)
	}
}

func TestMissingPartsAreNamed(t *testing.T) {
	t.Parallel()
	roots := vmtest.Roots(t)
	dir := roots.Machine("test").Dir
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	lower := filepath.Join(dir, "lower")
	if err := os.WriteFile(lower, append(make([]byte, 1024), "\xe2\xe1\xf5\xe0 and more"...), 0o600); err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(dir, "program")
	if err := proc.WriteProgram(program, []byte("#!/bin/sh\n")); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		env   map[string]string
		lower string
		words []string
	}{
		"image missing": {lower: dir + "/none", words: []string{"image", dir + "/none"}},
		"image wrong":   {lower: program, words: []string{"EROFS", "pull it again"}},
		"image a dir":   {lower: dir, words: []string{"not a regular file"}},
		"shim":          {words: []string{"krun-shim", "make build", "III_KRUN_SHIM", roots.VMM()}},
		"shim named":    {env: map[string]string{"III_KRUN_SHIM": "/none"}, words: []string{"III_KRUN_SHIM=/none"}},
		"shim a file":   {env: map[string]string{"III_KRUN_SHIM": lower}, words: []string{"not an executable"}},
		"qemu":          {env: map[string]string{"III_KRUN_SHIM": program}, words: []string{"qemu-system", "apt-get install", "III_QEMU"}},
		"agent":         {env: map[string]string{"III_KRUN_SHIM": program, "III_QEMU": program}, words: []string{"guest agent", "III_GUEST_AGENT"}},
		// Either the host cannot run it, or it is not where it is said to be.
		"libkrun": {env: map[string]string{"III_KRUN_SHIM": program, "III_LIBKRUN_PATH": "/none"}, words: []string{"libkrun"}},
		"kernel": {
			env:   map[string]string{"III_KRUN_SHIM": program, "III_QEMU": program, "III_GUEST_AGENT": program},
			words: []string{"kernel", "vmm setup", "III_VM_KERNEL"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			spec := &bootspec.Spec{Dir: dir, Lower: bootspec.Disk{Path: lower}, Upper: bootspec.Disk{Path: dir + "/upper-" + name}, MemoryMiB: 512}
			if tt.lower != "" {
				spec.Lower.Path = tt.lower
			}
			if name == "libkrun" {
				spec.VMM = bootspec.Libkrun
			}
			err := newDriver(t, roots, tt.env).Prepare(t.Context(), spec)
			if err == nil {
				t.Fatal("nothing is missing")
			}
			for _, word := range tt.words {
				if !strings.Contains(err.Error(), word) {
					t.Errorf("%q lacks %q", err, word)
				}
			}
		})
	}
}

func TestChoiceOfVMM(t *testing.T) {
	t.Parallel()
	for vmm, want := range map[string]string{"": "", "auto": "", "qemu": "", "libkrun": "", "xen": "unknown"} {
		_, err := shimdriver.New(shimdriver.Config{VMM: vmm, Log: vmtest.Discard(), Getenv: func(string) string { return "" }})
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", vmm, err)
		}
	}
}
