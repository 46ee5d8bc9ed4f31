package qemu_test

import (
	"flag"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/shim/qemu"
)

//nolint:gochecknoglobals // read-only: how the testing package has flags
var update = flag.Bool("update", false, "write the golden files")

func spec(machine string) *bootspec.Spec {
	return &bootspec.Spec{
		Version: bootspec.Version, ID: "vm-1", VMM: bootspec.QEMU, Lifetime: bootspec.Tied,
		Dir: "/state/vm-1", Socket: "/run/vm-1.sock", CPUs: 2, MemoryMiB: 512,
		Lower: bootspec.Disk{Path: "/images/lower.erofs", ReadOnly: true},
		Upper: bootspec.Disk{Path: "/state/vm-1/upper.ext4"},
		QEMU: &bootspec.QEMUSpec{
			Binary: "/usr/bin/qemu-system-x86_64", Machine: machine, TSCKHz: 2_445_430,
			Kernel: "/vmm/vmlinux", Initramfs: "/vmm/initramfs.cpio",
		},
		Guest: bootspec.Guest{Token: "do-not-show", Hostname: "box", Env: []string{"SECRET=swordfish"}},
	}
}

// The whole command line, one argument a line.
func TestArgs(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"q35", "microvm", "virt", "q35-network", "microvm-network"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			machine, _, network := strings.Cut(name, "-")
			s := spec(machine)
			if network {
				s.Guest.Interface = bootspec.NewInterface(9000, false)
				s.QEMU.Snapshot = "/vmm/snapshot"
			}
			args, err := qemu.Args(s)
			if err != nil {
				t.Fatal(err)
			}
			got := strings.Join(args, "\n") + "\n"
			path := filepath.Join("testdata", name+".args")
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
				t.Errorf("the arguments are\n%s\nwant (go test -update writes it)\n%s", got, want)
			}
			if strings.Contains(got, "swordfish") || strings.Contains(got, "do-not-show") {
				t.Error("the arguments have secrets")
			}
		})
	}
}

func argument(t *testing.T, s *bootspec.Spec, prefix string) string {
	t.Helper()
	args, err := qemu.Args(s)
	if err != nil {
		t.Fatal(err)
	}
	at := slices.IndexFunc(args, func(arg string) bool { return strings.HasPrefix(arg, prefix) })
	if at < 0 {
		t.Fatalf("no argument begins with %q: %q", prefix, args)
	}
	return args[at]
}

func TestCommasInPathsAreDoubled(t *testing.T) {
	t.Parallel()
	s := spec("q35")
	s.Upper.Path = "/a,readonly=on,/b,,c"
	want := "if=none,id=upper,format=raw,file=/a,,readonly=on,,/b,,,,c,cache=unsafe,discard=unmap"
	if got := argument(t, s, "if=none,id=upper"); got != want {
		t.Errorf("got %s\nwant %s", got, want)
	}
}

func TestDurableDiskHonoursFlushes(t *testing.T) {
	t.Parallel()
	s := spec("q35")
	s.Upper.Durable = true
	want := "if=none,id=upper,format=raw,file=/state/vm-1/upper.ext4,cache=writeback,discard=unmap"
	if got := argument(t, s, "if=none,id=upper"); got != want {
		t.Errorf("got %s\nwant %s", got, want)
	}
}

func TestUnknownMachine(t *testing.T) {
	t.Parallel()
	if _, err := qemu.Args(spec("pc,accel=kvm")); err == nil || !strings.Contains(err.Error(), "q35") {
		t.Errorf("error is %v", err)
	}
}

func TestCheckNamesEachFaultAndItsCure(t *testing.T) {
	t.Parallel()
	if runtime.GOARCH != "amd64" {
		t.Skip("the test program stands in for a kernel, so it must be one of x86-64")
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	text := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(text, []byte("no kernel"), 0o600); err != nil {
		t.Fatal(err)
	}
	good := func() *bootspec.Spec {
		s := spec("q35")
		s.QEMU.Binary, s.QEMU.Kernel, s.QEMU.Initramfs = self, self, text
		return s
	}
	if err := (qemu.Hypervisor{}).Check(good()); err != nil {
		t.Errorf("nothing is wrong: %v", err)
	}
	for name, tt := range map[string]struct {
		change func(*bootspec.QEMUSpec)
		want   []string
	}{
		"no kernel and no initramfs": {func(q *bootspec.QEMUSpec) { q.Kernel, q.Initramfs = "/no/k", "/no/i" }, []string{"bad-spec", "/no/k", "/no/i", "adapter vmm setup"}},
		"a kernel that is none":      {func(q *bootspec.QEMUSpec) { q.Kernel = text }, []string{"bad-spec", "vmlinux"}},
		"a directory":                {func(q *bootspec.QEMUSpec) { q.Initramfs = "/" }, []string{"bad-spec", "not a regular file"}},
		"no emulator":                {func(q *bootspec.QEMUSpec) { q.Binary = "/no/qemu" }, []string{"install qemu-system", "III_QEMU"}},
		"emulator is no program":     {func(q *bootspec.QEMUSpec) { q.Binary = text }, []string{"not an executable"}},
	} {
		s := good()
		tt.change(s.QEMU)
		err := qemu.Hypervisor{}.Check(s)
		for _, want := range tt.want {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: error is %v, want %q in it", name, err, want)
			}
		}
	}
}
