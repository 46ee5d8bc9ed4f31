//go:build cgo

package krun_test

import (
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// hideKVM makes /dev/kvm unusable for this process: with another file in its
// place, as another user ("others"), or gone.
func hideKVM(instead string) error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return err
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	if strings.HasPrefix(instead, "/") {
		return unix.Mount(instead, "/dev/kvm", "", unix.MS_BIND, "")
	}
	if err := unix.Mount("tmpfs", "/dev", "tmpfs", 0, "mode=0755"); err != nil || instead == "" {
		return err
	}
	const misc, kvm, nobody = 10, 232, 65534 // the device's number
	if err := unix.Mknod("/dev/kvm", unix.S_IFCHR|0o600, int(unix.Mkdev(misc, kvm))); err != nil {
		return err
	}
	return syscall.Setresuid(nobody, nobody, nobody)
}
