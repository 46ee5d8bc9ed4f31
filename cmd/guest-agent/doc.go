// Command guest-agent is PID 1 of every guest: it boots the guest's user space
// (internal/agent/boot) and serves its shim (internal/agent) until it is asked
// to shut down. It runs in a VM's initramfs alone; anywhere else it only tells
// its version.
package main
