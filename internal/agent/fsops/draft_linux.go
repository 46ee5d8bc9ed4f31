package fsops

import (
	"crypto/rand"
	"encoding/hex"
	"errors"

	"golang.org/x/sys/unix"
)

// tempPrefix begins the name of everything that must not stay.
const tempPrefix = ".iii-tmp-"

func tempName() string {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	return tempPrefix + hex.EncodeToString(b[:])
}

// draft is a new file in the making in a directory. Until commit it has no name,
// or a temporary one where the file system knows no nameless files. It belongs
// to one goroutine, which calls discard in the end, after commit too.
type draft struct {
	dir int
	fd  int
	// temp is the temporary name, "" while there is none.
	temp string
}

// newDraft makes a draft in dir, a handle that stays open while the draft is.
// Its mode is 0600.
func newDraft(dir int) (*draft, error) {
	fd, err := openAt(dir, ".", unix.O_TMPFILE|unix.O_RDWR, 0o600)
	if err == nil {
		return &draft{dir: dir, fd: fd}, nil
	}
	// EISDIR and ENOENT are answers of file systems that do not know the flag.
	for _, unsupported := range []error{unix.EOPNOTSUPP, unix.EISDIR, unix.ENOENT, unix.EINVAL, unix.ENOSYS} {
		if errors.Is(err, unsupported) {
			return newNamedDraft(dir)
		}
	}
	return nil, err
}

func newNamedDraft(dir int) (*draft, error) {
	temp := tempName()
	fd, err := openAt(dir, temp, unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	return &draft{dir: dir, fd: fd, temp: temp}, nil
}

// Write implements io.Writer.
func (d *draft) Write(p []byte) (int, error) {
	done := 0
	for done < len(p) {
		n := 0
		err := retry(func() (err error) {
			n, err = unix.Write(d.fd, p[done:])
			return err
		})
		if err != nil {
			return done, err
		}
		done += n
	}
	return done, nil
}

// commit writes the draft to the disk and gives it its name, in place of a file
// or link that has it. A directory there is EISDIR.
func (d *draft) commit(name string) error {
	if err := retry(func() error { return unix.Fsync(d.fd) }); err != nil {
		return err
	}
	if d.temp == "" {
		err := d.link(name)
		if err == nil {
			return nil
		}
		// A name that is taken can only be replaced by a file with a name.
		if !errors.Is(err, unix.EEXIST) {
			return err
		}
		temp := tempName()
		if err := d.link(temp); err != nil {
			return err
		}
		d.temp = temp
	}
	if err := retry(func() error { return unix.Renameat(d.dir, d.temp, d.dir, name) }); err != nil {
		return err
	}
	d.temp = ""
	return nil
}

// link gives a nameless draft a name that is free.
func (d *draft) link(name string) error {
	err := retry(func() error {
		return unix.Linkat(unix.AT_FDCWD, procPath(d.fd), d.dir, name, unix.AT_SYMLINK_FOLLOW)
	})
	if err == nil || errors.Is(err, unix.EEXIST) || errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return err
	}
	return d.linkCopy(name, err)
}

// linkCopy stands in for link on a file system that makes nameless files but
// cannot name them afterwards: the content goes to a named draft, and that is
// renamed without replacing anything.
func (d *draft) linkCopy(name string, cause error) error {
	named, err := newNamedDraft(d.dir)
	if err != nil {
		return errors.Join(cause, err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(d.fd, &st); err != nil {
		named.discard()
		return err
	}
	err = errors.Join(
		copyData(nil, d.fd, named.fd, st.Size),
		unix.Fchown(named.fd, int(st.Uid), int(st.Gid)),
		unix.Fchmod(named.fd, st.Mode&0o7777),
		unix.Fsync(named.fd),
	)
	if err == nil {
		err = renameNoReplace(d.dir, named.temp, d.dir, name)
	}
	if err != nil {
		named.discard()
		return err
	}
	closeFD(d.fd)
	d.fd = named.fd
	return nil
}

// discard closes the draft and removes a temporary name that is left.
func (d *draft) discard() {
	if d.temp != "" {
		_ = unlink(d.dir, d.temp, 0) // best effort: the caller has an error to report
		d.temp = ""
	}
	closeFD(d.fd)
}

// renameNoReplace renames unless the new name is taken (EEXIST), in one step
// where the file system can.
func renameNoReplace(oldDir int, oldName string, newDir int, newName string) error {
	err := retry(func() error { return unix.Renameat2(oldDir, oldName, newDir, newName, unix.RENAME_NOREPLACE) })
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) {
		return renameSlowly(oldDir, oldName, newDir, newName)
	}
	return err
}

// renameSlowly is renameNoReplace in two steps. A file that appears between them
// is not replaced; an empty directory may be, by a directory.
func renameSlowly(oldDir int, oldName string, newDir int, newName string) error {
	if _, err := statAt(newDir, newName, unix.AT_SYMLINK_NOFOLLOW); err == nil {
		return unix.EEXIST
	}
	if st, err := statAt(oldDir, oldName, unix.AT_SYMLINK_NOFOLLOW); err == nil && !isType(st, unix.S_IFDIR) {
		err := retry(func() error { return unix.Linkat(oldDir, oldName, newDir, newName, 0) })
		if err == nil {
			return unlink(oldDir, oldName, 0)
		}
		if errors.Is(err, unix.EEXIST) {
			return err
		}
	}
	return retry(func() error { return unix.Renameat(oldDir, oldName, newDir, newName) })
}
