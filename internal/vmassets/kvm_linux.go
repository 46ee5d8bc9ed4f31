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
	if errors.Is(err, fs.ErrNotExist) {
		return withoutDevice(device, cpuinfo, arch)
	}
	if err == nil {
		err = unix.Close(fd)
	}
	// Before the device's permissions: getting them would be of no use.
	if arch == "amd64" {
		module, err := kvmModule(cpuinfo)
		if err != nil {
			return err
		}
		if module == "" {
			return advise("choose a machine with nested virtualization", "%s is there, but the processor shows neither vmx nor svm, so this host lets no guest of it use it", device)
		}
	}
	switch {
	case errors.Is(err, fs.ErrPermission):
		return advise("add the user to group kvm and log in again (usermod -aG kvm USER)", "no permission: %s is there but may not be opened by this user", device)
	case err != nil:
		return fmt.Errorf("open %s: %w", device, err)
	}
	return nil
}

// withoutDevice tells a driver that is not loaded from a processor that could not
// serve it.
func withoutDevice(device, cpuinfo, arch string) error {
	module, err := kvmModule(cpuinfo)
	if arch != "amd64" || err != nil {
		return advise("turn virtualization on in the settings of the machine; in a container, pass the device in", "%s is missing", device)
	}
	if module == "" {
		return advise("turn virtualization on in the firmware, or nested virtualization in the settings of the cloud or WSL machine",
			"the processor shows neither vmx nor svm, and %s is missing", device)
	}
	return advise("load it (modprobe "+module+"); in a container, pass the device in", "not loaded: the processor has hardware virtualization, but %s is missing", device)
}

// kvmModule is the kernel module for this x86-64 processor; empty where it shows
// no hardware virtualization.
func kvmModule(cpuinfo string) (string, error) {
	info, err := os.ReadFile(cpuinfo)
	if err != nil {
		return "", err
	}
	flags := cpuFlags(string(info))
	switch {
	case slices.Contains(flags, "vmx"):
		return "kvm_intel", nil
	case slices.Contains(flags, "svm"):
		return "kvm_amd", nil
	}
	return "", nil
}
