package shimdriver

import (
	"context"
	"fmt"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vmassets"
)

// prepareLibkrun finds the libraries and the agent.
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
	if err := vmassets.CheckAgent(agent, guestArch); err != nil {
		return err
	}
	root := layout.Machine{Dir: spec.Dir, Socket: spec.Socket}.Root()
	spec.Libkrun = &bootspec.LibkrunSpec{Library: pair.Library, Firmware: pair.Firmware, Root: root}
	return nil
}

// makeRoot makes the directory that a guest of libkrun boots from. Its copy of the
// agent takes about as long as a shim takes to start, so it is made meanwhile.
func (d *Driver) makeRoot(spec *bootspec.Spec) error {
	if spec.Libkrun == nil {
		return nil
	}
	agent, err := vmassets.FindAgent(d.cfg.Getenv)
	if err != nil {
		return err
	}
	return vmassets.MakeRoot(spec.Libkrun.Root, agent)
}
