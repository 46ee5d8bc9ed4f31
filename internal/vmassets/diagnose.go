package vmassets

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// versionTimeout is how long QEMU may take to say its version.
	versionTimeout = 10 * time.Second
	// minFree is the free disk space below which a setup or a VM soon fails.
	minFree = 1 << 30
)

// Finding is the outcome of one check of this host.
type Finding struct {
	// Name says what was checked, in a word or two.
	Name string
	// OK is false where VMs cannot boot before the fix is done.
	OK bool
	// Finding is what was seen, Fix what to do about it. With OK, Fix may still
	// say how to get more out of the host; it may be empty.
	Finding, Fix string
}

// Diagnose checks what VMs need on this host, in the order in which a person
// would set it up. vmm is what is to run them: "qemu" or "libkrun"; any other is
// whichever can. dir is layout.Roots.VMM(). It changes nothing but the cache in
// dir, and takes about a second at most where nothing hangs.
func Diagnose(ctx context.Context, dir, vmm string, getenv func(string) string) []Finding {
	kernel, kernelFinding := diagnoseKernel(dir, getenv)
	agent, agentFinding := diagnoseAgent(getenv)
	virtualization := diagnoseVirtualization()
	libkrun, ready := diagnoseLibkrun(ctx, dir, getenv)
	if vmm == "qemu" {
		libkrun.OK = true
	}
	if vmm == "libkrun" && !ready {
		libkrun.OK, virtualization.OK = false, HardwareVirtualization() == nil
		if libkrun.Fix == "" {
			libkrun.Fix = "see hardware virtualization, or take --vmm qemu"
		}
	}
	emulation := []Finding{diagnoseQEMU(ctx, getenv), kernelFinding, diagnoseInitramfs(ctx, kernel, agent), diagnoseTSC(dir)}
	if vmm == "libkrun" || ready && vmm != "qemu" {
		for i := range emulation {
			emulation[i] = emulation[i].unneeded()
		}
	}
	findings := []Finding{virtualization, libkrun, agentFinding, diagnoseShim(dir, getenv), diagnoseSpace(dir)}
	return append(findings, emulation...)
}

// unneeded is the finding where VMs boot without what it is about.
func (f Finding) unneeded() Finding {
	if !f.OK {
		f.OK, f.Finding, f.Fix = true, "not needed with libkrun: "+f.Finding, ""
	}
	return f
}

func diagnoseShim(dir string, getenv func(string) string) Finding {
	f := Finding{Name: "krun-shim"}
	path, err := FindShim(getenv, dir)
	if err != nil {
		f.Finding, f.Fix = splitFix(err)
		return f
	}
	f.OK, f.Finding = true, path
	return f
}

func diagnoseVirtualization() Finding {
	f := Finding{Name: "hardware virtualization", OK: true, Finding: "usable"}
	if err := HardwareVirtualization(); err != nil {
		f.Finding, f.Fix = splitFix(err)
		f.Finding = "not usable, VMs run under emulation: " + f.Finding
	}
	return f
}

func diagnoseQEMU(ctx context.Context, getenv func(string) string) Finding {
	f := Finding{Name: "qemu"}
	path, err := FindQEMU(getenv, runtime.GOARCH)
	if err != nil {
		f.Finding, f.Fix = splitFix(err)
		return f
	}
	ctx, cancel := context.WithTimeout(ctx, versionTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, "--version")
	cmd.WaitDelay = time.Second
	out, err := cmd.Output()
	version, _, _ := strings.Cut(string(out), "\n")
	if err != nil {
		f.Finding, f.Fix = fmt.Sprintf("%s --version: %v", path, err), "reinstall it, or set "+envQEMU+" to one that works"
		return f
	}
	f.OK, f.Finding = true, path+": "+version
	if major, minor, ok := qemuVersion(version); !ok || major < 7 || major == 7 && minor < 2 {
		f.OK = false
		f.Fix = "install QEMU 7.2 or later, or set " + envQEMU + " to it"
	}
	return f
}

// qemuVersion reads "QEMU emulator version 7.2.22 (Debian ...)".
func qemuVersion(line string) (major, minor int, ok bool) {
	_, rest, found := strings.Cut(line, " version ")
	parts := strings.SplitN(rest, ".", 3)
	if !found || len(parts) < 2 {
		return 0, 0, false
	}
	major, err1 := strconv.Atoi(parts[0])
	minor, err2 := strconv.Atoi(parts[1])
	return major, minor, err1 == nil && err2 == nil
}

func diagnoseKernel(dir string, getenv func(string) string) (*Kernel, Finding) {
	f := Finding{Name: "guest kernel"}
	k, err := Find(dir, getenv)
	if err != nil {
		f.Finding, f.Fix = splitFix(err)
		if errors.Is(err, ErrNoKernel) {
			f.Finding, f.Fix = err.Error(), "run `adapter vmm setup`"
		}
		return nil, f
	}
	f.OK, f.Finding = true, fmt.Sprintf("%s (%s), %d modules", k.Release, k.Version, len(k.Modules))
	if k.Indirect != "" {
		f.Fix = "it starts slower than it could, " + k.Indirect
	}
	return k, f
}

func diagnoseAgent(getenv func(string) string) (string, Finding) {
	f := Finding{Name: "guest agent"}
	path, err := FindAgent(getenv)
	if err == nil {
		err = CheckAgent(path, runtime.GOARCH)
	}
	if err != nil {
		f.Finding, f.Fix = splitFix(err)
		return "", f
	}
	f.OK, f.Finding = true, path+" is static, for "+runtime.GOARCH
	return path, f
}

func diagnoseInitramfs(ctx context.Context, k *Kernel, agent string) Finding {
	f := Finding{Name: "initramfs"}
	if k == nil || agent == "" {
		f.Finding, f.Fix = "cannot be made without kernel and agent", "see there"
		return f
	}
	path, err := k.Initramfs(ctx, agent)
	if err != nil {
		f.Finding, f.Fix = splitFix(err)
		return f
	}
	f.OK, f.Finding = true, path
	return f
}

func diagnoseSpace(dir string) Finding {
	f := Finding{Name: "disk space"}
	var st unix.Statfs_t
	for {
		err := unix.Statfs(dir, &st)
		if err == nil {
			break
		}
		if parent := filepath.Dir(dir); errors.Is(err, os.ErrNotExist) && parent != dir {
			dir = parent
			continue
		}
		f.Finding, f.Fix = fmt.Sprintf("%s: %v", dir, err), "choose another directory with III_SANDBOX_CACHE_DIR"
		return f
	}
	free := st.Bavail * uint64(st.Bsize)
	f.OK, f.Finding = free >= minFree, fmt.Sprintf("%d MiB free in %s", free>>20, dir)
	if !f.OK {
		f.Fix = fmt.Sprintf("free some space (%d MiB at least), or choose another directory with III_SANDBOX_CACHE_DIR", minFree>>20)
	}
	return f
}

func diagnoseTSC(dir string) Finding {
	f := Finding{Name: "machine type", OK: true, Finding: "q35"}
	if runtime.GOARCH != "amd64" {
		f.Finding = "virt"
		return f
	}
	if khz, err := TSCKHz(dir); err != nil {
		f.Finding = fmt.Sprintf("q35 (not microvm, which boots faster: %v)", err)
	} else {
		f.Finding = fmt.Sprintf("microvm (counter at %d kHz)", khz)
	}
	return f
}

// splitFix parts what is wrong from what to do about it, where err has both.
func splitFix(err error) (finding, fix string) {
	if a, ok := errors.AsType[*advice](err); ok {
		return a.err.Error(), a.fix
	}
	return err.Error(), ""
}
