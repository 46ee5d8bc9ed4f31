package vmassets

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"slices"

	"golang.org/x/sys/unix"
)

// HardwareVirtualization returns nil where libkrun can run VMs on this host's
// processor, else an error that says what is in the way and what to do. VMs
// then run under emulation. Some hosts offer a /dev/kvm that cannot run stock
// kernels; on x86-64 these lack the processor's flag.
func HardwareVirtualization() error {
	return kvmUsable("/dev/kvm", "/proc/cpuinfo", runtime.GOARCH)
}

func kvmUsable(device, cpuinfo, arch string) error {
	fd, err := unix.Open(device, unix.O_RDWR|unix.O_CLOEXEC, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return advise("load kvm_intel or kvm_amd, turn virtualization on in the firmware, or nested virtualization in the settings of the cloud or WSL machine; in a container, pass the device in",
			"%s is missing", device)
	case errors.Is(err, fs.ErrPermission):
		return advise("add the user to group kvm and log in again", "%s may not be opened by this user", device)
	case err != nil:
		return fmt.Errorf("open %s: %w", device, err)
	}
	if err := unix.Close(fd); err != nil {
		return err
	}
	if arch != "amd64" {
		return nil
	}
	info, err := os.ReadFile(cpuinfo)
	if err != nil {
		return err
	}
	flags := cpuFlags(string(info))
	if !slices.Contains(flags, "vmx") && !slices.Contains(flags, "svm") {
		return advise("choose a machine with nested virtualization", "%s is there, but the processor shows neither vmx nor svm: this host lets no guest of it use hardware virtualization", device)
	}
	return nil
}
