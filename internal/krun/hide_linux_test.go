//go:build cgo

package krun_test

import (
	"errors"
	"os/exec"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// startHidden starts cmd where /dev/kvm is unusable: with another file in its
// place, that of another user ("others"), or gone; as it is for an empty hide.
func startHidden(cmd *exec.Cmd, hide string) error {
	if hide == "" {
		return cmd.Start()
	}
	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread's mounts go with it
		if err := hideKVM(hide); err != nil {
			started <- err
			return
		}
		started <- cmd.Start()
	}()
	return <-started
}

// hideKVM changes what the calling thread sees.
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
	if err := unix.Mount("tmpfs", "/dev", "tmpfs", 0, "mode=0755"); err != nil || instead != "others" {
		return err
	}
	const misc, kvm = 10, 232 // the device's number
	if err := unix.Mknod("/dev/kvm", unix.S_IFCHR|0o600, int(unix.Mkdev(misc, kvm))); err != nil {
		return err
	}
	const nobody = 65534
	return errors.Join(
		unix.Chown("/dev/kvm", nobody, nobody),
		// For what is started from here, so that root has no rights of its own.
		unix.Prctl(unix.PR_CAPBSET_DROP, unix.CAP_DAC_OVERRIDE, 0, 0, 0),
	)
}
