package boot

import (
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/sys/unix"
)

// Quiesce makes the writable disk consistent: data written, and the file system
// read-only and so marked clean. Every other process must be gone; if one is
// left, the data is written all the same and the journal does the rest.
func (g *Guest) Quiesce() {
	unix.Sync()
	err := unix.Fchdir(int(g.old.Fd()))
	if err == nil {
		err = unix.Mount("", "."+upperMount, "", unix.MS_REMOUNT|unix.MS_RDONLY, "")
	}
	if err != nil {
		g.log.Warn("remount the writable disk read-only", "error", err)
	}
}

// PowerOff is the orderly end of the VM; it does not return.
func (g *Guest) PowerOff() {
	if err := g.tellStatus(0); err != nil {
		g.log.Warn("tell the VMM that the end is in order", "error", err)
	}
	restart()
}

// restart ends the VM; it does not return. Restart rather than power-off: QEMU
// runs with -no-reboot, and a guest without ACPI cannot switch itself off.
func restart() {
	unix.Sync()
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)
	// Then by the end of PID 1: the kernel panics, which ends the VM too.
	os.Exit(1) //nolint:forbidigo // there is nothing to return to
}

// Fatal writes what ended the boot or the service as one line, and ends the VM.
func Fatal(console io.Writer, err error) {
	_, _ = fmt.Fprintf(console, "agent: %v\n", err)
	restart()
}

// exitCode is the request, on a file of libkrun's root file system, that tells
// libkrun the status to end with (virtiofs of libkrun 1.x, KRUN_EXIT_CODE).
const exitCode = 0x7602

// tellStatus tells the VMM what status to end with, where there is one that
// listens: only libkrun's guests begin on a virtiofs.
func (g *Guest) tellStatus(status int) error {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(g.old.Fd()), &fs); err != nil || fs.Type != unix.FUSE_SUPER_MAGIC {
		return err
	}
	return unix.IoctlSetInt(int(g.old.Fd()), exitCode, status)
}

// CatchSignals makes PID 1 survive what processes of the guest may send it: a
// Go program would end at most of them, and the kernel with it. Faults of the
// agent itself do not come this way and still end it.
func CatchSignals() {
	// Nobody reads it: a full channel drops signals, as intended.
	nowhere := make(chan os.Signal, 1)
	for n := syscall.Signal(1); n <= 64; n++ {
		switch n {
		case syscall.SIGKILL, syscall.SIGSTOP: // cannot be caught
		case syscall.SIGCHLD, syscall.SIGURG, syscall.SIGPROF, syscall.SIGWINCH, syscall.SIGCONT: // do no harm, and may be many
		default:
			signal.Notify(nowhere, n)
		}
	}
}
