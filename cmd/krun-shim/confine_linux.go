package main

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"

	"github.com/landlock-lsm/go-landlock/landlock"
	landlocksys "github.com/landlock-lsm/go-landlock/landlock/syscall"
	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/shim/libkrun"
)

const (
	envLandlock = "III_SHIM_LANDLOCK"
	landlockOff = "off"
)

// confinement returns the command line to put before the VMM's: this program
// once more, which confines itself and becomes the VMM. The shim itself stays
// free, to remove the VM's files at the end. Nil when it is switched off or the
// kernel has no Landlock.
func confinement(log *slog.Logger) func(*bootspec.Spec) []string {
	if !canConfine(log) {
		return nil
	}
	return func(spec *bootspec.Spec) []string {
		// By this link the running program is found even if its file was replaced.
		return []string{"/proc/self/exe", commandConfine, spec.Upper.Path, spec.Lower.Path, spec.QEMU.Kernel, spec.QEMU.Initramfs, "--"}
	}
}

// canConfine tells whether a VMM is to be confined, and logs why not.
func canConfine(log *slog.Logger) bool {
	if os.Getenv(envLandlock) == landlockOff {
		log.Warn("the VMM runs without Landlock", "reason", envLandlock+"="+landlockOff)
		return false
	}
	if abi, err := landlocksys.LandlockGetABIVersion(); err != nil || abi < 1 {
		log.Info("the VMM runs without Landlock", "reason", "the kernel has none")
		return false
	}
	return true
}

// systemDirs are where programs, libraries, firmware and their configuration
// lie, as distributions have it.
func systemDirs() []string {
	return []string{"/usr", "/lib", "/lib32", "/lib64", "/bin", "/etc", "/opt", "/nix/store", "/gnu/store", "/snap"}
}

// confine becomes the program behind "--", which then may read what the system
// has and the files named first, write the first of them, and use no TCP.
func confine(args []string) error {
	split := slices.Index(args, "--")
	if split < 1 || split == len(args)-1 {
		return errors.New(commandConfine + ": want WRITABLE READABLE ... -- PROGRAM and its arguments")
	}
	writable, readable, argv := args[0], args[1:split], args[split+1:]
	program, err := filepath.EvalSymlinks(argv[0])
	if err != nil {
		return err
	}
	runtime.LockOSThread() // what is set here must be the executing thread's
	// Never more rights by set-user-id programs. Landlock needs it as well.
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("PR_SET_NO_NEW_PRIVS: %w", err)
	}
	prefix := filepath.Dir(filepath.Dir(program)) // of bin/ and share/
	if prefix == "/" {
		prefix = filepath.Dir(program)
	}
	err = landlock.V7.BestEffort().Restrict(
		landlock.RODirs(append(systemDirs(), prefix, "/proc/self", "/sys/devices/system/cpu")...).IgnoreIfMissing(),
		landlock.ROFiles("/dev/zero", "/dev/random", "/dev/urandom").IgnoreIfMissing(),
		landlock.ROFiles(readable...),
		landlock.RWFiles(writable, os.DevNull),
	)
	if err != nil {
		return fmt.Errorf("confine the VMM with Landlock: %w: set %s=%s to do without", err, envLandlock, landlockOff)
	}
	return fmt.Errorf("execute %s: %w", argv[0], unix.Exec(argv[0], argv, os.Environ()))
}

// libkrunRuleset lets a process read what the system has, the libraries, the
// lower disk and the directory that the guest boots from, write the upper disk
// and use /dev/kvm. So a guest cannot fill the host's disk through the directory
// that it boots from, which libkrun lets it write to. The process adds /proc/self,
// which is another one here.
func libkrunRuleset(spec *bootspec.Spec) (*libkrun.Ruleset, error) {
	k := spec.Libkrun
	fd, flags, err := landlock.V7.BestEffort().NewRulesetFD(
		landlock.RODirs(append(systemDirs(), k.Root, "/sys/devices/system/cpu")...).IgnoreIfMissing(),
		landlock.ROFiles("/dev/zero", "/dev/random", "/dev/urandom").IgnoreIfMissing(),
		landlock.ROFiles(k.Library, k.Firmware, spec.Lower.Path),
		landlock.RWFiles(spec.Upper.Path, os.DevNull),
		landlock.RWFiles("/dev/kvm").WithIoctlDev(),
	)
	if err != nil {
		return nil, fmt.Errorf("confine libkrun with Landlock: %w: set %s=%s to do without", err, envLandlock, landlockOff)
	}
	if fd < 0 { // this kernel has nothing to restrict
		return nil, nil
	}
	return &libkrun.Ruleset{File: os.NewFile(uintptr(fd), "landlock"), Flags: flags}, nil
}
