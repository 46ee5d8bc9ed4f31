package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/shim/qemu"
)

// fdSnapshot is the file that a launcher wants a snapshot in.
const fdSnapshot = 3

// saveGuest makes a snapshot for the launcher. QEMU ends with this process.
func saveGuest(stdin *os.File, stderr io.Writer) error {
	var st unix.Stat_t
	if err := unix.Fstat(fdSnapshot, &st); err != nil || uint32(st.Mode)&unix.S_IFMT != unix.S_IFREG { //nolint:unconvert // 16 bits on macOS
		return fmt.Errorf("file descriptor %d is not the launcher's file for the snapshot", fdSnapshot)
	}
	unix.CloseOnExec(fdSnapshot)
	file := os.NewFile(fdSnapshot, "snapshot")
	if err := prepareProcess(); err != nil {
		return err
	}
	spec, err := bootspec.Read(stdin)
	if err != nil {
		return bootspec.End{Class: bootspec.EndBadSpec, Message: err.Error()}
	}
	if spec.VMM != bootspec.QEMU {
		return errors.New("only QEMU's guests can be saved")
	}
	if err := (qemu.Hypervisor{}).Check(spec); err != nil {
		return err
	}
	ctx, stop := withSignals(context.Background())
	defer stop()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		// Its end is the launcher's.
		_, _ = io.Copy(io.Discard, stdin)
		cancel()
	}()
	return qemu.Save(ctx, spec, file, stderr)
}
