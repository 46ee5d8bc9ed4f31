// Package layout names every file and directory that the programs keep on the
// host, down to the directories of the image store and of the VMM's files, inside
// of which packages imagestore and vmassets give the names.
//
// There are four roots, all private to the user (0700):
//
//	cache    what can be made again: image lowers, kernels, initramfs
//	data     what the user put there: OCI layouts of images
//	state    one directory per live VM, records of kept sandboxes
//	run      sockets and locks; short, because a unix socket's path is limited
package layout

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
)

// MaxSocketPath is the longest path of a unix socket we use, in bytes. Linux
// allows 107 and macOS 103; the rest is reserve for temporary names.
const MaxSocketPath = 100

// Names inside a machine directory.
const (
	fileLock    = "lock"
	fileSpec    = "spec.json"
	fileUpper   = "upper.ext4"
	fileConsole = "console.log"
	fileShimLog = "shim.log"
	fileEnd     = "end.json"
	fileRecord  = "record.json"
)

// Roots are the four directories. The zero value is of no use; take
// [FromEnvironment] or fill every field with an absolute path.
type Roots struct {
	Cache, Data, State, Run string
}

// FromEnvironment finds the roots: III_SANDBOX_{CACHE,DATA,STATE,RUN}_DIR where
// set, else the XDG base directories, else their defaults under $HOME; the run
// root without XDG_RUNTIME_DIR is /tmp/iii-sandbox-<uid>. Nothing is created.
func FromEnvironment(getenv func(string) string) (Roots, error) {
	home := getenv("HOME")
	pick := func(override, xdg, fallback string) (string, error) {
		if dir := getenv(override); dir != "" {
			abs, err := filepath.Abs(dir)
			if err != nil {
				return "", fmt.Errorf("%s=%q: %w", override, dir, err)
			}
			return abs, nil
		}
		// XDG says a relative path is to be ignored.
		if dir := getenv(xdg); filepath.IsAbs(dir) {
			return filepath.Join(dir, "iii-sandbox"), nil
		}
		if home == "" {
			return "", fmt.Errorf("neither %s, %s nor HOME is set: set %s to a directory of yours", override, xdg, override)
		}
		return filepath.Join(home, fallback, "iii-sandbox"), nil
	}
	var r Roots
	var errs [3]error
	r.Cache, errs[0] = pick("III_SANDBOX_CACHE_DIR", "XDG_CACHE_HOME", ".cache")
	r.Data, errs[1] = pick("III_SANDBOX_DATA_DIR", "XDG_DATA_HOME", ".local/share")
	r.State, errs[2] = pick("III_SANDBOX_STATE_DIR", "XDG_STATE_HOME", ".local/state")
	if err := errors.Join(errs[:]...); err != nil {
		return Roots{}, err
	}
	switch dir := getenv("III_SANDBOX_RUN_DIR"); {
	case dir != "":
		abs, err := filepath.Abs(dir)
		if err != nil {
			return Roots{}, fmt.Errorf("III_SANDBOX_RUN_DIR=%q: %w", dir, err)
		}
		r.Run = abs
	case filepath.IsAbs(getenv("XDG_RUNTIME_DIR")):
		r.Run = filepath.Join(getenv("XDG_RUNTIME_DIR"), "iii-sandbox")
	default:
		r.Run = "/tmp/iii-sandbox-" + strconv.Itoa(os.Getuid())
	}
	return r, nil
}

// Images is the image store: lowers and their metadata (package imagestore).
func (r Roots) Images() string { return filepath.Join(r.Cache, "images") }

// VMM is where kernels, modules, initramfs and templates lie (package vmassets).
func (r Roots) VMM() string { return filepath.Join(r.Cache, "vmm") }

// ImageLayouts is the default of III_SANDBOX_IMAGE_DIR: one OCI layout per
// catalog image, asked before any registry.
func (r Roots) ImageLayouts() string { return filepath.Join(r.Data, "images") }

// Packages is where image recipes keep the packages they fetched.
func (r Roots) Packages() string { return filepath.Join(r.Cache, "packages") }

// Machines holds one directory per live VM.
func (r Roots) Machines() string { return filepath.Join(r.State, "machines") }

// MachinesLock is held shared by whoever makes a machine directory, until that
// directory's own lock is held, and exclusively by whoever looks for
// directories that nobody holds.
func (r Roots) MachinesLock() string { return filepath.Join(r.State, "machines.lock") }

// FailedSpecs holds the specs of the last boots that failed, for a replay.
func (r Roots) FailedSpecs() string { return filepath.Join(r.State, "failed") }

// FailedSpec is the redacted spec of the failed boot of the VM with this id.
func (r Roots) FailedSpec(id string) string {
	return filepath.Join(r.FailedSpecs(), id+".spec.json")
}

// BootSlot is lock file n of the host-wide limit on boots at one time.
func (r Roots) BootSlot(n int) string {
	return filepath.Join(r.Run, "boot-"+strconv.Itoa(n)+".lock")
}

// Machine names the files of the VM with this id. The id is one path element:
// the caller made it, or checked it with [ValidID].
func (r Roots) Machine(id string) Machine {
	return Machine{Dir: filepath.Join(r.Machines(), id), Socket: filepath.Join(r.Run, id+".sock")}
}

// ValidID reports whether id may name a VM: 1 to 64 of a-z, 0-9 and '-', not
// beginning with '-'.
func ValidID(id string) bool {
	if id == "" || len(id) > 64 || id[0] == '-' {
		return false
	}
	for _, c := range []byte(id) {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' {
			return false
		}
	}
	return true
}

// LinkName is the name of Machine.Link in its directory.
const LinkName = "link.sock"

// Machine is the files of one VM: a directory and, at a short path, a socket.
type Machine struct {
	Dir, Socket string
}

// Lock is flocked exclusively by the VM's launcher and its shim, on one shared
// open file; when both are gone the kernel frees it and the rest is garbage.
func (m Machine) Lock() string { return filepath.Join(m.Dir, fileLock) }

// Spec is the boot spec with environment and token left out, for debugging.
func (m Machine) Spec() string { return filepath.Join(m.Dir, fileSpec) }

// Upper is the writable disk of an ephemeral VM.
func (m Machine) Upper() string { return filepath.Join(m.Dir, fileUpper) }

// Console is what kernel and early agent print.
func (m Machine) Console() string { return filepath.Join(m.Dir, fileConsole) }

// ShimLog is the shim's standard error, and the VMM's.
func (m Machine) ShimLog() string { return filepath.Join(m.Dir, fileShimLog) }

// End is the shim's report of how the VM ended (bootspec.End as JSON).
func (m Machine) End() string { return filepath.Join(m.Dir, fileEnd) }

// Record describes a kept sandbox to later commands.
func (m Machine) Record() string { return filepath.Join(m.Dir, fileRecord) }

// Link is the socket to which libkrun connects what the guest dials.
func (m Machine) Link() string { return filepath.Join(m.Dir, LinkName) }

// Root is the directory that a guest of libkrun boots from.
func (m Machine) Root() string { return filepath.Join(m.Dir, "root") }

// CheckSocket refuses a socket path that the system could not bind.
func (m Machine) CheckSocket() error {
	if n := len(m.Socket); n > MaxSocketPath {
		return fmt.Errorf("socket path %s has %d bytes, more than %d: set III_SANDBOX_RUN_DIR to a shorter directory", m.Socket, n, MaxSocketPath)
	}
	return nil
}

// MakePrivate creates dir and its parents with mode 0700 and refuses one that
// another user owns or may write to: whoever can write there can take the VM
// over. A dir that is a symlink is refused, so nobody can plant one in /tmp.
func MakePrivate(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	info, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	if !info.IsDir() {
		return fmt.Errorf("%s is not a directory: remove it", dir)
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return nil
	}
	if int(stat.Uid) != os.Geteuid() {
		return fmt.Errorf("%s belongs to user %d, not to you: remove it or choose another directory", dir, stat.Uid)
	}
	if info.Mode().Perm()&0o022 != 0 {
		return fmt.Errorf("%s may be written to by other users (mode %04o): chmod 700 it", dir, info.Mode().Perm())
	}
	return nil
}
