//go:build cgo && (linux || darwin)

package krun

// #include "api.h"
import "C"

import "unsafe"

// Context is the configuration of one VM. Strings are copied by each call; file
// descriptors are used when the VM starts and must stay open and unchanged until
// then. Devices get their numbers in the guest in the order of the calls; on
// x86-64 there can be 11 of them. Methods are not for concurrent use. Their
// errors are *Error.
type Context struct {
	api *C.struct_api
	id  C.uint32_t
}

// Free drops the configuration. Not after StartEnter.
func (c *Context) Free() error {
	return check("krun_free_ctx", C.call_free_ctx(c.api, c.id))
}

// SetVMConfig sets the number of virtual CPUs (the kernel of libkrunfw uses 16
// at most) and the memory in MiB. Memory that does not hold the kernel, about
// 40 MiB, makes StartEnter abort.
func (c *Context) SetVMConfig(cpus uint8, memoryMiB uint32) error {
	return check("krun_set_vm_config", C.call_set_vm_config(c.api, c.id, C.uint8_t(cpus), C.uint32_t(memoryMiB)))
}

// SetNestedVirt lets the guest run VMs; see Library.CanNest.
func (c *Context) SetNestedVirt(on bool) error {
	return check("krun_set_nested_virt", C.call_set_nested_virt(c.api, c.id, C.bool(on)))
}

// SetRoot makes a directory of the host the guest's root. The guest may change
// what is in it. A missing directory is no error here or at the start: the guest
// fails to boot.
func (c *Context) SetRoot(dir string) error {
	cdir := C.CString(dir)
	defer C.free(unsafe.Pointer(cdir))
	return check("krun_set_root", C.call_set_root(c.api, c.id, cdir))
}

// AddVirtiofs3 shares a directory under a tag; window is the size in bytes of
// the region for direct access. Since libkrun 1.18, else ENOSYS.
func (c *Context) AddVirtiofs3(tag, dir string, window uint64, readOnly bool) error {
	ctag, cdir := C.CString(tag), C.CString(dir)
	defer C.free(unsafe.Pointer(ctag))
	defer C.free(unsafe.Pointer(cdir))
	return check("krun_add_virtiofs3", C.call_add_virtiofs3(c.api, c.id, ctag, cdir, C.uint64_t(window), C.bool(readOnly)))
}

// AddDisk2 adds a disk whose guest's flushes reach the drive (Linux) or the
// host's cache (macOS). id is at most 20 bytes; the file is opened when the VM
// starts.
func (c *Context) AddDisk2(id, file string, format DiskFormat, readOnly bool) error {
	cid, cfile := C.CString(id), C.CString(file)
	defer C.free(unsafe.Pointer(cid))
	defer C.free(unsafe.Pointer(cfile))
	return check("krun_add_disk2", C.call_add_disk2(c.api, c.id, cid, cfile, C.uint32_t(format), C.bool(readOnly)))
}

// AddDisk3 is AddDisk2 with a choice of what a flush does, and of going around
// the host's cache, for which the image has to be aligned. Since 1.17, and only
// with FeatureBlk; else ENOSYS.
func (c *Context) AddDisk3(id, file string, format DiskFormat, readOnly, direct bool, sync SyncMode) error {
	cid, cfile := C.CString(id), C.CString(file)
	defer C.free(unsafe.Pointer(cid))
	defer C.free(unsafe.Pointer(cfile))
	return check("krun_add_disk3",
		C.call_add_disk3(c.api, c.id, cid, cfile, C.uint32_t(format), C.bool(readOnly), C.bool(direct), C.uint32_t(sync)))
}

// DisableImplicitConsole leaves out the console on this process's own standard
// files, which the guest would otherwise have.
func (c *Context) DisableImplicitConsole() error {
	return check("krun_disable_implicit_console", C.call_disable_implicit_console(c.api, c.id))
}

// AddVirtioConsoleDefault adds a console on file descriptors; NoFile for none.
// They are put into non-blocking mode. A bad one makes StartEnter abort.
func (c *Context) AddVirtioConsoleDefault(in, out, err int) error {
	return check("krun_add_virtio_console_default",
		C.call_add_virtio_console_default(c.api, c.id, C.int(in), C.int(out), C.int(err)))
}

// AddVirtioConsoleMultiport adds a console of named ports and returns its
// number. One that gets no port makes StartEnter abort.
func (c *Context) AddVirtioConsoleMultiport() (console uint32, err error) {
	n, err := value("krun_add_virtio_console_multiport", C.call_add_virtio_console_multiport(c.api, c.id))
	return uint32(n), err
}

// AddConsolePortInOut adds a port to a multiport console: in is what the guest
// reads, out what it writes to; NoFile for neither. They are put into
// non-blocking mode. A bad one makes StartEnter abort.
func (c *Context) AddConsolePortInOut(console uint32, name string, in, out int) error {
	cname := C.CString(name)
	defer C.free(unsafe.Pointer(cname))
	return check("krun_add_console_port_inout",
		C.call_add_console_port_inout(c.api, c.id, C.uint32_t(console), cname, C.int(in), C.int(out)))
}

// DisableImplicitVsock leaves out the vsock device that would lend the guest the
// host's network where the VM has no network device.
func (c *Context) DisableImplicitVsock() error {
	return check("krun_disable_implicit_vsock", C.call_disable_implicit_vsock(c.api, c.id))
}

// AddVsock adds the vsock device; see VsockPlain. The implicit one has to be
// left out before.
func (c *Context) AddVsock(flags uint32) error {
	return check("krun_add_vsock", C.call_add_vsock(c.api, c.id, C.uint32_t(flags)))
}

// AddVsockPort2 ties a vsock port to a unix socket. With listen, libkrun makes
// the socket and passes connections on to the guest; without, it connects to the
// socket when the guest dials the port of CID 2. A path that is too long (107
// bytes, 103 on macOS) is not refused, but does not work. A relative one counts
// from the working directory at the time of the connection.
func (c *Context) AddVsockPort2(port uint32, file string, listen bool) error {
	cfile := C.CString(file)
	defer C.free(unsafe.Pointer(cfile))
	return check("krun_add_vsock_port2", C.call_add_vsock_port2(c.api, c.id, C.uint32_t(port), cfile, C.bool(listen)))
}

// The protocol of a network device's socket.
const (
	// NetVFKit greets the peer of a datagram socket as gvproxy wants it.
	NetVFKit uint32 = 1 << 0
	// NetDHCP makes libkrun's init ask for an address, which costs 100 ms.
	NetDHCP uint32 = 1 << 1
)

// AddNetUnixStream adds a network device on a stream socket, each frame behind
// its length in four bytes: a path, or else an open file descriptor with an empty
// path. features are virtio-net's; 0 is understood by every peer. Needs
// FeatureNet, else ENOSYS or EINVAL.
func (c *Context) AddNetUnixStream(file string, fd int, mac [6]byte, features, flags uint32) error {
	cfile := optionalString(file)
	defer C.free(unsafe.Pointer(cfile))
	return check("krun_add_net_unixstream",
		C.call_add_net_unixstream(c.api, c.id, cfile, C.int(fd), (*C.uint8_t)(&mac[0]), C.uint32_t(features), C.uint32_t(flags)))
}

// AddNetUnixgram is AddNetUnixStream on a datagram socket, one frame each.
func (c *Context) AddNetUnixgram(file string, fd int, mac [6]byte, features, flags uint32) error {
	cfile := optionalString(file)
	defer C.free(unsafe.Pointer(cfile))
	return check("krun_add_net_unixgram",
		C.call_add_net_unixgram(c.api, c.id, cfile, C.int(fd), (*C.uint8_t)(&mac[0]), C.uint32_t(features), C.uint32_t(flags)))
}

// SetExec names the program that the guest runs, as a path in its root, with its
// arguments (without the name) and environment. All of it travels on the
// kernel's command line, unescaped and for every program of the guest to read:
// 2048 bytes in all, 32 arguments and 32 variables, printable ASCII without
// quotes; StartEnter aborts on some of the rest. A nil env is an empty one.
func (c *Context) SetExec(program string, args, env []string) error {
	cprogram := C.CString(program)
	defer C.free(unsafe.Pointer(cprogram))
	argv, envp := newStrings(args), newStrings(env)
	defer argv.free()
	defer envp.free()
	return check("krun_set_exec", C.call_set_exec(c.api, c.id, cprogram, argv.at(), envp.at()))
}

// SetWorkdir sets the program's working directory in the guest; as SetExec.
func (c *Context) SetWorkdir(dir string) error {
	cdir := C.CString(dir)
	defer C.free(unsafe.Pointer(cdir))
	return check("krun_set_workdir", C.call_set_workdir(c.api, c.id, cdir))
}

// SetRlimits sets limits of the guest's program, each as "ID=SOFT:HARD" with
// Linux's numbers (7 is open files); as SetExec.
func (c *Context) SetRlimits(limits []string) error {
	climits := newStrings(limits)
	defer climits.free()
	return check("krun_set_rlimits", C.call_set_rlimits(c.api, c.id, climits.at()))
}

// StartEnter runs the VM on the calling thread, which should be the process's
// first and locked. When the guest ends, the process ends with _exit: no deferred
// call runs and nothing is flushed. It returns only when the VM could not be
// started, and then the context is gone. The status is what the guest set, else 0,
// also where its kernel died; 1 when a virtual CPU failed; 128 and more is a crash
// of the VMM. SIGABRT means that libkrun did not like the configuration.
//
// libkrun's threads write to pipes and sockets: SIGPIPE must be ignored. It
// installs handlers for SIGINT and SIGWINCH that Go programs do not survive where
// a terminal sends these: have none. It sets the umask to 0.
func (c *Context) StartEnter() error {
	return check("krun_start_enter", C.enter(c.api, c.id))
}

// optionalString is C's copy of s; NULL for an empty one. The caller frees it.
func optionalString(s string) *C.char {
	if s == "" {
		return nil
	}
	return C.CString(s)
}

// cStrings is a NULL-terminated array of strings in C's memory. It is never NULL
// itself: libkrun takes that for "as the host".
type cStrings struct {
	array unsafe.Pointer
	n     int
}

func newStrings(list []string) cStrings {
	s := cStrings{array: C.calloc(C.size_t(len(list)+1), C.size_t(unsafe.Sizeof((*C.char)(nil)))), n: len(list)}
	for i, text := range list {
		s.slots()[i] = C.CString(text)
	}
	return s
}

func (s cStrings) slots() []*C.char { return unsafe.Slice((**C.char)(s.array), s.n+1) }

func (s cStrings) at() **C.char { return (**C.char)(s.array) }

func (s cStrings) free() {
	for _, text := range s.slots()[:s.n] {
		C.free(unsafe.Pointer(text))
	}
	C.free(s.array)
}
