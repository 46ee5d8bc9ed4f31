package boot

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// mount is one call of mount(2).
type mount struct {
	source, target, fstype string
	flags                  uintptr
	data                   string
}

// do mounts; what is already there counts as done.
func (m mount) do() error {
	err := unix.Mount(m.source, m.target, m.fstype, m.flags, m.data)
	if err != nil && !errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("mount %s (%s) on %s: %w", m.source, m.fstype, m.target, err)
	}
	return nil
}

// ControlGroups is where the control groups of a kernel that has them are.
const ControlGroups = "/sys/fs/cgroup"

// systemMount is a mount whose mount point is made first.
type systemMount struct {
	mount
	mode os.FileMode
	// link allows the mount point to be a symbolic link to a directory of the
	// image.
	link bool
	// optional ones may be missing in the kernel.
	optional bool
}

// kernelFileSystems are mounted below "/" once it is the guest's. The user of
// the guest is root, so /sys is writable and nothing is masked. Those in memory
// are bounded to less than all of it together: a full one would end the kernel.
func kernelFileSystems() []systemMount {
	const nodev = unix.MS_NOSUID | unix.MS_NODEV
	const plain = nodev | unix.MS_NOEXEC
	return []systemMount{
		{mount: mount{"proc", "/proc", "proc", plain, ""}, mode: 0o555},
		{mount: mount{"sysfs", "/sys", "sysfs", plain, ""}, mode: 0o555},
		{mount: mount{"devtmpfs", "/dev", "devtmpfs", unix.MS_NOSUID, "mode=0755,size=4m"}, mode: 0o755},
		{mount: mount{"devpts", "/dev/pts", "devpts", unix.MS_NOSUID | unix.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620,gid=5"}, mode: 0o755},
		{mount: mount{"tmpfs", "/dev/shm", "tmpfs", plain, "mode=1777"}, mode: 0o1777},
		{mount: mount{"tmpfs", "/run", "tmpfs", nodev, "mode=0755,size=10%"}, mode: 0o755, link: true},
		{mount: mount{"cgroup2", ControlGroups, "cgroup2", plain, ""}, mode: 0o555, optional: true},
	}
}

func mountAll(list []systemMount) error {
	for _, m := range list {
		if err := ensureDir(m.target, m.mode, m.link); err != nil {
			if m.optional {
				continue
			}
			return fmt.Errorf("mount point: %w", err)
		}
		if err := m.do(); err != nil && !m.optional {
			return err
		}
	}
	return nil
}

// ensureDir makes path a directory: one that is missing is made, and anything
// else, such as a link or file of a strange image, gives way to one. A link to a
// directory may stay if link is set.
func ensureDir(path string, mode os.FileMode, link bool) error {
	info, err := os.Lstat(path)
	switch {
	case err == nil && info.IsDir():
		return nil
	case err == nil:
		if target, statErr := os.Stat(path); link && statErr == nil && target.IsDir() {
			return nil
		}
		if err := os.Remove(path); err != nil {
			return err
		}
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	if err := os.Mkdir(path, mode.Perm()); err != nil {
		return err
	}
	// mkdir(2) applies the umask, and Go keeps the sticky bit elsewhere.
	return unix.Chmod(path, uint32(mode))
}

// linkDevices adds the links that programs expect in dev.
func linkDevices(dev string) error {
	var errs []error
	for name, target := range map[string]string{
		"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2",
	} {
		if err := os.Symlink(target, filepath.Join(dev, name)); err != nil && !errors.Is(err, fs.ErrExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// hideDevices removes the nodes that nothing but the agent has a use for and
// that it has open: the raw disks and the ports, one of which opened twice may
// end the VM. Whoever is root in the guest can make them again; it is no
// protection, only out of the way.
func hideDevices(dev string) error {
	var errs []error
	for _, pattern := range []string{"vd[a-z]*", "vport*"} {
		names, err := filepath.Glob(filepath.Join(dev, pattern))
		errs = append(errs, err)
		for _, name := range names {
			errs = append(errs, os.Remove(name))
		}
	}
	return errors.Join(errs...)
}
