// Package boot is what the guest's PID 1 does before it serves: it makes a
// system out of a kernel, two disks and the frame on iii.env, and opens the
// link to the shim; and what it does at the end, down to the reboot that ends
// the VM.
//
// It runs from an initramfs that holds the agent as /init and, in /modules, the
// kernel modules of this VMM; a kernel without modules needs no /modules. Its
// functions change the whole process: mounts, root directory, limits. They are
// not safe for concurrent use.
package boot
