package boot

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// modulesDir is where the initramfs has the modules, relative to its root.
const modulesDir = "modules"

// modules are the files of a directory, in the order in which they are loaded.
type modules struct {
	dir   string
	order []string
}

// findModules reads dir/order, which has one file name a line. Without it there
// are no modules.
func findModules(dir string) (modules, error) {
	order, err := os.ReadFile(filepath.Join(dir, "order"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return modules{}, fmt.Errorf("kernel modules: %w", err)
	}
	return modules{dir: dir, order: strings.Fields(string(order))}, nil
}

// load loads those that wanted picks, but for drivers of devices that this
// machine has not.
func (m modules) load(wanted func(name string) bool) error {
	machine := newMachine("/sys")
	for _, file := range m.order {
		name := strings.TrimSuffix(file, ".ko")
		if !wanted(name) || machine.useless(name) {
			continue
		}
		if err := loadModule(filepath.Join(m.dir, file)); err != nil {
			return fmt.Errorf("kernel module %s: %w: do the modules belong to this kernel?", file, err)
		}
	}
	return nil
}

// aboutThisVM picks the drivers that look at their device when they are loaded,
// and so find what only this VM has: its disks and its network. The others see
// the same in every VM; see Boot.
func aboutThisVM(name string) bool {
	switch name {
	case "virtio_blk", "failover", "net_failover", "virtio_net", "af_packet":
		return true
	}
	return false
}

func aboutEveryVM(name string) bool { return !aboutThisVM(name) }

// FreeModules frees the memory that the loaded modules' files take: they lie
// below the old root. It may wait until the guest has nothing better to do.
// Failing is no harm.
func (g *Guest) FreeModules() {
	if len(g.modules.order) == 0 {
		return
	}
	root, err := os.OpenRoot(fmt.Sprintf("/proc/self/fd/%d", g.old.Fd()))
	if err != nil {
		return
	}
	defer root.Close() //nolint:errcheck // only a directory
	_ = root.RemoveAll(modulesDir)
}

func loadModule(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close() //nolint:errcheck // only read
	err = unix.FinitModule(int(f.Fd()), "", 0)
	if errors.Is(err, unix.EEXIST) {
		return nil
	}
	return err
}

// networkDevice is the id of network devices on the virtio bus (virtio 1.2, 5).
const networkDevice = "0x0001"

// machine tells which modules drive nothing here: of the two transports a
// machine has one, and only some have a network. Each module left out saves some
// 5 ms of an emulated CPU.
type machine struct {
	// pci and network look for a device of that kind, once. Modules of the network
	// come last in the order, when the bus knows its devices.
	pci, network func() bool
}

func newMachine(sys string) machine {
	return machine{
		pci:     sync.OnceValue(func() bool { return len(entries(filepath.Join(sys, "bus/pci/devices"))) > 0 }),
		network: sync.OnceValue(func() bool { return hasNetwork(filepath.Join(sys, "bus/virtio/devices")) }),
	}
}

func (m machine) useless(name string) bool {
	switch name {
	case "virtio_pci", "virtio_pci_modern_dev", "virtio_pci_legacy_dev":
		return !m.pci()
	case "virtio_mmio":
		return m.pci()
	case "failover", "net_failover", "virtio_net", "af_packet":
		return !m.network()
	default:
		return false
	}
}

func hasNetwork(devices string) bool {
	return slices.ContainsFunc(entries(devices), func(name string) bool {
		id, err := os.ReadFile(filepath.Join(devices, name, "device"))
		return err == nil && strings.TrimSpace(string(id)) == networkDevice
	})
}

// entries are the names in a directory, none where there is none. They are not
// looked at, as os.ReadDir and filepath.Glob would.
func entries(dir string) []string {
	d, err := os.Open(dir)
	if err != nil {
		return nil
	}
	defer d.Close() //nolint:errcheck // only read
	names, _ := d.Readdirnames(-1)
	return names
}
