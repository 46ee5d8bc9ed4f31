package libkrun

import (
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
)

const (
	// maxCPUs is what the kernels of libkrunfw are built for: more are ignored.
	maxCPUs = 16
	// sector is the unit of a disk, in bytes: the rest behind the last whole one
	// is out of the guest's reach.
	sector = 512
)

// Check implements shim.Hypervisor. libkrun answers most mistakes with EINVAL or
// by aborting, so everything is looked at before.
func (h Hypervisor) Check(spec *bootspec.Spec) error {
	k := spec.Libkrun
	if k == nil {
		return bootspec.End{Class: bootspec.EndBadSpec, Message: "vmm is libkrun but the libkrun part is missing"}
	}
	var errs []error
	if spec.CPUs > maxCPUs {
		errs = append(errs, fmt.Errorf("cpus is %d: libkrun's kernel uses %d at most", spec.CPUs, maxCPUs))
	}
	for _, d := range []struct{ name, path string }{{"lower", spec.Lower.Path}, {"upper", spec.Upper.Path}} {
		if info, err := os.Stat(d.path); err == nil && info.Size()%sector != 0 {
			errs = append(errs, fmt.Errorf("%s: the size of %s is not a multiple of %d bytes", d.name, d.path, sector))
		}
	}
	for _, f := range []struct{ name, path, fix string }{
		{"libkrun.library", k.Library, "run `adapter vmm setup --libkrun`, or name libkrun with III_LIBKRUN_PATH"},
		{"libkrun.firmware", k.Firmware, "install libkrunfw beside libkrun, or run `adapter vmm setup --libkrun`"},
	} {
		if err := checkLibrary(f.path); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w: %s", f.name, err, f.fix))
		}
	}
	if err := checkAgent(filepath.Join(k.Root, AgentFile)); err != nil {
		errs = append(errs, fmt.Errorf("libkrun.root: %w", err))
	}
	if _, err := linkAddress(spec.Dir); err != nil {
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return bootspec.End{Class: bootspec.EndBadSpec, Message: strings.ReplaceAll(err.Error(), "\n", "; ")}
	}
	return h.checkDevice()
}

// checkLibrary looks for what the loader would refuse with fewer words.
func checkLibrary(path string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	info, err := file.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return fmt.Errorf("%s is not a regular file", path)
	}
	if runtime.GOOS != "linux" {
		return nil
	}
	image, err := elf.NewFile(file)
	if err != nil || image.Type != elf.ET_DYN {
		return fmt.Errorf("%s is not a shared library", path)
	}
	machines := map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}
	if image.Machine != machines[runtime.GOARCH] {
		return fmt.Errorf("%s is for %v, not for this host", path, image.Machine)
	}
	return nil
}

// checkAgent looks for what the guest's kernel could not start: the host would
// see nothing but a guest that ends.
func checkAgent(path string) error {
	info, err := os.Lstat(path)
	if err != nil {
		return fmt.Errorf("%w: it must be a directory with the guest agent", err)
	}
	if !info.Mode().IsRegular() || info.Mode().Perm()&0o111 == 0 {
		return fmt.Errorf("%s is not an executable file", path)
	}
	return nil
}

// checkDevice tells whether /dev/kvm can be used.
func (h Hypervisor) checkDevice() error {
	if runtime.GOOS != "linux" {
		return nil // libkrun answers with EINVAL, which says what is known
	}
	path := h.Device
	if path == "" {
		path = "/dev/kvm"
	}
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%s is missing: there is no hardware virtualization here, or its module is not loaded (see adapter doctor); --vmm qemu does without", path)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%s may not be opened by this user: add it to group kvm and log in again; --vmm qemu does without", path)
	case err != nil:
		return fmt.Errorf("open %s: %w: --vmm qemu does without", path, err)
	}
	defer func() { _ = unix.Close(fd) }()
	return checkKVM(fd, path)
}
