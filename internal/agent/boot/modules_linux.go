package boot

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// loadModules loads the modules that dir/order names, one file name a line, in
// that order, but for drivers of devices that this machine has not, and removes
// dir, which only takes memory. Without dir/order there is nothing to do.
func loadModules(dir string) error {
	order, err := os.ReadFile(filepath.Join(dir, "order"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("kernel modules: %w", err)
	}
	for _, name := range strings.Fields(string(order)) {
		if useless(name, "/sys") {
			continue
		}
		if err := loadModule(filepath.Join(dir, name)); err != nil {
			return fmt.Errorf("kernel module %s: %w: do the modules belong to this kernel?", name, err)
		}
	}
	// Best effort, for the memory alone.
	_ = os.RemoveAll(dir)
	return nil
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

// useless reports whether a module drives nothing here: of the two transports a
// machine has one, and only some have a network. Each module left out saves some
// 5 ms of an emulated CPU. Modules of the network come last in the order, when
// the bus knows its devices.
func useless(file, sys string) bool {
	switch strings.TrimSuffix(file, ".ko") {
	case "virtio_pci", "virtio_pci_modern_dev", "virtio_pci_legacy_dev":
		return !anyIn(filepath.Join(sys, "bus/pci/devices/*"), nil)
	case "virtio_mmio":
		return anyIn(filepath.Join(sys, "bus/pci/devices/*"), nil)
	case "failover", "net_failover", "virtio_net", "af_packet":
		return !anyIn(filepath.Join(sys, "bus/virtio/devices/*/device"), func(path string) bool {
			id, err := os.ReadFile(path)
			return err == nil && strings.TrimSpace(string(id)) == networkDevice
		})
	default:
		return false
	}
}

// anyIn reports whether any path that matches pattern passes test, which may be
// nil.
func anyIn(pattern string, test func(path string) bool) bool {
	paths, _ := filepath.Glob(pattern)
	return slices.ContainsFunc(paths, func(path string) bool { return test == nil || test(path) })
}
