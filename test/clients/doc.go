// Package clients has the tests in which clients that are not ours use the whole
// product: the engine as a program, adapter serve as a process, VMs of QEMU.
package clients
