//go:build linux

package boot

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
)

func TestEnvironment(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ in, want []string }{
		{nil, []string{"PATH=" + DefaultPath, "HOME=/root"}},
		{[]string{"PATH=", "HOME=/h"}, []string{"PATH=", "HOME=/h"}},
		{[]string{"Path=/x", "HOMER=1"}, []string{"Path=/x", "HOMER=1", "PATH=" + DefaultPath, "HOME=/root"}},
	} {
		if got := environment(c.in); !slices.Equal(got, c.want) {
			t.Errorf("%q gives %q, want %q", c.in, got, c.want)
		}
	}
}

func TestDisks(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, lower, upper string
		serials            map[string]string
	}{
		{"by serial, against the order", "vdc", "vda", map[string]string{"vda": "iii-upper\n", "vdb": "other", "vdc": "iii-lower"}},
		{"by order, with serials of the VMM's own", "vda", "vdb", map[string]string{"vda": "17", "vdb": "18"}},
		{"by order, without serials", "vda", "vdb", map[string]string{"vda": "", "vdb": ""}},
		{"one is missing", "vda", "", map[string]string{"vda": "iii-lower"}},
		{"still to come", "", "", map[string]string{"vda": "17"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			for disk, serial := range c.serials {
				if err := os.Mkdir(filepath.Join(dir, disk), 0o755); err != nil {
					t.Fatal(err)
				}
				if serial != "" {
					if err := os.WriteFile(filepath.Join(dir, disk, "serial"), []byte(serial), 0o600); err != nil {
						t.Fatal(err)
					}
				}
			}
			if lower, upper := matchDisks(dir); lower != c.lower || upper != c.upper {
				t.Errorf("lower %q, upper %q, want %q, %q", lower, upper, c.lower, c.upper)
			}
		})
	}
}

func TestFindPort(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for device, name := range map[string]string{"vport2p1": "iii.agent\n", "vport2p2": "iii.env\n"} {
		if err := os.Mkdir(filepath.Join(dir, device), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, device, "name"), []byte(name), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]string{"iii.env": "vport2p2", "iii.agent": "vport2p1", "iii": ""} {
		if got := findPort(dir, name); got != want {
			t.Errorf("port %s is %q, want %q", name, got, want)
		}
	}
}

func TestWriteEtc(t *testing.T) {
	t.Parallel()
	const own = "127.0.1.1\tbox\n"
	const local = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
	for _, c := range []struct {
		name string
		make func(etc string) error
		want string
	}{
		{"nothing", func(string) error { return nil }, local + own},
		{"empty file", func(etc string) error { return os.WriteFile(etc+"/hosts", nil, 0o600) }, local + own},
		{"complete file", func(etc string) error {
			return os.WriteFile(etc+"/hosts", []byte("10.0.0.1 localhost box # x"), 0o600)
		}, "10.0.0.1 localhost box # x"},
		{"names in a comment", func(etc string) error {
			return os.WriteFile(etc+"/hosts", []byte("# localhost\n1.2.3.4 a # box"), 0o600)
		}, "# localhost\n1.2.3.4 a # box\n" + local + own},
		{"links to nothing", func(etc string) error {
			for _, name := range []string{"hosts", "hostname", "resolv.conf"} {
				if err := os.Symlink("../run/none/"+name, filepath.Join(etc, name)); err != nil {
					return err
				}
			}
			return nil
		}, local + own},
		{"link to a file", func(etc string) error {
			if err := os.WriteFile(etc+"/real", []byte("1.2.3.4 localhost\n"), 0o600); err != nil {
				return err
			}
			return os.Symlink("real", etc+"/hosts")
		}, "1.2.3.4 localhost\n" + own},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			etc := t.TempDir()
			if err := c.make(etc); err != nil {
				t.Fatal(err)
			}
			for range 2 { // a persistent disk boots again and again
				if err := writeEtc(etc, &bootspec.Guest{Hostname: "box"}); err != nil {
					t.Fatal(err)
				}
			}
			for name, want := range map[string]string{"hosts": c.want, "hostname": "box\n"} {
				if got, err := os.ReadFile(filepath.Join(etc, name)); err != nil || string(got) != want {
					t.Errorf("%s is %q, %v, want %q", name, got, err, want)
				}
			}
			if _, err := os.ReadFile(etc + "/resolv.conf"); err != nil {
				t.Error(err)
			}
		})
	}
	t.Run("hostile hosts", func(t *testing.T) {
		t.Parallel()
		etc := t.TempDir()
		if err := unix.Mkfifo(etc+"/hosts", 0o600); err != nil {
			t.Fatal(err)
		}
		if err := writeEtc(etc, &bootspec.Guest{Hostname: "box"}); err == nil || !strings.Contains(err.Error(), "left alone") {
			t.Errorf("a fifo as hosts file: %v", err)
		}
	})
}

func TestModulesWithoutOrder(t *testing.T) {
	t.Parallel()
	if none, err := findModules(filepath.Join(t.TempDir(), "none")); err != nil || len(none.order) > 0 {
		t.Errorf("a kernel without modules: %v, %v", none, err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "order"), []byte("lost.ko\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	lost, err := findModules(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := lost.load(aboutEveryVM); err == nil || !strings.Contains(err.Error(), "lost.ko") {
		t.Errorf("a module that is not there: %v, want an error that names it", err)
	}
	if err := lost.load(aboutThisVM); err != nil {
		t.Errorf("a module that is not wanted: %v", err)
	}
}

func TestUseless_ModulesWithoutTheirDevice(t *testing.T) {
	t.Parallel()
	touch := func(sys, path, content string) {
		t.Helper()
		file := filepath.Join(sys, path)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	microvm, q35, networked := t.TempDir(), t.TempDir(), t.TempDir()
	touch(microvm, "bus/virtio/devices/virtio0/device", "0x0002\n")
	touch(q35, "bus/pci/devices/0000:00:00.0/vendor", "0x8086\n")
	touch(networked, "bus/virtio/devices/virtio0/device", "0x0002\n")
	touch(networked, "bus/virtio/devices/virtio1/device", "0x0001\n")
	for _, test := range []struct {
		file, sys string
		want      bool
	}{
		{"virtio_pci.ko", microvm, true},
		{"virtio_pci_modern_dev.ko", microvm, true},
		{"virtio_mmio.ko", microvm, false},
		{"virtio_pci.ko", q35, false},
		{"virtio_mmio.ko", q35, true},
		{"virtio_net.ko", microvm, true},
		{"net_failover.ko", networked, false},
		{"virtio_net.ko", networked, false},
		{"virtio_blk.ko", microvm, false},
		{"erofs.ko", q35, false},
	} {
		if got := newMachine(test.sys).useless(strings.TrimSuffix(test.file, ".ko")); got != test.want {
			t.Errorf("%s: %v, want %v", test.file, got, test.want)
		}
	}
}
