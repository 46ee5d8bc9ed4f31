package boot

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
)

// Where the disks and the merged root are mounted before the switch, below the
// old root. upperMount is used again at the end, relative to it.
const (
	stage      = "/.iii"
	lowerMount = stage + "/lower"
	upperMount = stage + "/disk"
	rootMount  = stage + "/root"
)

// switchRoot mounts lower and upper, joins them by overlayfs and makes the
// result "/". The disks stay mounted below the old root, out of the reach of
// paths: a process that leaves its root by the old chroot trick arrives at the
// top of the mounts on "/", which is the new root.
func (g *Guest) switchRoot(ctx context.Context) error {
	lower, upper, err := findDisks(ctx, "/sys/block")
	if err != nil {
		return err
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make the mounts private: %w", err)
	}
	if err := mountRoot("/dev/"+lower, "/dev/"+upper); err != nil {
		return err
	}
	if err := enter(rootMount); err != nil {
		return fmt.Errorf("enter the new root: %w", err)
	}
	return nil
}

// mountRoot puts the merged file system on rootMount.
func mountRoot(lower, upper string) error {
	for _, dir := range []string{stage, lowerMount, upperMount, rootMount} {
		if err := ensureDir(dir, 0o700, false); err != nil {
			return fmt.Errorf("mount point: %w", err)
		}
	}
	if err := (mount{lower, lowerMount, "erofs", unix.MS_RDONLY, ""}).do(); err != nil {
		return fmt.Errorf("image disk: %w: is it a whole EROFS image, and has the kernel erofs?", err)
	}
	if err := (mount{upper, upperMount, "ext4", 0, "noblock_validity,no_prefetch_block_bitmaps"}).do(); err != nil {
		// Never formatted here: what is on it may be all that a user has.
		return fmt.Errorf("writable disk: %w: is it an ext4 file system, and undamaged (e2fsck -fn on the host)?", err)
	}
	changes, work := filepath.Join(upperMount, "upper"), filepath.Join(upperMount, "work")
	if err := makeUpper(changes, work, lowerMount); err != nil {
		return fmt.Errorf("writable disk: %w: is it full or damaged?", err)
	}
	options := "lowerdir=" + lowerMount + ",upperdir=" + changes + ",workdir=" + work +
		",index=off,redirect_dir=off,metacopy=off,xino=off"
	if err := (mount{"overlay", rootMount, "overlay", 0, options}).do(); err != nil {
		return fmt.Errorf("root file system: %w: has the kernel overlay?", err)
	}
	return nil
}

// makeUpper makes what overlayfs needs, unless it is there, and gives the
// directory that becomes "/" the mode, owner and times of the image's, unless it
// was in use before: overlayfs leaves a directory in work.
func makeUpper(upper, work, lower string) error {
	for dir, mode := range map[string]os.FileMode{upper: 0o755, work: 0o700} {
		if err := ensureDir(dir, mode, false); err != nil {
			return err
		}
	}
	if _, err := os.Lstat(filepath.Join(work, "work")); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	var want, has unix.Stat_t
	if err := errors.Join(unix.Stat(lower, &want), unix.Stat(upper, &has)); err != nil {
		return err
	}
	if has.Uid != want.Uid || has.Gid != want.Gid || has.Mode != want.Mode {
		if err := errors.Join(unix.Chown(upper, int(want.Uid), int(want.Gid)), unix.Chmod(upper, want.Mode&0o7777)); err != nil {
			return err
		}
	}
	return unix.UtimesNanoAt(unix.AT_FDCWD, upper, []unix.Timespec{want.Atim, want.Mtim}, 0)
}

// enter moves the mount at dir to "/" and makes it this process's root.
func enter(dir string) error {
	if err := unix.Chdir(dir); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return err
	}
	if err := unix.Chroot("."); err != nil {
		return err
	}
	return unix.Chdir("/")
}

// findDisks returns the names of lower and upper, waiting for them to appear:
// by serial where the VMM passes one, else in the order that holds everywhere.
func findDisks(ctx context.Context, sysBlock string) (lower, upper string, err error) {
	err = poll(ctx, deviceWait, func() bool {
		lower, upper = matchDisks(sysBlock)
		return lower != "" && upper != ""
	})
	if err != nil {
		names, _ := filepath.Glob(filepath.Join(sysBlock, "vd*"))
		for i := range names {
			names[i] = filepath.Base(names[i])
		}
		return "", "", fmt.Errorf("disks: no %s and %s after %v, only %q: were both given to the VMM, and is virtio_blk in /modules/order?",
			bootspec.LowerSerial, bootspec.UpperSerial, deviceWait, names)
	}
	return lower, upper, nil
}

func matchDisks(sysBlock string) (lower, upper string) {
	names, _ := filepath.Glob(filepath.Join(sysBlock, "vd?"))
	serials := false
	for _, path := range names {
		serial, err := os.ReadFile(filepath.Join(path, "serial"))
		if err != nil {
			continue
		}
		switch strings.TrimSpace(string(serial)) {
		case bootspec.LowerSerial:
			lower, serials = filepath.Base(path), true
		case bootspec.UpperSerial:
			upper, serials = filepath.Base(path), true
		}
	}
	// Glob sorts, so vda comes first.
	if !serials && len(names) >= 2 {
		return filepath.Base(names[0]), filepath.Base(names[1])
	}
	return lower, upper
}

// poll asks ready again and again until it is true, ctx ends, or limit is over.
// Devices that appear have no event that costs less.
func poll(ctx context.Context, limit time.Duration, ready func() bool) error {
	if ready() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
			if ready() {
				return nil
			}
		}
	}
}
