package sandbox

import (
	"context"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
)

// Machine is what a Manager needs of a VM.
type Machine = machine

// Due asks the reaper about a sandbox, idle for that long, whose time is a minute.
func Due(ops, execs uint32, idle, busyGrace time.Duration) bool {
	return (&entry{ops: ops, execs: execs, idleTimeout: time.Minute}).due(idle, busyGrace)
}

// StartOn is Start with other VMs: those of fake time.
func StartOn(cfg Config, launch func(context.Context, vm.Request) (Machine, error)) *Manager {
	return start(cfg, launch)
}
