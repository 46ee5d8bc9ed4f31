// Package vmassets gets, makes and finds what a VMM needs on disk beside the
// image: a kernel that QEMU can enter directly, the kernel's modules, the
// initramfs with the guest agent, empty file systems for the writable disk, the
// host's TSC rate, and the programs themselves.
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
//	tsc.json                the TSC rate, valid for one boot of the host
//
// A kernel directory or archive appears under its name by one rename and never
// changes after it, so a process killed at any point leaves nothing that
// counts; what is left under a temporary name is removed by the next one that
// holds the lock.
package vmassets

import (
	"context"
	"errors"
	"io"
	"log/slog"
)

// ErrNoKernel is what Find's error wraps when this host has no guest kernel
// yet. Its text names the cure.
var ErrNoKernel = errors.New("no guest kernel: run `adapter vmm setup`, or set III_VM_KERNEL to a vmlinuz or vmlinux")

// Kernel is a guest kernel on disk. It is immutable and may be shared.
type Kernel struct {
	// Image is the absolute path of what QEMU's -kernel takes.
	Image string
	// Direct tells that Image is uncompressed and entered directly. It is
	// false for a bzImage that could not be unpacked or has no PVH entry: it
	// boots too, about half a second slower under emulation.
	Direct bool
	// Release is what uname -r says in the guest.
	Release string
	// Version is the version of the package it came from, or "own" for a
	// kernel named by III_VM_KERNEL.
	Version string
	// Arch is the GOARCH it runs on.
	Arch string
	// Modules are the file names of the modules in load order.
	Modules []string

	root string // the directory of all assets
	dir  string // the directory of this kernel
}

// Options say how to set up a kernel.
type Options struct {
	// Dir is layout.Roots.VMM(). It is created when missing.
	Dir string
	// Log gets what was decided; nil is not allowed.
	Log *slog.Logger
	// Progress gets one line per step for a person; nil is silent.
	Progress io.Writer
	// Getenv looks up III_VM_KERNEL, III_VM_MODULES and what the package client
	// needs (PATH, HOME, proxies); usually os.Getenv.
	Getenv func(string) string
	// Update asks the package lists for a newer kernel even when one is there.
	Update bool
}

// Setup makes sure that this host has a guest kernel and returns it. With one
// there already it touches neither network nor package lists, unless o.Update.
//
// With III_VM_KERNEL set it unpacks that kernel. Otherwise it fetches Debian's
// linux-image-cloud-<arch> with apt-get download, which needs no root and
// installs nothing; apt checks the package against its signed index. Concurrent
// calls, also of other processes, do the work once. ctx ends it at any point.
func Setup(ctx context.Context, o Options) (*Kernel, error) {
	return nil, ErrNoKernel
}

// Find returns the kernel that Setup made, in a millisecond or so. dir is
// layout.Roots.VMM(). With III_VM_KERNEL set it is that kernel, unpacked now if
// it was not yet or has changed. The error wraps ErrNoKernel where Setup is the
// cure.
func Find(dir string, getenv func(string) string) (*Kernel, error) {
	return nil, ErrNoKernel
}

// Initramfs returns the path of an uncompressed newc archive with the agent as
// /init, the kernel's modules as /modules/<name>.ko and their names, one a
// line in load order, in /modules/order; also /dev/console and the empty
// directories dev, proc and sys. agentPath must be a static executable of the
// kernel's architecture.
//
// It is built at the first call for an agent's content and found again by the
// file's identity (a millisecond). The file stays for at least an hour after
// the latest call that returned it.
func (k *Kernel) Initramfs(ctx context.Context, agentPath string) (string, error) {
	return "", errors.ErrUnsupported
}

// UpperKind selects the template of a writable disk.
type UpperKind int

// The kinds of writable disks.
const (
	// Ephemeral is ext4 without journal and checksums: fastest, lost with the
	// VM, not to be mounted again after a crash.
	Ephemeral UpperKind = iota
	// Durable is ext4 with journal and checksums: it survives a killed VM.
	Durable
)

// UpperSize is the size that every writable disk shows to the guest, in bytes.
// The file is sparse: it starts at some 200 KiB on the host.
const UpperSize = 16 << 30

// CreateUpper makes a new, empty ext4 file system at path, mode 0600. It takes
// a few milliseconds. An existing path is an error and stays as it is; the file
// appears complete or not at all, and a durable one is on the disk on return.
func CreateUpper(path string, kind UpperKind) error {
	return errors.ErrUnsupported
}

// TSCKHz returns the rate of the host's time-stamp counter in kHz, which QEMU's
// microvm machine needs under emulation. dir is layout.Roots.VMM(). It returns
// an error wherever the rate is in any doubt: then use another machine.
func TSCKHz(dir string) (int, error) {
	return 0, errors.ErrUnsupported
}

// FindAgent returns the absolute path of the guest agent: III_GUEST_AGENT, else
// guest-agent beside the running program. The error lists what was tried.
func FindAgent(getenv func(string) string) (string, error) {
	return "", errors.ErrUnsupported
}

// FindQEMU returns the absolute path of the emulator for a GOARCH: III_QEMU,
// else qemu-system-* beside the running program, else in PATH. The error lists
// what was tried and names the package to install.
func FindQEMU(getenv func(string) string, arch string) (string, error) {
	return "", errors.ErrUnsupported
}

// Finding is the outcome of one check of this host.
type Finding struct {
	// Name says what was checked.
	Name string
	// OK is false where nothing can boot before the fix is done.
	OK bool
	// Finding is what was seen, Fix what to do about it; Fix may be empty.
	Finding, Fix string
}
