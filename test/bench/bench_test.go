package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/proc"
)

// ourQEMU is a command line as our shim makes it, in short.
func ourQEMU(binary string) []string {
	return []string{
		binary, "-M", "microvm,accel=tcg", "-nodefaults", "-chardev", "socket,id=console,fd=3", "-serial", "chardev:console",
		"-initrd", "ours.cpio", "-append", "quiet",
		"-drive", "if=none,id=upper,format=raw,file=u,cache=unsafe", "-device", "virtio-blk-device,drive=upper",
		"-chardev", "socket,id=link,fd=4", "-device", "virtserialport,chardev=link,name=iii.agent", "-no-reboot",
		"-incoming", "fd:6",
	}
}

func TestBareArguments(t *testing.T) {
	t.Parallel()
	got, err := bareArguments(ourQEMU("qemu"), "init.cpio", "/tmp/disk")
	want := []string{
		"qemu", "-M", "microvm,accel=tcg", "-nodefaults", "-chardev", "stdio,id=console", "-serial", "chardev:console",
		"-initrd", "init.cpio", "-append", "quiet",
		"-drive", "if=none,id=upper,format=raw,file=/tmp/disk,cache=unsafe", "-device", "virtio-blk-device,drive=upper",
		"-chardev", "null,id=link", "-device", "virtserialport,chardev=link,name=iii.agent", "-no-reboot",
	}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("got %q, %v", got, err)
	}
	if got, err := bareArguments(ourQEMU("qemu"), "", "/tmp/disk"); err != nil || !slices.Contains(got, "ours.cpio") {
		t.Errorf("got %q, %v", got, err)
	}
	for _, argv := range [][]string{nil, {"qemu", "-m"}, ourQEMU("qemu")[:9], ourQEMU("qemu")[8:], ourQEMU("qemu")[:12]} {
		if got, err := bareArguments(argv, "i", "u"); err == nil {
			t.Errorf("%q became %q", argv, got)
		}
	}
}

// fakeQEMU is a script in the place of QEMU; it ignores its arguments.
func fakeQEMU(t *testing.T, script string) *floor {
	t.Helper()
	sh, err := exec.LookPath("sh")
	if err != nil {
		t.Skip("SKIPPED: no shell")
	}
	file := filepath.Join(t.TempDir(), "qemu")
	if err := proc.WriteProgram(file, []byte("#!"+sh+"\n"+script)); err != nil {
		t.Fatal(err)
	}
	f, err := newFloor(ourQEMU(file), "/init.cpio", "/disk")
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func TestFloorTellsWhenItsInitRan(t *testing.T) {
	t.Parallel()
	b, err := fakeQEMU(t, "echo; echo kernel line; echo "+marker).run(t.Context())
	if err != nil || b.Init <= 0 || b.End < b.Init {
		t.Errorf("got %+v, %v", b, err)
	}
}

func TestFloorThatFails(t *testing.T) {
	t.Parallel()
	for script, want := range map[string]string{
		"echo panic: no init":              "panic: no init",
		"echo no such machine >&2; exit 1": "no such machine",
	} {
		if _, err := fakeQEMU(t, script).run(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v", script, err)
		}
	}
}

func TestStatusField(t *testing.T) {
	t.Parallel()
	status := "Name:\tx\nVmHWM:\t   2048 kB\nVmRSS:\tlots\n"
	if got, err := statusField(status, "VmHWM"); err != nil || got != 2<<20 {
		t.Errorf("got %d, %v", got, err)
	}
	for _, field := range []string{"VmRSS", "RssAnon"} {
		if got, err := statusField(status, field); err == nil {
			t.Errorf("%s is %d", field, got)
		}
	}
}

func TestMedian(t *testing.T) {
	t.Parallel()
	ms := time.Millisecond
	for want, list := range map[float64][]time.Duration{
		0: nil, 3: {3 * ms}, 2: {9 * ms, 1 * ms, 2 * ms}, 2.5: {9 * ms, 1 * ms, 2 * ms, 3 * ms},
	} {
		if got := median(list); got != want {
			t.Errorf("median of %v is %v", list, got)
		}
	}
}

func TestVerdicts(t *testing.T) {
	t.Parallel()
	res := result{Runs: 3, Host: "somewhere", Rows: []row{
		newRow("good", 130, 100, "ms", 1.35, "the floor"),
		newRow("seen", 900, 100, "ms", 0, "a pipe", "a note"),
	}}
	if res.missed() {
		t.Error("a goal that was met counts as missed")
	}
	res.Rows = append(res.Rows, newRow("bad", 140, 100, "ms", 1.35, "the floor"), newRow("no base", 1, 0, "ms", 2, "nothing"))
	if !res.missed() || res.Rows[2].OK || res.Rows[3].OK || !newRow("no growth", 0, 16, "MiB", 1, "a limit").OK {
		t.Error("a missed goal counts as met")
	}
	var out bytes.Buffer
	if err := res.print(&out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"1.30   ok, goal at most 1.35", "9.00   no goal", "1.40   MISSED, goal at most 1.35", "base: a pipe\n  a note"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
	out.Reset()
	var back result
	if err := errors.Join(res.printJSON(&out), json.Unmarshal(out.Bytes(), &back)); err != nil || len(back.Rows) != 4 || back.Rows[2].OK {
		t.Errorf("JSON gave %+v, %v", back, err)
	}
}

func TestParent(t *testing.T) {
	t.Parallel()
	if _, err := os.Stat("/proc/self/stat"); err != nil {
		t.Skip("SKIPPED: no /proc")
	}
	if got, err := parent(os.Getpid()); err != nil || got != os.Getppid() {
		t.Errorf("got %d, %v; the parent is %d", got, err, os.Getppid())
	}
}

func TestCommandLine(t *testing.T) {
	t.Parallel()
	o, err := parse([]string{"--only", "boot,memory", "--runs", "3"}, &bytes.Buffer{})
	if err != nil || !slices.Equal(o.only, []string{"boot", "memory"}) || o.runs != 3 || o.image != "python" {
		t.Errorf("got %+v, %v", o, err)
	}
	for _, args := range [][]string{{"--only", "dance"}, {"--runs", "0"}, {"extra"}} {
		if code := command(t.Context(), args, &bytes.Buffer{}, &bytes.Buffer{}); code != 2 {
			t.Errorf("%q ended with %d", args, code)
		}
	}
}

// One slow minute of the host must not decide: the pairs do.
func TestBootRatioIsThatOfNeighbours(t *testing.T) {
	t.Parallel()
	ms := time.Millisecond
	ours := []bootTimes{{total: 120 * ms}, {total: 360 * ms}, {total: 600 * ms}}
	base := []boot{{End: 100 * ms}, {End: 300 * ms}, {End: 100 * ms}}
	r := bootRow("x", goalBoot, ours, base)
	if r.Ratio != 1.2 || !r.OK || r.Ours != 360 || r.Base != 100 {
		t.Errorf("got %+v", r)
	}
	if r := bootRow("x", goalBoot, ours, []boot{{End: 50 * ms}, {End: 100 * ms}, {End: 100 * ms}}); r.OK {
		t.Errorf("got %+v", r)
	}
}

func TestChild(t *testing.T) {
	t.Parallel()
	sh, err := exec.LookPath("sh")
	if err != nil {
		t.Skip("SKIPPED: no shell")
	}
	for script, want := range map[string]string{"echo well": "", "echo sad; exit 3": "exit status 3: sad"} {
		c, err := startChild(exec.Command(sh, "-c", script))
		if err != nil {
			t.Fatal(err)
		}
		if err := c.end(func() {}); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v", script, err)
		}
	}
	if _, err := startChild(exec.Command("/nonexistent")); err == nil {
		t.Error("a program that is not there started")
	}
}

// As with boots; and ours must be first as often as the base.
func TestFileRatioIsThatOfNeighbours(t *testing.T) {
	t.Parallel()
	s := time.Second
	r := fileRow("x", []time.Duration{2 * s, 9 * s, 14 * s}, []time.Duration{2 * s, 6 * s, 10 * s})
	if r.Ratio != 1.4 || !r.OK || r.Ours != 9000 {
		t.Errorf("got %+v", r)
	}
	if r := fileRow("x", []time.Duration{3 * s}, []time.Duration{2 * s}); r.OK {
		t.Errorf("got %+v", r)
	}
	if slices.Equal(inTurn(0), inTurn(1)) || !slices.Equal(inTurn(0), inTurn(2)) {
		t.Errorf("got %v, %v, %v", inTurn(0), inTurn(1), inTurn(2))
	}
}

func TestConfigurationAllowsTheImage(t *testing.T) {
	t.Parallel()
	for image, want := range map[string]string{
		"python": `{"image_allowlist":["python"]}`,
		"mine":   `{"custom_images":{"mine":"registry.invalid/mine"},"image_allowlist":["mine"]}`,
	} {
		if got, err := configuration(options{image: image}); err != nil || got != want {
			t.Errorf("%s: got %s, %v", image, got, err)
		}
	}
}
