package qemu

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/shim"
)

// resume runs the VM from its snapshot (see Save). It reports false when the VM
// never ran since the snapshot cannot be read or does not fit; then it removes
// the snapshot, for a new one to be made, and the devices are as they were.
func (h Hypervisor) resume(ctx context.Context, spec *bootspec.Spec, dev shim.Devices) (bootspec.End, bool) {
	snapshot, err := openRegular(spec.QEMU.Snapshot)
	if err != nil {
		say(dev.Log, "boot without a snapshot: %v", err)
		return bootspec.End{}, false
	}
	defer snapshot.Close() //nolint:errcheck // only read
	cmd, failed := h.command(ctx, spec, dev)
	if failed != nil {
		return *failed, true
	}
	var said lastWords
	cmd.Stderr = io.MultiWriter(dev.Log, &said)
	cmd.ExtraFiles = append(cmd.ExtraFiles, snapshot)
	// The guest's ends of the wires stay open here: should the snapshot not fit,
	// another QEMU needs them.
	end := run(ctx, cmd, dev, func() {})
	if end.Class != bootspec.EndCrashed || end.Signal != 0 || !said.refused() {
		return end, true
	}
	say(dev.Log, "boot without the snapshot %s, which is removed", spec.QEMU.Snapshot)
	if err := os.Remove(spec.QEMU.Snapshot); err != nil {
		say(dev.Log, "remove it: %v", err)
	}
	return bootspec.End{}, false
}

func say(log io.Writer, format string, args ...any) {
	_, _ = fmt.Fprintf(log, "krun-shim: "+format+"\n", args...)
}

// lastWords keeps the end of what QEMU prints.
type lastWords struct{ tail []byte }

// lastWordsSize is more than QEMU says about a snapshot that does not fit.
const lastWordsSize = 4 << 10

func (l *lastWords) Write(p []byte) (int, error) {
	l.tail = append(l.tail, p...)
	l.tail = l.tail[max(0, len(l.tail)-lastWordsSize):]
	return len(p), nil
}

// refused tells whether QEMU gave up before the guest ran: one of these is the
// last thing it says then (migration/migration.c, migration/savevm.c).
func (l *lastWords) refused() bool {
	for _, sign := range []string{"load of migration failed", "Not a migration stream", "Unsupported migration stream", "error while loading state"} {
		if bytes.Contains(l.tail, []byte(sign)) {
			return true
		}
	}
	return false
}
