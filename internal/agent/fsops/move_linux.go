package fsops

import (
	"context"
	"errors"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
)

// Move renames src to dst; dst is what it is called in the end, never a directory
// to move into. Without overwrite dst must not exist; a dangling link there does
// not count and is replaced. Between file systems, and where an overlay cannot
// rename a directory, the tree is copied with modes, owners, times, extended
// attributes (as far as dst's file system has them; see copyXattrs), links and
// special files, the copy takes dst's place in one step, and src is removed.
// Until that step src is whole and dst as it was.
func Move(ctx context.Context, src, dst string, overwrite bool) error {
	from, err := resolve(src)
	if err != nil {
		return fault.NotFound(src, err)
	}
	if _, err := statAt(unix.AT_FDCWD, from, 0); err != nil {
		return fault.NotFound(src, err)
	}
	to, err := resolve(dst)
	if err != nil {
		return err
	}
	if !overwrite {
		if overwrite, err = replaceable(dst, to); err != nil {
			return err
		}
	} else if done, err := sameFile(from, to); done || err != nil {
		return fileError(src, err)
	}
	if overwrite {
		err = retry(func() error { return unix.Renameat(unix.AT_FDCWD, from, unix.AT_FDCWD, to) })
	} else {
		err = renameNoReplace(unix.AT_FDCWD, from, unix.AT_FDCWD, to)
	}
	switch {
	case errors.Is(err, unix.EXDEV):
		return moveAcross(ctx, src, dst, from, to, overwrite)
	case errors.Is(err, unix.ENOENT):
		if _, statErr := statAt(unix.AT_FDCWD, from, unix.AT_SYMLINK_NOFOLLOW); statErr != nil {
			return fault.NotFound(src, err)
		}
		return fault.NotFound(dst, err)
	case errors.Is(err, unix.ENOTEMPTY), overwrite && errors.Is(err, unix.EEXIST):
		return fault.FileIO(dst, unix.ENOTEMPTY)
	}
	return fileError(dst, err)
}

// replaceable refuses a dst that exists, and reports whether something is there
// all the same that may be replaced: a dangling link.
func replaceable(dst, to string) (bool, error) {
	_, err := statAt(unix.AT_FDCWD, to, 0)
	switch {
	case err == nil:
		return false, fault.Exists(dst, "exists already: pass overwrite:true to replace it", unix.EEXIST)
	case !errors.Is(err, unix.ENOENT):
		return false, nil // the rename says what is wrong
	}
	st, err := statAt(unix.AT_FDCWD, to, unix.AT_SYMLINK_NOFOLLOW)
	return err == nil && isType(st, unix.S_IFLNK), nil
}

// sameFile deals with two names of one file, which rename leaves alone: it
// removes from, unless it is the very same entry as to. It reports whether that
// was all there was to do.
func sameFile(from, to string) (bool, error) {
	a, errA := statAt(unix.AT_FDCWD, from, unix.AT_SYMLINK_NOFOLLOW)
	b, errB := statAt(unix.AT_FDCWD, to, unix.AT_SYMLINK_NOFOLLOW)
	if errA != nil || errB != nil || a.Dev != b.Dev || a.Ino != b.Ino || isType(a, unix.S_IFDIR) || a.Nlink < 2 {
		return false, nil //nolint:nilerr // the rename says what is wrong
	}
	fromDir, fromName := split(from)
	toDir, toName := split(to)
	da, errA := statAt(unix.AT_FDCWD, fromDir, 0)
	db, errB := statAt(unix.AT_FDCWD, toDir, 0)
	if errA != nil || errB != nil || da.Dev == db.Dev && da.Ino == db.Ino && fromName == toName {
		return false, nil //nolint:nilerr // the rename says what is wrong
	}
	return true, unlink(unix.AT_FDCWD, from, 0)
}

// place is an entry of a directory that is held open.
type place struct {
	dir  int
	name string
}

func openPlace(path, shown string) (place, error) {
	dir, name := split(path)
	if isDots(name) {
		return place{}, fault.FileRefused(shown, "cannot be moved by this name: give the directory's own path", unix.EBUSY)
	}
	handle, _, err := openPath(unix.AT_FDCWD, dir, unix.O_DIRECTORY)
	return place{handle, name}, fileError(shown, err)
}

// moveAcross moves by copying.
func moveAcross(ctx context.Context, src, dst, from, to string, overwrite bool) (err error) {
	source, err := openPlace(from, src)
	if err != nil {
		return err
	}
	defer closeFD(source.dir)
	target, err := openPlace(to, dst)
	if err != nil {
		return err
	}
	defer closeFD(target.dir)
	if err := checkMove(source, target, src, dst, overwrite); err != nil {
		return err
	}

	temp := tempName()
	c := copying{ctx: ctx, root: target.dir, links: map[inode]string{}, path: src}
	defer func() {
		if err != nil {
			// The copy goes even when ctx has ended.
			r := removal{ctx: context.WithoutCancel(ctx), path: dst}
			_ = r.tree(target.dir, temp, 0) // err is what matters
		}
	}()
	if err := c.entry(source.dir, source.name, target.dir, temp, temp, 0); err != nil {
		return err
	}
	if err := syncDir(target.dir); err != nil {
		return fault.FileErrno(dst, err)
	}
	if overwrite {
		err = retry(func() error { return unix.Renameat(target.dir, temp, target.dir, target.name) })
	} else {
		err = renameNoReplace(target.dir, temp, target.dir, target.name)
	}
	if err != nil {
		return fault.FileErrno(dst, err)
	}
	// From here on the move has happened: half a source helps nobody.
	r := removal{ctx: context.WithoutCancel(ctx), path: src}
	if removeErr := r.tree(source.dir, source.name, 0); removeErr != nil {
		return fault.FileRefused(src, "was copied to its destination but could not be removed: "+removeErr.Error(), removeErr)
	}
	return nil
}

// checkMove refuses, before anything is copied, what a rename would refuse.
func checkMove(source, target place, src, dst string, overwrite bool) error {
	st, err := statAt(source.dir, source.name, unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return fault.FileErrno(src, err)
	}
	isDir := isType(st, unix.S_IFDIR)
	if isDir {
		inside, err := within(target.dir, st)
		switch {
		case err != nil:
			return fault.FileErrno(dst, err)
		case inside:
			return fault.FileRefused(dst, "is inside of the directory to be moved", unix.EINVAL)
		}
	}
	old, err := statAt(target.dir, target.name, unix.AT_SYMLINK_NOFOLLOW)
	oldIsDir := isType(old, unix.S_IFDIR)
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil
	case err != nil:
		return fault.FileErrno(dst, err)
	case !overwrite:
		return fault.Exists(dst, "exists already: pass overwrite:true to replace it", unix.EEXIST)
	case isDir && !oldIsDir:
		return fault.FileIO(dst, unix.ENOTDIR)
	case !isDir && oldIsDir:
		return fault.FileIO(dst, unix.EISDIR)
	case !oldIsDir:
		return nil
	}
	dir, err := openDir(target.dir, target.name)
	if err != nil {
		return fault.FileErrno(dst, err)
	}
	defer dir.close()
	if names, _ := dir.names(1); len(names) > 0 {
		return fault.FileIO(dst, unix.ENOTEMPTY)
	}
	return nil
}

// within reports whether the directory dir is the one that st describes, or
// below it.
func within(dir int, st unix.Stat_t) (bool, error) {
	at, err := openAt(dir, ".", unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return false, err
	}
	defer func() { closeFD(at) }()
	for range maxDepth {
		var here unix.Stat_t
		if err := unix.Fstat(at, &here); err != nil {
			return false, err
		}
		if here.Dev == st.Dev && here.Ino == st.Ino {
			return true, nil
		}
		up, above, err := openPath(at, "..", unix.O_DIRECTORY)
		if err != nil {
			return false, err
		}
		closeFD(at)
		at = up
		if above.Dev == here.Dev && above.Ino == here.Ino {
			return false, nil
		}
	}
	return false, unix.ELOOP
}

// syncDir writes the file system of dir to the disk.
func syncDir(dir int) error {
	fd, err := openAt(dir, ".", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer closeFD(fd)
	return unix.Syncfs(fd)
}
