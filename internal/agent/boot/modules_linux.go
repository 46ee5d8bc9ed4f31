package boot

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// loadModules loads the modules that dir/order names, one file name a line, in
// that order, and removes dir, which only takes memory. Without dir/order there
// is nothing to do.
func loadModules(dir string) error {
	order, err := os.ReadFile(filepath.Join(dir, "order"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("kernel modules: %w", err)
	}
	for _, name := range strings.Fields(string(order)) {
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
