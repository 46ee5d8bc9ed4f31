// Package shimdriver is the production vm.Driver: it finds what a VMM needs on
// this host, and runs one krun-shim process per VM.
package shimdriver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vmassets"
)

// auto lets the driver choose the VMM.
const auto = "auto"

// Config is what a Driver works with. Roots, Log and Getenv are required.
type Config struct {
	// VMM is bootspec.QEMU, bootspec.Libkrun or "auto" (also when empty): what a
	// VM gets whose request leaves it open.
	VMM string
	// Roots is where the VMM's files are found and made.
	Roots layout.Roots
	// Log gets what was chosen and why.
	Log *slog.Logger
	// Getenv looks up III_KRUN_SHIM, III_GUEST_AGENT, III_QEMU, III_VM_KERNEL,
	// III_SANDBOX_QEMU_MACHINE, III_SANDBOX_SNAPSHOT and PATH; usually os.Getenv.
	Getenv func(string) string
	// Version names this build.
	Version string
	// SaveTimeout bounds the making of a snapshot, which the VM does without
	// then; 0 means a minute.
	SaveTimeout time.Duration
}

// Driver runs VMs. Its methods may be called concurrently.
type Driver struct {
	cfg Config
	// slow says once that VMs are emulated.
	slow sync.Once
	// hint says once that they need not be.
	hint sync.Once
}

// Driver is the production driver.
var _ vm.Driver = (*Driver)(nil)

// New returns a driver. It touches nothing on the host; an unknown or unusable
// Config.VMM is an error.
func New(cfg Config) (*Driver, error) {
	d := &Driver{cfg: cfg}
	if _, err := d.choose(""); err != nil {
		return nil, err
	}
	return d, nil
}

// choose resolves the VMM of a request.
func (d *Driver) choose(requested string) (string, error) {
	for _, name := range []string{requested, d.cfg.VMM, auto} {
		switch name {
		case "":
			continue
		case auto:
			return d.fastest(), nil
		case bootspec.QEMU, bootspec.Libkrun:
			return name, nil
		default:
			return "", fmt.Errorf("vmm %q is unknown: use auto, qemu or libkrun (--vmm, III_SANDBOX_VMM)", name)
		}
	}
	return bootspec.QEMU, nil
}

// fastest is libkrun where the host can run it: its processor lets it, and the
// libraries are there. Whether they load is found out with the first VM.
func (d *Driver) fastest() string {
	if vmassets.HardwareVirtualization() != nil {
		return bootspec.QEMU
	}
	if _, err := vmassets.FindLibkrun(d.cfg.Roots.VMM(), d.cfg.Getenv); err != nil {
		d.hint.Do(func() {
			d.cfg.Log.Warn("this host has hardware virtualization, but VMs are emulated since libkrun cannot be used", "error", err)
		})
		return bootspec.QEMU
	}
	return bootspec.Libkrun
}

// Prepare checks everything about this host that a boot would trip over, names
// what is missing and how to get it, and fills in the VMM's part of spec. The
// upper is made, except a durable one that exists.
func (d *Driver) Prepare(ctx context.Context, spec *bootspec.Spec) error {
	vmm, err := d.choose(spec.VMM)
	if err != nil {
		return err
	}
	spec.VMM = vmm
	if err := checkLower(spec.Lower.Path); err != nil {
		return err
	}
	if err := checkSpace(spec.Dir); err != nil {
		return err
	}
	if _, err := vmassets.FindShim(d.cfg.Getenv, d.cfg.Roots.VMM()); err != nil {
		return err
	}
	prepare := d.prepareQEMU
	if vmm == bootspec.Libkrun {
		prepare = d.prepareLibkrun
	}
	if err := prepare(ctx, spec); err != nil {
		return err
	}
	return prepareUpper(spec.Upper)
}

// erofsMagic is the superblock's, at byte 1024 (EROFS on-disk format).
const (
	erofsMagic  = "\xe2\xe1\xf5\xe0"
	erofsOffset = 1024
)

// checkLower refuses what the guest could not mount.
func checkLower(path string) error {
	file, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("read the image: %w", err)
	}
	defer func() { _ = file.Close() }()
	info, err := file.Stat()
	if err != nil {
		return fmt.Errorf("read the image: %w", err)
	}
	if !info.Mode().IsRegular() {
		return fmt.Errorf("the image %s is not a regular file", path)
	}
	magic := make([]byte, len(erofsMagic))
	if _, err := file.ReadAt(magic, erofsOffset); err != nil || string(magic) != erofsMagic {
		return fmt.Errorf("the image %s is not an EROFS file system: remove it and pull it again", path)
	}
	return nil
}

// minSpace is what a boot may write in the first seconds: the overlay's and the
// journal's first blocks, logs.
const minSpace = 64 << 20

func checkSpace(dir string) error {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return fmt.Errorf("look for disk space in %s: %w", dir, err)
	}
	if free := uint64(st.Bavail) * uint64(st.Bsize); free < minSpace { //nolint:unconvert // the types differ per system; both are positive
		return fmt.Errorf("only %d MiB are free where %s lies, a VM needs %d: free some, or set III_SANDBOX_STATE_DIR to another disk",
			free>>20, dir, minSpace>>20)
	}
	return nil
}

func prepareUpper(disk bootspec.Disk) error {
	if !disk.Durable {
		return vmassets.CreateUpper(disk.Path, vmassets.Ephemeral)
	}
	err := vmassets.CreateUpper(disk.Path, vmassets.Durable)
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	return err
}

// guestArch is that of this host: no VMM here runs another one's kernel.
const guestArch = runtime.GOARCH
