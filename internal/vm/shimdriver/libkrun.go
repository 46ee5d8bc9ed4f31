package shimdriver

import (
	"context"
	"fmt"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vmassets"
)

// prepareLibkrun finds the libraries and makes the directory that the guest
// boots from.
func (d *Driver) prepareLibkrun(_ context.Context, spec *bootspec.Spec) error {
	if err := vmassets.HardwareVirtualization(); err != nil {
		return fmt.Errorf("libkrun cannot run VMs here: %w; --vmm qemu does without", err)
	}
	pair, err := vmassets.FindLibkrun(d.cfg.Roots.VMM(), d.cfg.Getenv)
	if err != nil {
		return err
	}
	agent, err := vmassets.FindAgent(d.cfg.Getenv)
	if err != nil {
		return err
	}
	root := layout.Machine{Dir: spec.Dir, Socket: spec.Socket}.Root()
	if err := vmassets.MakeRoot(root, agent); err != nil {
		return err
	}
	spec.Libkrun = &bootspec.LibkrunSpec{Library: pair.Library, Firmware: pair.Firmware, Root: root}
	return nil
}
