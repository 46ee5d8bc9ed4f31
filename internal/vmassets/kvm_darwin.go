package vmassets

import (
	"errors"
	"runtime"

	"golang.org/x/sys/unix"
)

// HardwareVirtualization returns nil where libkrun can run VMs on this host's
// processor, else an error that says what is in the way. Whether the shim has
// the entitlement to use it is not looked at here.
func HardwareVirtualization() error {
	if runtime.GOARCH != "arm64" {
		return errors.New("only Macs with Apple silicon are supported")
	}
	if on, err := unix.SysctlUint32("kern.hv_support"); err != nil || on == 0 {
		return advise("in a virtual machine, turn on nested virtualization", "the Hypervisor framework is not available (kern.hv_support is not 1)")
	}
	return nil
}
