package libkrun

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// KVM_GET_API_VERSION and its answer since Linux 2.6.22 (linux/kvm.h).
const (
	kvmGetAPIVersion = 0xAE00
	kvmAPIVersion    = 12
)

// checkKVM asks the device whether it is KVM.
func checkKVM(fd int, path string) error {
	version, err := unix.IoctlRetInt(fd, kvmGetAPIVersion)
	if err == nil && version != kvmAPIVersion {
		err = fmt.Errorf("version %d", version)
	}
	if err != nil {
		return fmt.Errorf("%s is not the KVM device (%w): check what was put in its place; --vmm qemu does without", path, err)
	}
	return nil
}
