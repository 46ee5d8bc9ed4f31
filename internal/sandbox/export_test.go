package sandbox

import (
	"context"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
)

// Machine is what a Manager needs of a VM.
type Machine = machine

// StartOn is Start with other VMs: those of fake time.
func StartOn(cfg Config, launch func(context.Context, vm.Request) (Machine, error)) *Manager {
	return start(cfg, launch)
}
