package fsops

import (
	"errors"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
)

// WriteOptions is how a file is written.
type WriteOptions struct {
	// Mode is the file's mode in the end: 12 bits.
	Mode uint32
	// Parents makes missing directories above it, with mode 0755.
	Parents bool
}

// Upload is a file being written. Until Commit nothing is to be seen of it. It
// is not for concurrent use; its owner calls Close in any case.
type Upload struct {
	path, name string
	dir        int
	draft      *draft
	mode       uint32
	written    uint64
}

// Create begins to write the file at path. A missing directory above it is a
// fault with the parents fix, a directory at path is refused.
func Create(path string, opts WriteOptions) (*Upload, error) {
	abs, err := resolve(path)
	if err != nil {
		return nil, err
	}
	dir, name := split(abs)
	if err := uploadParent(path, dir, opts.Parents); err != nil {
		return nil, err
	}
	st, err := statAt(unix.AT_FDCWD, abs, unix.AT_SYMLINK_NOFOLLOW)
	switch {
	case err == nil && isType(st, unix.S_IFDIR):
		return nil, fault.FileRefused(path, "is a directory", unix.EISDIR)
	case err != nil && (abs[len(abs)-1] == '/' || isDots(name)):
		return nil, fault.FileErrno(path, err)
	}
	handle, _, err := openPath(unix.AT_FDCWD, dir, unix.O_DIRECTORY)
	if err != nil {
		return nil, fault.FileErrno(path, err)
	}
	d, err := newDraft(handle)
	if err != nil {
		closeFD(handle)
		return nil, fault.FileErrno(path, err)
	}
	return &Upload{path: path, name: name, dir: handle, draft: d, mode: opts.Mode}, nil
}

// uploadParent checks or makes the directory of a file to be written. Other than
// for requireParent, one that cannot be looked at, for whatever reason, is missing
// (contract: fs::write).
func uploadParent(path, dir string, parents bool) error {
	st, err := statAt(unix.AT_FDCWD, dir, 0)
	switch {
	case err == nil && isType(st, unix.S_IFDIR):
		return nil
	case err == nil && parents:
		return fault.Exists(dir, "exists and is not a directory", unix.EEXIST)
	case err == nil:
		return fault.FileIO(path, unix.ENOTDIR)
	case parents:
		return makeAll(dir)
	}
	return fault.ParentMissing(path, dir, err)
}

// Write adds p to the file.
func (u *Upload) Write(p []byte) (int, error) {
	n, err := u.draft.Write(p)
	u.written += uint64(n)
	return n, fileError(u.path, err)
}

// Commit puts the file at its path, in one step, and returns its size in bytes.
// It replaces a file or a link there; a regular file's owner goes over to it.
func (u *Upload) Commit() (uint64, error) {
	st, err := statAt(u.dir, u.name, unix.AT_SYMLINK_NOFOLLOW)
	if err == nil && isType(st, unix.S_IFREG) {
		if err := unix.Fchown(u.draft.fd, int(st.Uid), int(st.Gid)); err != nil {
			return 0, fault.FileErrno(u.path, err)
		}
	}
	if err := unix.Fchmod(u.draft.fd, u.mode&0o7777); err != nil {
		return 0, fault.FileErrno(u.path, err)
	}
	if err := u.draft.commit(u.name); err != nil {
		if errors.Is(err, unix.EEXIST) {
			// Only a rename onto a directory says so here.
			return 0, fault.FileIO(u.path, err)
		}
		return 0, fault.FileErrno(u.path, err)
	}
	return u.written, nil
}

// Close ends the upload; without Commit nothing remains of it. It must be called
// once.
func (u *Upload) Close() {
	u.draft.discard()
	closeFD(u.dir)
}
