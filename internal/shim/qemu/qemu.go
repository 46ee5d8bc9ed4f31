// Package qemu is the shim's Hypervisor for QEMU with software emulation (TCG):
// a boot spec becomes one command line, and QEMU runs as a child of the shim.
//
// Command lines and their reasons are measured with QEMU 7.2 and the kernel of
// package vmassets: q35 is the machine with a time base of its own, microvm the
// faster one that needs the host's TSC rate. The arm64 machine virt is derived
// from them and untested.
package qemu

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/agentlink"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
)

// The machine types.
const (
	machineQ35     = "q35"
	machineMicroVM = "microvm"
	machineVirt    = "virt"
)

// File descriptors of the child, in the order of exec.Cmd.ExtraFiles.
const (
	fdConsole = 3 + iota
	fdLink
	fdEnv
	// fdMore is the first of those that not every VM has: the network's, and then
	// the snapshot.
	fdMore
)

func fdSnapshot(spec *bootspec.Spec) int {
	if spec.Guest.Interface != nil {
		return fdMore + 1
	}
	return fdMore
}

// Kernel arguments of every machine: why, in the order of the list.
//
//	quiet                  each line on an emulated serial port costs time
//	panic=-1               a panic ends the VM at once
//	cryptomgr.notests      0.28 s of self-tests
//	mitigations=off        the emulated CPU has no such flaws
//	nokaslr                nothing to relocate
//	rcu_expedited          fewer waits during boot
//	random.trust_cpu=on    without it the first program may wait a second for
//	                       entropy
//	init_on_alloc=0        zeroes each page twice; guest root owns the guest anyhow
//	rootfstype=ramfs       cheaper to unpack the initramfs to than tmpfs
//	apparmor=0 audit=0     nobody loads a policy or reads the records
//	initcall_blacklist     0.18 s of what no guest of ours uses
const commonArgs = "quiet panic=-1 cryptomgr.notests mitigations=off nokaslr rcupdate.rcu_expedited=1 random.trust_cpu=on " +
	"init_on_alloc=0 rootfstype=ramfs apparmor=0 audit=0 " +
	"initcall_blacklist=init_kprobe_trace,load_system_certificate_list,crypto_kdf108_init"

// x86Args: the TSC of an emulated guest is the host's, steady and in step on all
// CPUs, which the kernel cannot find out.
const x86Args = "console=ttyS0 8250.nr_uarts=1 no_timer_check tsc=reliable"

// Args is QEMU's command line for the spec, without argv[0].
func Args(spec *bootspec.Spec) ([]string, error) {
	args, err := machineArgs(spec, backends{
		console: socket("console", fdConsole), link: socket("link", fdLink), env: socket("env", fdEnv),
		lower: drive("lower", spec.Lower), upper: drive("upper", spec.Upper),
		// Each frame behind its length, in four bytes.
		network: "stream,id=network,server=off,addr.type=fd,addr.str=" + strconv.Itoa(fdMore),
	})
	if err == nil && spec.QEMU.Snapshot != "" {
		args = append(args, "-incoming", "fd:"+strconv.Itoa(fdSnapshot(spec)))
	}
	return args, err
}

// backends are what lies behind the guest's devices, in QEMU's terms: the
// machine is the same whatever that is.
type backends struct {
	console, link, env string // -chardev
	lower, upper       string // -drive
	network            string // -netdev, where there is one
}

func machineArgs(spec *bootspec.Spec, behind backends) ([]string, error) {
	q := spec.QEMU
	args := []string{"-name", "guest=" + escape(spec.ID)}
	kernelArgs := commonArgs
	bus := "pci"
	switch q.Machine {
	case machineQ35:
		args = append(args, "-M", "q35,accel=tcg,hpet=off,smm=off,sata=off,usb=off,vmport=off,smbus=off", "-cpu", "qemu64,+rdrand")
		kernelArgs = x86Args + " " + kernelArgs
	case machineMicroVM:
		args = append(args, "-M", "microvm,accel=tcg", "-cpu", "qemu64,+rdrand", "-global", "virtio-mmio.force-legacy=false")
		kernelArgs = x86Args + " tsc_early_khz=" + strconv.Itoa(q.TSCKHz) + " " + kernelArgs
		bus = "device"
	case machineVirt:
		args = append(args, "-M", "virt,accel=tcg", "-cpu", "max")
		kernelArgs = "console=ttyAMA0 " + kernelArgs
	default:
		return nil, fmt.Errorf("qemu.machine is %q, not %q, %q or %q", q.Machine, machineQ35, machineMicroVM, machineVirt)
	}
	args = append(args,
		"-smp", strconv.Itoa(spec.CPUs), "-m", strconv.Itoa(spec.MemoryMiB),
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
		"-chardev", behind.console, "-serial", "chardev:console",
		"-kernel", q.Kernel, "-initrd", q.Initramfs, "-append", kernelArgs,
	)
	args = append(args, disk("lower", bus, bootspec.LowerSerial, behind.lower)...)
	args = append(args, disk("upper", bus, bootspec.UpperSerial, behind.upper)...)
	args = append(args, "-device", "virtio-serial-"+bus+",max_ports=4")
	args = append(args, port("link", agentlink.AgentPort, behind.link)...)
	args = append(args, port("env", agentlink.EnvPort, behind.env)...)
	if spec.Guest.Interface != nil {
		args = append(args, nic(spec.Guest.Interface, bus, behind.network)...)
	}
	return args, nil
}

// nic is the guest's network device. It has no ROM: nobody boots from it. The
// gateway takes frames up to the MTU and no larger ones to be cut, so QEMU offers
// no offloads.
func nic(n *bootspec.Interface, bus, netdev string) []string {
	device := "virtio-net-" + bus + ",netdev=network,mac=" + n.MAC + ",host_mtu=" + strconv.Itoa(n.MTU)
	if bus == "pci" {
		device += ",romfile="
	}
	return []string{"-netdev", netdev, "-device", device}
}

func socket(id string, fd int) string {
	return "socket,id=" + id + ",fd=" + strconv.Itoa(fd)
}

func port(id, name, chardev string) []string {
	return []string{"-chardev", chardev, "-device", "virtserialport,id=" + portID(id) + ",chardev=" + id + ",name=" + name}
}

// portID is the device that QEMU's events about a port name.
func portID(id string) string { return "port-" + id }

// drive is a disk's file. Discards reach it, so that it shrinks with what the
// guest deletes.
func drive(id string, d bootspec.Disk) string {
	file := "if=none,id=" + id + ",format=raw,file=" + escape(d.Path)
	switch {
	case d.ReadOnly:
		return file + ",readonly=on"
	case d.Durable:
		// Flushes of the guest reach the host's disk.
		return file + ",cache=writeback,discard=unmap"
	default:
		// Flushes are ignored: nobody mounts this disk again.
		return file + ",cache=unsafe,discard=unmap"
	}
}

// disk is a drive and its device. An error of the host's disk is the guest's too:
// by default QEMU would stop the VM for ever once the host's disk is full.
func disk(id, bus, serial, drive string) []string {
	return []string{"-drive", drive, "-device", "virtio-blk-" + bus + ",drive=" + id + ",werror=report,rerror=report,serial=" + serial}
}

// escape doubles commas, which part the options of one argument.
func escape(value string) string { return strings.ReplaceAll(value, ",", ",,") }
