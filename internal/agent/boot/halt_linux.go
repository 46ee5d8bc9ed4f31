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

// PowerOff ends the VM; it does not return. Restart rather than power-off: QEMU
// runs with -no-reboot, and a guest without ACPI cannot switch itself off.
func PowerOff() {
	unix.Sync()
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)
	// Then by the end of PID 1: the kernel panics, which ends the VM too.
	os.Exit(1) //nolint:forbidigo // there is nothing to return to
}

// Fatal writes what ended the boot or the service as one line, and ends the VM.
func Fatal(console io.Writer, err error) {
	_, _ = fmt.Fprintf(console, "agent: %v\n", err)
	PowerOff()
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
