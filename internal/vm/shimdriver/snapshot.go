package shimdriver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/proc"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vmassets"
)

const (
	// envSnapshot switches snapshots off.
	envSnapshot = "III_SANDBOX_SNAPSHOT"
	snapshotOff = "off"
	snapshotOn  = "on"
	// saveCommand is the shim's command that makes a snapshot: the boot spec on
	// fd 0, whose end means that the launcher is gone, the file as fd 3.
	saveCommand = "__vm-save"
	// saveTimeout is many times what it takes on a busy host.
	saveTimeout = time.Minute
	// bootIDFile has another content after each boot of the host.
	bootIDFile = "/proc/sys/kernel/random/boot_id"
)

// snapshot names the saved guest that the VM can be resumed from, having it made
// for the first VM of its kind. Any failure only costs the time that a boot
// takes longer, so it is logged and no more.
func (d *Driver) snapshot(ctx context.Context, spec *bootspec.Spec) string {
	shim, err := vmassets.FindShim(d.cfg.Getenv, d.cfg.Roots.VMM())
	if err != nil {
		return "" // the boot will tell
	}
	q := spec.QEMU
	network := "no network"
	if n := spec.Guest.Interface; n != nil {
		// The device alone: what the guest does with it comes with its boot spec.
		network = fmt.Sprintf("network %s, MTU %d", n.MAC, n.MTU)
	}
	inputs := vmassets.SnapshotInputs{
		Files: []string{shim, q.Binary, q.Kernel},
		// An initramfs is named by its content.
		Machine: fmt.Sprintf("%s %d kHz, %d CPUs, %d MiB, %s, %s", q.Machine, q.TSCKHz, spec.CPUs, spec.MemoryMiB, filepath.Base(q.Initramfs), network),
	}
	if q.Machine == machineQ35 {
		// The guest has measured the counter of a host whose rate nobody else knows,
		// and the next boot may be that of other hardware.
		inputs.Contents = []string{bootIDFile}
	}
	path, err := vmassets.Snapshot(ctx, d.cfg.Roots.VMM(), inputs, func(ctx context.Context, file *os.File) error {
		d.cfg.Log.Info("the first VM of this size boots twice: once to be saved for later ones, which start several times faster",
			"cpus", spec.CPUs, "memory_mib", spec.MemoryMiB)
		return d.save(ctx, shim, spec, file)
	})
	if err != nil && !errors.Is(err, vmassets.ErrNoSnapshot) && ctx.Err() == nil {
		d.cfg.Log.Warn("VMs of this size boot slower: they cannot be resumed from a snapshot", "error", err)
	}
	return path
}

// save runs the shim once to write a snapshot.
func (d *Driver) save(ctx context.Context, shim string, spec *bootspec.Spec, file *os.File) (err error) {
	limit := cmp.Or(d.cfg.SaveTimeout, saveTimeout)
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("it took more than %v", limit))
	defer cancel()
	specR, specW, err := os.Pipe()
	if err != nil {
		return err
	}
	defer specW.Close() //nolint:errcheck // a lifeline
	log, err := os.CreateTemp(spec.Dir, "save-*.log")
	if err != nil {
		return errors.Join(err, specR.Close())
	}
	defer func() { err = errors.Join(err, log.Close(), os.Remove(log.Name())) }()
	child, err := proc.Start(proc.Command{
		Path: shim, Args: []string{saveCommand}, Env: d.environment(),
		Stdin: specR, Stdout: log, Stderr: log, Files: []*os.File{file},
	})
	if err = errors.Join(err, specR.Close()); err != nil {
		return err
	}
	// One that has ended does not read; its words tell why.
	_ = bootspec.Write(specW, spec)
	select {
	case <-ctx.Done():
		_ = child.Kill() // a no-op after the end
		<-child.Done()
		return fmt.Errorf("%s %s: %w", filepath.Base(shim), saveCommand, context.Cause(ctx))
	case <-child.Done():
	}
	if exit := child.Exit(); exit.Code != 0 {
		said, _ := os.ReadFile(log.Name())
		return fmt.Errorf("%s %s: %v%s", filepath.Base(shim), saveCommand, exit, strings.TrimRight(": "+string(said), ": \n"))
	}
	return nil
}
