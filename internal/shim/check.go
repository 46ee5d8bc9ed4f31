package shim

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/agentlink"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
)

// checkSpec names every fault of the spec, also those that only this host can
// tell, and returns the guest's part as the env frame carries it.
func checkSpec(spec *bootspec.Spec) (env []byte, err error) {
	// The rest is of no use where even the paths are wrong.
	if err := spec.Validate(); err != nil {
		return nil, err
	}
	var errs []error
	if !layout.ValidID(spec.ID) {
		errs = append(errs, fmt.Errorf("id %q is not 1 to 64 of a-z, 0-9 and '-'", spec.ID))
	}
	errs = append(errs, layout.Machine{Dir: spec.Dir, Socket: spec.Socket}.CheckSocket(), checkDir(spec.Dir))
	if !spec.Lower.ReadOnly {
		errs = append(errs, errors.New("lower.read_only must be true: an image may serve many VMs"))
	}
	if spec.Upper.ReadOnly {
		errs = append(errs, errors.New("upper.read_only must be false: it is what the guest writes to"))
	}
	errs = append(errs, checkDisk("lower", spec.Lower), checkDisk("upper", spec.Upper))
	env, encodeErr := json.Marshal(spec.Guest)
	if encodeErr == nil && len(env) > agentlink.MaxEnv {
		encodeErr = fmt.Errorf("guest: the environment has %d bytes as JSON, more than %d", len(env), agentlink.MaxEnv)
	}
	return env, errors.Join(append(errs, encodeErr)...)
}

func checkDir(dir string) error {
	if !filepath.IsAbs(dir) {
		return fmt.Errorf("dir: %q is not an absolute path", dir)
	}
	info, err := os.Lstat(dir)
	if err != nil {
		return fmt.Errorf("dir: %w: create it with mode 0700", err)
	}
	if !info.IsDir() {
		return fmt.Errorf("dir: %s is not a directory", dir)
	}
	return nil
}

// checkDisk opens the image as the VMM will.
func checkDisk(name string, disk bootspec.Disk) error {
	mode := os.O_RDWR
	if disk.ReadOnly {
		mode = os.O_RDONLY
	}
	// O_NONBLOCK: a fifo must be refused, not waited for.
	file, err := os.OpenFile(disk.Path, mode|unix.O_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	defer func() { _ = file.Close() }()
	info, err := file.Stat()
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if !info.Mode().IsRegular() {
		return fmt.Errorf("%s: %s is not a regular file", name, disk.Path)
	}
	if info.Size() == 0 {
		return fmt.Errorf("%s: %s is empty", name, disk.Path)
	}
	return nil
}
