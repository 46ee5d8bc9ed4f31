// Package libkrun is the shim's Hypervisor for libkrun: a boot spec becomes a
// sequence of calls, made in a child process of the shim.
//
// The child is the shim's own program once more. libkrun ends its process with
// the VM, aborts it on what it does not like, and installs signal handlers that
// a Go program with work to do cannot bear: none of that may take the shim down,
// which has to say how the VM ended and to clean up. It also lets the VMM be
// confined, and keeps all of gRPC out of its memory.
//
// The guest boots from a directory of its own that holds nothing but the agent
// (see bootspec.LibkrunSpec), finds its disks by their order, reads iii.env from a
// console port, and dials the shim by vsock. The kernel's command line has only
// constants: libkrun does not escape what is put there, and every program of the
// guest can read it.
package libkrun

import (
	"fmt"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/agentlink"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/krun"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
)

// VM is the part of *krun.Context that is used here.
type VM interface {
	SetVMConfig(cpus uint8, memoryMiB uint32) error
	SetNestedVirt(on bool) error
	DisableImplicitConsole() error
	DisableImplicitVsock() error
	AddVsock(flags uint32) error
	AddVsockPort2(port uint32, file string, listen bool) error
	SetRoot(dir string) error
	AddDisk3(id, file string, format krun.DiskFormat, readOnly, direct bool, sync krun.SyncMode) error
	AddVirtioConsoleDefault(in, out, err int) error
	AddVirtioConsoleMultiport() (console uint32, err error)
	AddConsolePortInOut(console uint32, name string, in, out int) error
	AddNetUnixStream(file string, fd int, mac [6]byte, features, flags uint32) error
	SetExec(program string, args, env []string) error
	StartEnter() error
}

// AgentFile is the agent's name in LibkrunSpec.Root.
const AgentFile = "agent"

// agentEnv is the environment of the guest's first program: with it, libkrun's
// init makes the agent PID 1 instead of its own child.
const agentEnv = "KRUN_INIT_PID1=1"

// Files are the descriptors of the VM in its process.
type Files struct {
	// Console takes what the first console prints; nothing is read from it.
	Console int
	// Env is read by the port iii.env, and Null takes what is written to it.
	Env, Null int
	// Network carries the frames of the guest's network device, where it has one.
	Network int
}

// Configure makes the calls for the spec, in the order in which libkrun wants
// them: switches before what they make room for, devices as the guest shall
// number them. The devices are 8 or 9 of the 11 that x86-64 has room for: memory
// balloon, entropy, root, vsock, two consoles, two disks and a network. The link's socket is
// named relative to the working directory, which has to be the machine directory:
// its absolute path may be too long.
func Configure(vm VM, spec *bootspec.Spec, files Files) error {
	for _, step := range []func() error{
		func() error { return vm.SetVMConfig(uint8(spec.CPUs), uint32(spec.MemoryMiB)) },
		func() error { return setNested(vm, spec.Libkrun.Nested) },
		vm.DisableImplicitConsole,
		// Without it a guest that has no network device would use the host's.
		vm.DisableImplicitVsock,
		func() error { return vm.AddVsock(krun.VsockPlain) },
		func() error { return vm.AddVsockPort2(agentlink.VsockPort, layout.LinkName, false) },
		func() error { return vm.SetRoot(spec.Libkrun.Root) },
		func() error { return addDisk(vm, "lower", spec.Lower) },
		func() error { return addDisk(vm, "upper", spec.Upper) },
		func() error { return vm.AddVirtioConsoleDefault(krun.NoFile, files.Console, files.Console) },
		func() error { return addEnvPort(vm, files) },
		func() error { return addNetwork(vm, spec.Guest.Interface, files.Network) },
		func() error { return vm.SetExec("/"+AgentFile, nil, []string{agentEnv}) },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// setNested asks only for what is wanted: some libkrun refuse either answer.
func setNested(vm VM, on bool) error {
	if !on {
		return nil
	}
	return vm.SetNestedVirt(true)
}

// addDisk adds a raw disk. Flushes of the guest are worth their time only where
// somebody mounts the disk again.
func addDisk(vm VM, id string, d bootspec.Disk) error {
	sync := krun.SyncNone
	if d.Durable && !d.ReadOnly {
		sync = krun.SyncFull
	}
	if err := vm.AddDisk3(id, d.Path, krun.Raw, d.ReadOnly, false, sync); err != nil {
		return fmt.Errorf("%s: %w", id, err)
	}
	return nil
}

// addNetwork adds the guest's network device. It offers no offloads: the gateway
// takes whole frames with whole checksums.
func addNetwork(vm VM, n *bootspec.Interface, fd int) error {
	if n == nil {
		return nil
	}
	const features, flags = 0, 0
	if err := vm.AddNetUnixStream("", fd, n.HardwareAddr(), features, flags); err != nil {
		return fmt.Errorf("network: %w", err)
	}
	return nil
}

func addEnvPort(vm VM, files Files) error {
	console, err := vm.AddVirtioConsoleMultiport()
	if err != nil {
		return err
	}
	return vm.AddConsolePortInOut(console, agentlink.EnvPort, files.Env, files.Null)
}
