// Package libkrun is the shim's Hypervisor for libkrun: a boot spec becomes a
// sequence of calls, made in a child process of the shim.
//
// The child is the shim's own program once more, but only its few lines of C (see
// package krun). libkrun ends its process with the VM and aborts it on what it does
// not like: that may not take the shim down, which has to say how the VM ended and
// to clean up. It also lets the VMM be confined, and keeps Go out of its memory.
//
// The guest boots from a directory of its own that holds nothing but the agent
// (see bootspec.LibkrunSpec), finds its disks by their order, reads iii.env from a
// console port, and dials the shim by vsock. The kernel's command line has only
// constants: libkrun does not escape what is put there, and every program of the
// guest can read it.
package libkrun

import (
	"fmt"
	"runtime"
	"strings"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/agentlink"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/krun"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
)

// AgentFile is the agent's name in LibkrunSpec.Root.
const AgentFile = "agent"

// fdStderr is where libkrun logs to.
const fdStderr = 2

// agentEnv is the environment of the guest's first program: with it, libkrun's
// init makes the agent PID 1 instead of its own child.
const agentEnv = "KRUN_INIT_PID1=1"

// File descriptors of the child, in the order of exec.Cmd.ExtraFiles.
const (
	// fdConsole takes what the first console prints; nothing is read from it.
	fdConsole = 3 + iota
	// fdEnv is read by the port iii.env, and fdNull takes what is written to it.
	fdEnv
	fdReport
	fdNull
	// fdRuleset is that of Landlock, where the VMM is confined.
	fdRuleset
	// fdNetwork carries the frames of the guest's network device, where it has one.
	fdNetwork
)

// What libkrun's answer to a missing feature means to a user.
const (
	noDisks   = "%s was built without disks (BLK=1): install another build, or name one with III_LIBKRUN_PATH"
	noNetwork = "%s was built without network devices (NET=1): install another build, name one with III_LIBKRUN_PATH, or take --vmm qemu"
)

// Calls are those that make the child the VM of the spec, in the order in which
// libkrun wants them: switches before what they make room for, devices as the
// guest shall number them. The devices are 8 or 9 of the 11 that x86-64 has room
// for: memory balloon, entropy, root, vsock, two consoles, two disks and a
// network. The link's socket is named relative to the working directory, which has
// to be the machine directory: its absolute path may be too long. A confined child
// is so before it loads a library or has a second thread.
func Calls(spec *bootspec.Spec, confined *Ruleset) *krun.Sequence {
	k, s := spec.Libkrun, &krun.Sequence{}
	if confined != nil {
		s.Confine(fdRuleset, confined.Flags)
	}
	s.Watch()
	s.Load(k.Library, k.Firmware)
	s.InitLog(fdStderr, krun.LogWarn)
	s.NeedFeature(krun.FeatureBlk, fmt.Sprintf(noDisks, k.Library))
	if spec.Guest.Interface != nil {
		s.NeedFeature(krun.FeatureNet, fmt.Sprintf(noNetwork, k.Library))
	}
	s.CreateContext()
	s.SetVMConfig(spec.CPUs, spec.MemoryMiB)
	if k.Nested {
		s.SetNestedVirt(true) // some libkrun refuse either answer
	}
	s.DisableImplicitConsole()
	// Without it a guest that has no network device would use the host's.
	s.DisableImplicitVsock()
	s.AddVsock(krun.VsockPlain)
	s.AddVsockPort2(agentlink.VsockPort, layout.LinkName, false)
	s.SetRoot(k.Root)
	addDisk(s, "lower", spec.Lower)
	addDisk(s, "upper", spec.Upper)
	s.AddVirtioConsoleDefault(krun.NoFile, fdConsole, fdConsole)
	s.AddVirtioConsoleMultiport()
	s.AddConsolePortInOut(agentlink.EnvPort, fdEnv, fdNull)
	if n := spec.Guest.Interface; n != nil {
		// No offloads: the gateway takes whole frames with whole checksums.
		s.AddNetUnixStream(fdNetwork, n.HardwareAddr(), 0, 0)
	}
	s.SetExec("/"+AgentFile, nil, append([]string{agentEnv}, kernelParameters(spec)...))
	s.StartEnter()
	return s
}

// kernelParameters speed the guest's kernel up. libkrun puts the program's
// environment on the kernel's command line, where the kernel takes what it knows.
// In the lab they save a sixth of the time from power-on to the agent: half of
// that is code that would be rewritten for a single CPU, the other half
// initialization of what is of no use in a sandbox. A kernel that lacks a function
// ignores its name.
//
// On AMD's processors libkrun 1.17 has no TSC deadline timer for its guests, so the
// kernel measures their APIC's timer, for 0.2 s. nolapic_timer would save that, and
// have every timer of the guest go through the slower PIT for as long as it lives.
func kernelParameters(spec *bootspec.Spec) []string {
	unused := []string{
		"init_btrfs_fs", "raid6_select_algo", "calibrate_xor_blocks", // time their algorithms
		"jent_mod_init", // times memory; the guest has a virtio-rng
		"cmos_init",     // the clock comes from KVM and the agent
		"dm_init",
		"can_init", "can_dev_init", "raw_module_init", "bcm_module_init", "cgw_module_init", "vcan_init_module",
	}
	if !spec.Libkrun.Nested {
		unused = append(unused, "svm_init", "vmx_init")
	}
	parameters := []string{
		"initcall_blacklist=" + strings.Join(unused, ","),
		"loop.max_loop=0", "dummy.numdummies=0", // they are made when they are asked for
		"cryptomgr.notests", "rcupdate.rcu_expedited=1", "audit=0", "selinux=0",
	}
	if runtime.GOARCH != "amd64" {
		return parameters // a kernel hands what it does not know to the program
	}
	if spec.CPUs == 1 {
		parameters = append(parameters, "noreplace-smp")
	}
	return parameters
}

// addDisk adds a raw disk. Flushes of the guest are worth their time only where
// somebody mounts the disk again.
func addDisk(s *krun.Sequence, id string, d bootspec.Disk) {
	sync := krun.SyncNone
	if d.Durable && !d.ReadOnly {
		sync = krun.SyncFull
	}
	s.AddDisk3(id, d.Path, krun.Raw, d.ReadOnly, false, sync)
}
