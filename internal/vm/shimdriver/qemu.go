package shimdriver

import (
	"context"
	"fmt"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vmassets"
)

// envMachine chooses QEMU's machine type.
const envMachine = "III_SANDBOX_QEMU_MACHINE"

// QEMU's machine types that the guest's kernel and modules are made for.
const (
	machineQ35     = "q35"
	machineMicroVM = "microvm"
	machineVirt    = "virt" // arm64
)

func (d *Driver) prepareQEMU(ctx context.Context, spec *bootspec.Spec) error {
	d.slow.Do(func() {
		d.cfg.Log.Info("VMs are emulated by QEMU on this host: they work, but programs run several times slower than with libkrun on hardware virtualization")
	})
	// What is less than any VM may have stays as it is, to be refused.
	if spec.MemoryMiB >= bootspec.MinMemoryMiB {
		spec.MemoryMiB = max(spec.MemoryMiB, minMemoryQEMU)
	}
	binary, err := vmassets.FindQEMU(d.cfg.Getenv, guestArch)
	if err != nil {
		return err
	}
	agent, err := vmassets.FindAgent(d.cfg.Getenv)
	if err != nil {
		return err
	}
	kernel, err := vmassets.Find(d.cfg.Roots.VMM(), d.cfg.Getenv)
	if err != nil {
		return err
	}
	initramfs, err := kernel.Initramfs(ctx, agent)
	if err != nil {
		return err
	}
	machine, khz, err := d.machine()
	if err != nil {
		return err
	}
	spec.QEMU = &bootspec.QEMUSpec{
		Binary: binary, Machine: machine, TSCKHz: khz,
		Kernel: kernel.Image, Initramfs: initramfs,
	}
	if spec.Guest.Interface != nil {
		spec.Guest.Interface.MTU = bootspec.MaxMTU
	}
	switch want := d.cfg.Getenv(envSnapshot); want {
	case "", snapshotOn:
		spec.QEMU.Snapshot = d.snapshot(ctx, spec)
	case snapshotOff:
	default:
		return fmt.Errorf("%s=%q: it can be %s or %s", envSnapshot, want, snapshotOn, snapshotOff)
	}
	return nil
}

// minMemoryQEMU is the least memory, in MiB, in which the packaged kernel (6.1)
// boots: with 92 it runs out of it while it unpacks the initramfs, with 96 some
// 10 (8 CPUs) to 26 MiB are left for programs. The contract lets callers ask for
// 64; they get more rather than an error, since their request is a valid one.
const minMemoryQEMU = 96

// machine chooses the machine type. microvm boots faster (median of 8: 2.2 s
// against 2.6 s for q35), but has no clock of its own to measure the time-stamp
// counter against: it needs to be told the rate, and a wrong one makes the
// guest's clock run wrong.
func (d *Driver) machine() (name string, khz int, err error) {
	if guestArch == "arm64" {
		return machineVirt, 0, nil
	}
	switch want := d.cfg.Getenv(envMachine); want {
	case "":
		if khz, err := vmassets.TSCKHz(d.cfg.Roots.VMM()); err == nil {
			return machineMicroVM, khz, nil
		}
		return machineQ35, 0, nil
	case machineQ35:
		return machineQ35, 0, nil
	case machineMicroVM:
		khz, err := vmassets.TSCKHz(d.cfg.Roots.VMM())
		if err != nil {
			return "", 0, fmt.Errorf("%s=%s: %w", envMachine, want, err)
		}
		return machineMicroVM, khz, nil
	default:
		return "", 0, fmt.Errorf("%s=%q: it can be %s or %s", envMachine, want, machineQ35, machineMicroVM)
	}
}
