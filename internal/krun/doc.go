// Package krun runs libkrun, which makes its process one virtual machine. The
// library is loaded at run time: no header and no library is needed to build, and
// what a version does not have is found out by asking.
//
// It binds ABI 1 (libkrun.so.1, libkrun.1.dylib) from version 1.17 on, and is
// the only package of this project with cgo. libkrun ends its process with the VM,
// aborts it on what it does not like, and installs signal handlers that a Go
// program does not survive: so a VM has a process of its own, and that one is
// written in C (child.c), which knows nothing but to make calls. Which calls is
// said in Go, by a [Sequence]. Without cgo there is no child.
//
// libkrun aborts (SIGABRT) on much of what it does not like, and answers most of
// the rest with EINVAL when the VM is started: check before what can be checked.
package krun

// Feature is a capability that a build of libkrun has or lacks, as
// krun_has_feature counts them.
type Feature uint64

// The features that matter here. A symbol may be there without its feature.
const (
	FeatureNet Feature = 0 // virtio-net devices
	FeatureBlk Feature = 1 // disks
)

// LogLevel is how much libkrun says on its log.
type LogLevel uint32

// The levels of libkrun's log.
const (
	LogOff LogLevel = iota
	LogError
	LogWarn
	LogInfo
	LogDebug
	LogTrace
)

// DiskFormat is how a disk image is laid out.
type DiskFormat uint32

// Raw is the only format for images that a guest writes: the header of another
// one may name any file of the host.
const Raw DiskFormat = 0

// SyncMode says what a guest's flush of a disk does on the host.
type SyncMode uint32

// The modes of a disk.
const (
	SyncNone    SyncMode = 0 // nothing: the image may be lost with the host
	SyncRelaxed SyncMode = 1 // written out, the drive's cache is left alone (on Linux as SyncFull)
	SyncFull    SyncMode = 2 // on the drive
)

// VsockPlain makes a vsock device that does not also lend the host's sockets to
// the guest (TSI).
const VsockPlain = 0

// NoFile stands for the side of a console or port that is not connected.
const NoFile = -1
