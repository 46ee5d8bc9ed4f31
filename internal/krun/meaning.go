package krun

import "syscall"

func newError(call string, errno syscall.Errno) *Error {
	return &Error{Call: call, Errno: errno, Meaning: meaning(call, errno)}
}

// meaning explains an errno: libkrun uses few, for much.
func meaning(call string, errno syscall.Errno) string {
	const start = "krun_start_enter"
	switch {
	case errno == syscall.ENOSYS:
		return "the loaded libkrun is too old to have it, or was built without it"
	case call == start && errno == syscall.EINVAL:
		return "libkrun refused the VM: a disk or directory is missing or may not be opened, there are too many devices, " +
			"or on macOS the program lacks the hypervisor entitlement; its log has more"
	case call == start && errno == syscall.ENOENT:
		return "the context was started or freed before, or libkrunfw, which has the guest's kernel, was not found"
	case errno == syscall.ENOENT:
		return "the context was started or freed before"
	}
	for _, m := range meanings() {
		if m.call == call && m.errno == errno {
			return m.text
		}
	}
	return ""
}

type known struct {
	call  string
	errno syscall.Errno
	text  string
}

func meanings() []known {
	return []known{
		{"krun_set_vm_config", syscall.EINVAL, "there must be a CPU and some memory"},
		{"krun_add_vsock", syscall.EEXIST, "there is a vsock device already; the implicit one must be switched off before"},
		{"krun_add_vsock", syscall.EINVAL, "the flags of socket lending are not known to it"},
		{"krun_add_vsock_port2", syscall.ENODEV, "there is no vsock device: add it before its ports"},
		{"krun_add_vsock_port2", syscall.EEXIST, "the socket to listen on is there already"},
		{"krun_add_disk3", syscall.EINVAL, "the format or the sync mode is not known to it"},
		{"krun_add_console_port_inout", syscall.EINVAL, "there is no multiport console of that number"},
		{"krun_add_net_unixstream", syscall.EINVAL, "want a path or a file, not both, and only flags and features that it knows"},
		{"krun_set_nested_virt", syscall.EOPNOTSUPP, "this libkrun or host cannot nest virtual machines"},
	}
}
