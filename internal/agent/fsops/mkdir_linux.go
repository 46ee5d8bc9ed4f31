package fsops

import (
	"errors"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
)

// parentMode is the mode of directories that are made on the way.
const parentMode = 0o755

// MakeDir makes the directory path with exactly mode (12 bits). With parents the
// directories above it are made too, and a directory that is there already is
// left alone: MakeDir then reports false.
func MakeDir(path string, mode uint32, parents bool) (created bool, err error) {
	abs, err := resolve(path)
	if err != nil {
		return false, err
	}
	if st, err := statAt(unix.AT_FDCWD, abs, 0); err == nil {
		return false, existing(path, st, parents)
	}
	dir, name := split(abs)
	if err := requireParent(path, dir, parents); err != nil {
		return false, err
	}
	if isDots(name) { // "/missing/..", where "missing" has just been made
		st, err := statAt(unix.AT_FDCWD, abs, 0)
		if err != nil {
			return false, fault.FileErrno(path, err)
		}
		return false, existing(path, st, parents)
	}
	parent, _, err := openPath(unix.AT_FDCWD, dir, unix.O_DIRECTORY)
	if err != nil {
		return false, fault.FileErrno(path, err)
	}
	defer closeFD(parent)
	err = retry(func() error { return unix.Mkdirat(parent, name, 0o700) })
	if errors.Is(err, unix.EEXIST) {
		if st, statErr := statAt(parent, name, 0); statErr == nil {
			return false, existing(path, st, parents)
		}
	}
	if err != nil {
		return false, fault.FileErrno(path, err)
	}
	if err := chmodAt(parent, name, mode); err != nil {
		err = errors.Join(err, unix.Unlinkat(parent, name, unix.AT_REMOVEDIR))
		return false, fault.FileErrno(path, err)
	}
	return true, nil
}

// existing is MakeDir's answer where something is at path already.
func existing(path string, st unix.Stat_t, parents bool) error {
	switch {
	case !isType(st, unix.S_IFDIR):
		return fault.Exists(path, "exists already and is not a directory", unix.EEXIST)
	case !parents:
		return fault.Exists(path, "exists already", unix.EEXIST)
	}
	return nil
}

// requireParent sees to it that dir, the directory of path, is there: it is made
// with parents, and must exist without.
func requireParent(path, dir string, parents bool) error {
	if parents {
		return makeAll(dir)
	}
	_, err := statAt(unix.AT_FDCWD, dir, 0)
	if errors.Is(err, unix.ENOENT) {
		return fault.ParentMissing(path, dir, err)
	}
	return fileError(path, err)
}

// makeAll makes dir and the directories above it.
func makeAll(dir string) error {
	st, err := statAt(unix.AT_FDCWD, dir, 0)
	if err == nil {
		return requireDir(dir, st)
	}
	if !errors.Is(err, unix.ENOENT) {
		return fault.FileErrno(dir, err)
	}
	if above, _ := split(dir); above != "/" {
		if err := makeAll(above); err != nil {
			return err
		}
	}
	err = retry(func() error { return unix.Mkdirat(unix.AT_FDCWD, dir, parentMode) })
	if errors.Is(err, unix.EEXIST) {
		if st, statErr := statAt(unix.AT_FDCWD, dir, 0); statErr == nil {
			return requireDir(dir, st)
		}
	}
	return fileError(dir, err)
}

func requireDir(path string, st unix.Stat_t) error {
	if isType(st, unix.S_IFDIR) {
		return nil
	}
	return fault.FileIO(path, unix.ENOTDIR)
}

// fileError is fault.FileErrno as an error, nil for nil.
func fileError(path string, err error) error {
	if err == nil {
		return nil
	}
	return fault.FileErrno(path, err)
}
