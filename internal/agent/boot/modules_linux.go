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

// loadModules loads the modules that dir/order names, one file name a line, in
// that order, but for drivers of devices that this machine has not. It tells
// whether there are any: without dir/order there are none.
func loadModules(dir string) (bool, error) {
	order, err := os.ReadFile(filepath.Join(dir, "order"))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("kernel modules: %w", err)
	}
	machine := newMachine("/sys")
	for _, name := range strings.Fields(string(order)) {
		if machine.useless(name) {
			continue
		}
		if err := loadModule(filepath.Join(dir, name)); err != nil {
			return false, fmt.Errorf("kernel module %s: %w: do the modules belong to this kernel?", name, err)
		}
	}
	return true, nil
}

// FreeModules frees the memory that the loaded modules' files take: they lie
// below the old root. It may wait until the guest has nothing better to do.
// Failing is no harm.
func (g *Guest) FreeModules() {
	if !g.modules {
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

func (m machine) useless(file string) bool {
	switch strings.TrimSuffix(file, ".ko") {
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
