// Package vmassets gets, makes and finds what a VMM needs on disk beside the
// image: a kernel that QEMU can enter directly, the kernel's modules, the
// initramfs with the guest agent, libkrun with its kernel, empty file systems for
// the writable disk, the host's TSC rate, and the programs themselves.
//
// Everything it makes lies under one directory (layout.Roots.VMM) and can be
// made again:
//
//	kernels/lock            flocked while a kernel is added or removed
//	kernels/current         the name of the kernel in use
//	kernels/<name>/         vmlinux, modules/*.ko, modules/order, kernel.json
//	initramfs/lock          flocked while an archive is added or removed
//	initramfs/<name>.cpio   agent and modules
//	initramfs/<key>.ref     names the archive for one agent file
//	libkrun/lock            flocked while the libraries are added
//	libkrun/<name>/         libkrun, libkrunfw, their licences
//	tsc.json                the TSC rate, valid for one boot of the host
//
// A directory or archive appears under its name by one rename and never
// changes after it, so a process killed at any point leaves nothing that
// counts; what is left under a temporary name is removed by the next one that
// holds the lock.
package vmassets

import "fmt"

// advice is an error together with what a person can do about it.
type advice struct {
	err error
	fix string
}

// advise makes an advice of a fix and what is wrong.
func advise(fix, format string, args ...any) error {
	return &advice{err: fmt.Errorf(format, args...), fix: fix}
}

func (a *advice) Error() string { return a.err.Error() + ": " + a.fix }

func (a *advice) Unwrap() error { return a.err }
