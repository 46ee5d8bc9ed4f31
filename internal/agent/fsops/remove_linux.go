package fsops

import (
	"context"
	"errors"
	"io"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
)

// Remove removes what is at path: a directory only when it is empty or with
// recursive, a link never with what it points to. A removal that fails or is cut
// short has removed a part.
func Remove(ctx context.Context, path string, recursive bool) error {
	abs, err := resolve(path)
	if err != nil {
		return err
	}
	st, err := statAt(unix.AT_FDCWD, abs, unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return fault.FileErrno(path, err)
	}
	dir, name := split(abs)
	switch {
	case name == "":
		return fault.FileRefused(path, "is the root directory and cannot be removed: remove what is in it", unix.EBUSY)
	case isDots(name):
		return fault.FileRefused(path, "cannot be removed by this name: give the directory's own path", unix.EBUSY)
	}
	parent, _, err := openPath(unix.AT_FDCWD, dir, unix.O_DIRECTORY)
	if err != nil {
		return fault.FileErrno(path, err)
	}
	defer closeFD(parent)
	if !isType(st, unix.S_IFDIR) {
		return fileError(path, unlink(parent, name, 0))
	}
	if abs[len(abs)-1] == '/' {
		if st, err := statAt(parent, name, unix.AT_SYMLINK_NOFOLLOW); err == nil && isType(st, unix.S_IFLNK) {
			return fault.FileRefused(path, "is a symbolic link: leave the slash out to remove the link", unix.ENOTDIR)
		}
	}
	if recursive {
		return (&removal{ctx: ctx, path: path}).tree(parent, name, 0)
	}
	err = unlink(parent, name, unix.AT_REMOVEDIR)
	if errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.EEXIST) {
		return fault.NotEmpty(path, err)
	}
	return fileError(path, err)
}

func unlink(dir int, name string, flags int) error {
	return retry(func() error { return unix.Unlinkat(dir, name, flags) })
}

// removal removes a tree.
type removal struct {
	ctx  context.Context //nolint:containedctx // one removal
	path string
}

// tree removes name in parent with everything below it.
func (r *removal) tree(parent int, name string, depth int) error {
	if err := r.ctx.Err(); err != nil {
		return err
	}
	err := unlink(parent, name, 0)
	if err == nil || errors.Is(err, unix.ENOENT) {
		return nil
	}
	// A directory is EISDIR on Linux, EPERM by POSIX.
	if !errors.Is(err, unix.EISDIR) && !errors.Is(err, unix.EPERM) {
		return fault.FileErrno(r.path, err)
	}
	if depth > maxDepth {
		return tooDeep(r.path)
	}
	dir, openErr := openDir(parent, name)
	switch {
	case errors.Is(openErr, unix.ENOTDIR), errors.Is(openErr, unix.ELOOP):
		return fault.FileErrno(r.path, err)
	case errors.Is(openErr, unix.ENOENT):
		return nil
	case openErr != nil:
		return fault.FileErrno(r.path, openErr)
	}
	defer dir.close()
	for {
		removed, err := r.entries(dir, depth)
		if err != nil {
			return err
		}
		err = unlink(parent, name, unix.AT_REMOVEDIR)
		switch {
		case err == nil, errors.Is(err, unix.ENOENT):
			return nil
		case errors.Is(err, unix.ENOTEMPTY) && removed > 0:
			// Some file systems skip entries while others are removed; and
			// somebody may be adding some.
			if err := dir.rewind(); err != nil {
				return fault.FileErrno(r.path, err)
			}
		default:
			return fault.FileErrno(r.path, err)
		}
	}
}

// entries removes what it reads of dir and returns how many that were.
func (r *removal) entries(dir *directory, depth int) (int, error) {
	path, removed := r.path, 0
	defer func() { r.path = path }()
	for {
		names, err := dir.names(listBatch)
		for _, name := range names {
			r.path = join(path, name)
			if err := r.tree(dir.fd, name, depth+1); err != nil {
				return removed, err
			}
			removed++
		}
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, unix.ENOENT), err == nil && len(names) == 0:
			return removed, nil
		case err != nil:
			return removed, fault.FileErrno(path, err)
		}
	}
}
