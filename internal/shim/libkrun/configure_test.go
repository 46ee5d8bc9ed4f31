package libkrun_test

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/krun"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/shim/libkrun"
)

//nolint:gochecknoglobals // read-only: how the testing package has flags
var update = flag.Bool("update", false, "write the golden files")

// recorder writes each call down, and fails the one that begins with refuse.
type recorder struct {
	calls  strings.Builder
	refuse string
}

func (r *recorder) call(format string, args ...any) error {
	line := fmt.Sprintf(format, args...)
	r.calls.WriteString(line + "\n")
	if r.refuse != "" && strings.HasPrefix(line, r.refuse) {
		return &krun.Error{Call: r.refuse, Errno: syscall.EINVAL}
	}
	return nil
}

func (r *recorder) SetVMConfig(cpus uint8, memoryMiB uint32) error {
	return r.call("set_vm_config cpus=%d memory_mib=%d", cpus, memoryMiB)
}
func (r *recorder) SetNestedVirt(on bool) error   { return r.call("set_nested_virt on=%t", on) }
func (r *recorder) DisableImplicitConsole() error { return r.call("disable_implicit_console") }
func (r *recorder) DisableImplicitVsock() error   { return r.call("disable_implicit_vsock") }
func (r *recorder) AddVsock(flags uint32) error   { return r.call("add_vsock tsi=%d", flags) }
func (r *recorder) AddVsockPort2(port uint32, file string, listen bool) error {
	return r.call("add_vsock_port2 port=%d file=%s listen=%t", port, file, listen)
}
func (r *recorder) SetRoot(dir string) error { return r.call("set_root dir=%s", dir) }
func (r *recorder) AddDisk3(id, file string, format krun.DiskFormat, readOnly, direct bool, sync krun.SyncMode) error {
	return r.call("add_disk3 id=%s file=%s format=%d read_only=%t direct=%t sync=%d", id, file, format, readOnly, direct, sync)
}

func (r *recorder) AddVirtioConsoleDefault(in, out, err int) error {
	return r.call("add_virtio_console_default in=%d out=%d err=%d", in, out, err)
}

func (r *recorder) AddVirtioConsoleMultiport() (uint32, error) {
	return 1, r.call("add_virtio_console_multiport")
}

func (r *recorder) AddConsolePortInOut(console uint32, name string, in, out int) error {
	return r.call("add_console_port_inout console=%d name=%s in=%d out=%d", console, name, in, out)
}

func (r *recorder) AddNetUnixStream(file string, fd int, mac [6]byte, features, flags uint32) error {
	return r.call("add_net_unixstream file=%q fd=%d mac=%x features=%d flags=%d", file, fd, mac, features, flags)
}

func (r *recorder) SetExec(program string, args, env []string) error {
	return r.call("set_exec program=%s args=%q env=%q", program, args, env)
}
func (r *recorder) StartEnter() error { return r.call("start_enter") }

func spec() *bootspec.Spec {
	return &bootspec.Spec{
		Version: bootspec.Version, ID: "vm-1", VMM: bootspec.Libkrun, Lifetime: bootspec.Tied,
		Dir: "/state/vm-1", Socket: "/run/vm-1.sock", CPUs: 2, MemoryMiB: 512,
		Lower:   bootspec.Disk{Path: "/images/lower.erofs", ReadOnly: true},
		Upper:   bootspec.Disk{Path: "/state/vm-1/upper.ext4"},
		Libkrun: &bootspec.LibkrunSpec{Library: "/lib/libkrun.so.1", Firmware: "/lib/libkrunfw.so.5", Root: "/state/vm-1/root"},
		Guest:   bootspec.Guest{Token: "do-not-show", Hostname: "box", Env: []string{"SECRET=swordfish", "A=caf\u00e9\n\""}},
	}
}

func variants() map[string]func(*bootspec.Spec) {
	return map[string]func(*bootspec.Spec){
		"ephemeral": func(*bootspec.Spec) {},
		"durable":   func(s *bootspec.Spec) { s.Upper.Durable, s.Upper.Path = true, "/volumes/a.ext4" },
		"network":   func(s *bootspec.Spec) { s.Guest.Interface = bootspec.NewInterface(1500, false) },
		"nested":    func(s *bootspec.Spec) { s.Libkrun.Nested = true },
		"large":     func(s *bootspec.Spec) { s.CPUs, s.MemoryMiB = 16, 65536 },
	}
}

// The whole sequence, one call a line.
func TestConfigure(t *testing.T) {
	t.Parallel()
	for name, change := range variants() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, r := spec(), &recorder{}
			change(s)
			if err := libkrun.Configure(r, s, libkrun.Files{Console: 3, Env: 4, Null: 5, Network: 6}); err != nil {
				t.Fatal(err)
			}
			got := r.calls.String()
			path := filepath.Join("testdata", name+".calls")
			if *update {
				if err := os.WriteFile(path, []byte(got), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if got != string(want) {
				t.Errorf("the calls are\n%s\nwant (go test -update writes it)\n%s", got, want)
			}
			if strings.Contains(got, "swordfish") || strings.Contains(got, "do-not-show") || strings.Contains(got, "caf") {
				t.Error("the calls have secrets, or what libkrun aborts on")
			}
		})
	}
}

// Whichever call is refused, it is the last one and named.
func TestConfigureEndsAtARefusal(t *testing.T) {
	t.Parallel()
	whole := &recorder{}
	if err := libkrun.Configure(whole, spec(), libkrun.Files{}); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(whole.calls.String()), "\n")
	if len(lines) < 10 {
		t.Fatalf("only %d calls", len(lines))
	}
	for i, line := range lines {
		r := &recorder{refuse: line}
		err := libkrun.Configure(r, spec(), libkrun.Files{})
		if !errors.Is(err, syscall.EINVAL) || !strings.Contains(err.Error(), line) {
			t.Errorf("%s refused: error is %v", line, err)
		}
		if n := strings.Count(r.calls.String(), "\n"); n != i+1 {
			t.Errorf("%s refused: %d calls instead of %d", line, n, i+1)
		}
	}
}
