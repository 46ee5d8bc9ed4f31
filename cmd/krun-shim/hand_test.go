package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/egress"
)

// saved writes the spec as a machine directory has it: without secrets.
func saved(t *testing.T, spec *bootspec.Spec) string {
	t.Helper()
	body, err := json.Marshal(spec.Redacted())
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "spec.json")
	if err := os.WriteFile(path, body, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// shimCommand runs this program as krun-shim.
func shimCommand(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, os.Args[0], args...)
	cmd.Env = append(os.Environ(), playShim+"=1")
	return cmd
}

func runShim(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	cmd := shimCommand(t.Context(), args...)
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	err := cmd.Run()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), out.String(), errOut.String()
}

func TestHelpAndVersion(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"--help"}, {commandBoot, "--help"}} {
		code, out, _ := runShim(t, args...)
		if code != 0 || !strings.Contains(out, "Exit status") || !strings.Contains(out, "-console") {
			t.Errorf("%q: status %d, %s", args, code, out)
		}
	}
	code, out, _ := runShim(t, "--version")
	if code != 0 || !strings.HasPrefix(out, "krun-shim "+version) {
		t.Errorf("--version: status %d, %s", code, out)
	}
}

func TestReplayOfASavedSpec(t *testing.T) {
	t.Parallel()
	spec := fixture(t, "boot-1")
	path := saved(t, spec)
	// The machine directory of the first boot is long gone.
	if err := os.RemoveAll(spec.Dir); err != nil {
		t.Fatal(err)
	}
	cmd := shimCommand(t.Context(), commandBoot, "--spec", path, "--console", "--env", "NEW=value", "--env", "B=2")
	console, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line := make([]byte, len(`environment: ["NEW=value" "B=2"]`))
	if _, err := io.ReadFull(console, line); err != nil || string(line) != `environment: ["NEW=value" "B=2"]` {
		t.Errorf("the console shows %q, %v", line, err)
	}
	if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, console)
	_ = cmd.Wait() // the status is looked at
	if cmd.ProcessState.ExitCode() != bootspec.EndKilled.ExitStatus() || !strings.Contains(stderr.String(), "killed: its shim was told to end") {
		t.Errorf("%v: %s", cmd.ProcessState, &stderr)
	}
	_, rest, ok := strings.Cut(stderr.String(), "machine directory ")
	dir, _, _ := strings.Cut(rest, ",")
	if _, err := os.Lstat(dir); !ok || err == nil {
		t.Errorf("machine directory %q is left", dir)
	}
}

// A snapshot has the kernel and CPUs of the first boot, whatever was changed in
// the spec since.
func TestReplayBootsWithoutTheSnapshot(t *testing.T) {
	t.Parallel()
	spec := fixture(t, "panic-1")
	spec.QEMU.Snapshot = filepath.Join(spec.Dir, "snapshot")
	code, _, stderr := runShim(t, commandBoot, "--spec", saved(t, spec))
	if code != bootspec.EndCrashed.ExitStatus() || strings.Contains(stderr, "snapshot") {
		t.Errorf("status %d: %s", code, stderr)
	}
}

// A port that the first VM published may be in use, by that VM even.
func TestReplayTakesOtherPorts(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() //nolint:errcheck // a test
	address, _ := l.Addr().(*net.TCPAddr)
	spec := fixture(t, "panic-1")
	spec.Network = &bootspec.Network{
		Policy: egress.Policy{Mode: egress.Open}, Publish: []bootspec.PublishedPort{{Host: uint16(address.Port), Guest: 80}},
	}
	spec.Guest.Interface = bootspec.NewInterface(bootspec.DefaultMTU, false)
	// The machine ran, so the gateway was there.
	if code, _, stderr := runShim(t, commandBoot, "--spec", saved(t, spec)); code != bootspec.EndCrashed.ExitStatus() {
		t.Errorf("status %d: %s", code, stderr)
	}
}

func TestReplayKeepsADirectoryThatWasNamed(t *testing.T) {
	t.Parallel()
	path := saved(t, fixture(t, "panic-1"))
	dir, err := os.MkdirTemp("/tmp", "krunshimtest-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	code, _, stderr := runShim(t, commandBoot, "--spec", path, "--dir", dir)
	if code != bootspec.EndCrashed.ExitStatus() || !strings.Contains(stderr, "not syncing: no init") {
		t.Errorf("status %d: %s", code, stderr)
	}
	for _, name := range []string{"console.log", "end.json", "upper.ext4"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			t.Error(err)
		}
	}
	// Not twice on one disk without saying so.
	code, _, stderr = runShim(t, commandBoot, "--spec", path, "--dir", dir)
	if code != exitUsage || !strings.Contains(stderr, "--upper") {
		t.Errorf("again: status %d: %s", code, stderr)
	}
	code, _, stderr = runShim(t, commandBoot, "--spec", path, "--dir", dir, "--upper", filepath.Join(dir, "upper.ext4"))
	if code != bootspec.EndCrashed.ExitStatus() {
		t.Errorf("with --upper: status %d: %s", code, stderr)
	}
}

func TestBadInput(t *testing.T) {
	t.Parallel()
	good := fixture(t, "boot-1")
	changed := func(f func(*bootspec.Spec)) string {
		spec := *good
		qemu := *good.QEMU
		spec.QEMU = &qemu
		f(&spec)
		return saved(t, &spec)
	}
	text := func(body string) string {
		path := filepath.Join(t.TempDir(), "spec.json")
		if err := os.WriteFile(path, []byte(body), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	spec := bootspec.EndBadSpec.ExitStatus()
	for _, tt := range []struct {
		name string
		args []string
		code int
		want string
	}{
		{"no command", nil, exitUsage, "a command is missing"},
		{"unknown command", []string{"nonsense"}, exitUsage, `unknown command "nonsense"`},
		{"no file descriptors", []string{commandBoot}, exitUsage, "file descriptor 3 is not the launcher's ready pipe"},
		{"unknown flag", []string{commandBoot, "--what"}, exitUsage, "not defined: -what"},
		{"no spec", []string{commandBoot, "--console"}, exitUsage, "want --spec FILE"},
		{"spec that is missing", []string{commandBoot, "--spec", "/no/such"}, spec, "no such file"},
		{"no JSON", []string{commandBoot, "--spec", text("{")}, spec, "boot spec"},
		{"unknown field", []string{commandBoot, "--spec", text(`{"version":2,"colour":1}`)}, spec, "colour"},
		{"other version", []string{commandBoot, "--spec", changed(func(s *bootspec.Spec) { s.Version = 9 })}, spec, "version is 9"},
		{"no kernel", []string{commandBoot, "--spec", changed(func(s *bootspec.Spec) { s.QEMU.Kernel = "/no/kernel" })}, spec, "adapter vmm setup"},
		{"initramfs that is a directory", []string{commandBoot, "--spec", changed(func(s *bootspec.Spec) { s.QEMU.Initramfs = s.Dir })}, spec, "not a regular file"},
		{"no image", []string{commandBoot, "--spec", changed(func(s *bootspec.Spec) { s.Lower.Path = "/no/image" })}, spec, "lower: open /no/image"},
		{"bad environment", []string{commandBoot, "--spec", changed(func(*bootspec.Spec) {}), "--env", "novalue"}, spec, "env[0] is not KEY=value"},
		{"unknown machine", []string{commandBoot, "--spec", changed(func(s *bootspec.Spec) { s.QEMU.Machine = "pc" })}, spec, `qemu.machine is "pc"`},
		{"no QEMU", []string{commandBoot, "--spec", changed(func(s *bootspec.Spec) { s.QEMU.Binary = "/no/qemu" })}, bootspec.EndRefused.ExitStatus(), "install qemu-system"},
		{"QEMU that is no program", []string{commandBoot, "--spec", changed(func(s *bootspec.Spec) { s.QEMU.Binary = s.QEMU.Initramfs })}, bootspec.EndRefused.ExitStatus(), "not an executable file"},
		{"no libkrun", []string{commandBoot, "--spec", changed(func(s *bootspec.Spec) { s.VMM, s.QEMU = bootspec.Libkrun, nil })}, bootspec.EndBadSpec.ExitStatus(), "the libkrun part is missing"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			code, _, stderr := runShim(t, tt.args...)
			if code != tt.code || !strings.Contains(stderr, tt.want) {
				t.Errorf("status %d, want %d with %q:\n%s", code, tt.code, tt.want, stderr)
			}
		})
	}
}
