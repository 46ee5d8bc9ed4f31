package procs

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	// programsGroup is the control group of all programs.
	programsGroup = "programs"
	// maxGroups is how many groups are below it; programs share them beyond that.
	maxGroups = 16
	// reservedTasks is how many threads programs leave to the kernel and to this
	// process, which dies where it cannot make one.
	reservedTasks = 128
	minTasks      = 64
)

// groups are the control groups (version 2) of the programs: all of them together
// weigh as much as one busy thread outside, and each start as much as another one,
// however many processes it makes. So a fork bomb slows down neither this process
// nor the programs started next.
type groups struct {
	// dir is the group that the others are in.
	dir *os.File
	// made is how many of them there are, by the names 0, 1, ...
	made int
	// next is the group to share when all are in use.
	next int
}

// Group puts every program that is started from now on into a control group below
// root, where cgroup2 is mounted; a kernel without that, or without its CPU
// controller, is no error. It must be called before Start, at most once, and is
// for a table that lives as long as its process.
func (t *Table) Group(root string) error {
	known, err := os.ReadFile(filepath.Join(root, "cgroup.controllers"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	controllers := strings.Fields(string(known))
	if !slices.Contains(controllers, "cpu") {
		return nil
	}
	path := filepath.Join(root, programsGroup)
	if err := os.Mkdir(path, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	if err := setGroup(root, "cgroup.subtree_control", "+cpu"); err != nil {
		return err
	}
	if err := setGroup(path, "cgroup.subtree_control", "+cpu"); err != nil {
		return err
	}
	if slices.Contains(controllers, "pids") {
		if err := limitTasks(root, path); err != nil {
			return err
		}
	}
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	t.groups = &groups{dir: dir}
	return nil
}

// limitTasks keeps programs from taking every thread that the kernel has.
func limitTasks(root, path string) error {
	text, err := os.ReadFile("/proc/sys/kernel/threads-max")
	if err != nil {
		return err
	}
	most, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return err
	}
	if err := setGroup(root, "cgroup.subtree_control", "+pids"); err != nil {
		return err
	}
	return setGroup(path, "pids.max", strconv.Itoa(max(most-reservedTasks, minTasks)))
}

func setGroup(group, file, value string) error {
	// The files are there; nothing is to be made.
	f, err := os.OpenFile(filepath.Join(group, file), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	return errors.Join(err, f.Close())
}

// pick opens a group to start a program in: one that is empty, where there is one
// or can be one. The caller closes it: open files of this process do not grow with
// the programs that ran at once.
func (g *groups) pick() (int, error) {
	for i := range g.made {
		group, err := g.open(i)
		if err != nil {
			return -1, err
		}
		if empty(group) {
			return group, nil
		}
		_ = unix.Close(group)
	}
	if g.made < maxGroups {
		group, err := g.open(g.made)
		if err == nil {
			g.made++
		}
		return group, err
	}
	g.next = (g.next + 1) % g.made
	return g.open(g.next)
}

// open opens a group, and makes it where it is not there, or not any more: the
// guest's user may remove an empty one.
func (g *groups) open(i int) (int, error) {
	dir, name := int(g.dir.Fd()), strconv.Itoa(i)
	const flags = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC
	group, err := unix.Openat(dir, name, flags, 0)
	if errors.Is(err, unix.ENOENT) {
		if err = unix.Mkdirat(dir, name, 0o755); err == nil {
			group, err = unix.Openat(dir, name, flags, 0)
		}
	}
	if err != nil {
		return -1, fmt.Errorf("control group %s: %w", name, err)
	}
	return group, nil
}

// empty reports whether no process is in the group, or below it.
func empty(group int) bool {
	fd, err := unix.Openat(group, "cgroup.events", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd) //nolint:errcheck // it was only read
	b := make([]byte, 128)
	n, err := unix.Read(fd, b)
	return err == nil && bytes.Contains(b[:n], []byte("populated 0"))
}

// start is syscall.ForkExec in a group of g, or in this process's own where the
// guest's user has made the groups unusable.
func (g *groups) start(program string, argv []string, attr *syscall.ProcAttr) (int, error) {
	if g == nil {
		return syscall.ForkExec(program, argv, attr)
	}
	if group, err := g.pick(); err == nil {
		attr.Sys.UseCgroupFD, attr.Sys.CgroupFD = true, group
		pid, err := syscall.ForkExec(program, argv, attr)
		_ = unix.Close(group)
		if !unusable(err) {
			return pid, err
		}
		attr.Sys.UseCgroupFD = false
	}
	return syscall.ForkExec(program, argv, attr)
}

// unusable reports whether err is about the control group: execve has none of
// these errors.
func unusable(err error) bool {
	var errno syscall.Errno
	return errors.As(err, &errno) && slices.Contains(
		[]syscall.Errno{syscall.EBUSY, syscall.ENODEV, syscall.EOPNOTSUPP, syscall.EBADF, syscall.ENOSYS}, errno)
}
