package fsops

import (
	"context"
	"errors"
	"io"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
)

// ChmodOptions is what Chmod sets.
type ChmodOptions struct {
	// Mode is 12 bits.
	Mode uint32
	// UID and GID are set where not nil.
	UID, GID *uint32
	// Recursive goes on to everything below a directory.
	Recursive bool
}

// Chmod sets mode and owner of path, following a link there. Recursively it
// takes a directory before its entries; links below it get the owner alone, and
// count only then. Entries that vanish, and directories that cannot be read, are
// passed over. The first other failure ends it; what is done stays. It returns
// the number of entries that were set.
//
// The owner is set first, so that set-id bits in the mode survive.
func Chmod(ctx context.Context, path string, opts ChmodOptions) (uint64, error) {
	abs, err := resolve(path)
	if err != nil {
		return 0, fault.NotFound(path, err)
	}
	handle, st, err := openPath(unix.AT_FDCWD, abs, 0)
	if err != nil {
		return 0, fault.NotFound(path, err)
	}
	defer closeFD(handle)
	c := chmodding{ctx: ctx, opts: opts, path: path}
	err = c.apply(handle, st, 0)
	return c.updated, err
}

type chmodding struct {
	ctx     context.Context //nolint:containedctx // one call of Chmod
	opts    ChmodOptions
	path    string
	updated uint64
}

func (c *chmodding) apply(handle int, st unix.Stat_t, depth int) error {
	if err := c.ctx.Err(); err != nil {
		return err
	}
	link := isType(st, unix.S_IFLNK)
	owner := c.opts.UID != nil || c.opts.GID != nil
	if link && !owner {
		return nil
	}
	// Opened before its mode may forbid it.
	var dir *directory
	if c.opts.Recursive && isType(st, unix.S_IFDIR) {
		if depth > maxDepth {
			return tooDeep(c.path)
		}
		if opened, err := openDir(handle, "."); err == nil {
			dir = opened
			defer dir.close()
		}
	}
	if owner {
		err := retry(func() error {
			return unix.Fchownat(handle, "", id(c.opts.UID), id(c.opts.GID), unix.AT_EMPTY_PATH)
		})
		if err != nil {
			return fault.FileErrno(c.path, err)
		}
	}
	if !link {
		if err := chmodFD(handle, c.opts.Mode); err != nil {
			return fault.FileErrno(c.path, err)
		}
	}
	c.updated++
	if dir == nil {
		return nil
	}
	return c.below(dir, depth)
}

func (c *chmodding) below(dir *directory, depth int) error {
	parent := c.path
	defer func() { c.path = parent }()
	for {
		names, err := dir.names(listBatch)
		for _, name := range names {
			c.path = join(parent, name)
			if err := c.entry(dir.fd, name, depth); err != nil {
				return err
			}
		}
		switch {
		case errors.Is(err, io.EOF) || err == nil && len(names) == 0:
			return nil
		case err != nil:
			return fault.FileErrno(parent, err)
		}
	}
}

func (c *chmodding) entry(dir int, name string, depth int) error {
	handle, st, err := openPath(dir, name, unix.O_NOFOLLOW)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return fault.FileErrno(c.path, err)
	}
	defer closeFD(handle)
	return c.apply(handle, st, depth+1)
}

// id is what chown takes: -1 leaves the owner as it is.
func id(v *uint32) int {
	if v == nil {
		return -1
	}
	return int(*v)
}

// chmodFD sets the mode of what the handle is on, which is not a link.
func chmodFD(handle int, mode uint32) error {
	err := retry(func() error { return unix.Fchmodat(handle, "", mode&0o7777, unix.AT_EMPTY_PATH) })
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) {
		// Before Linux 6.6.
		err = viaProc(retry(func() error { return unix.Chmod(procPath(handle), mode&0o7777) }))
	}
	return err
}

// chmodAt sets the mode of name in dir, which is not a link.
func chmodAt(dir int, name string, mode uint32) error {
	handle, st, err := openPath(dir, name, unix.O_NOFOLLOW)
	if err != nil {
		return err
	}
	defer closeFD(handle)
	if isType(st, unix.S_IFLNK) {
		return unix.ELOOP
	}
	return chmodFD(handle, mode)
}

func tooDeep(path string) error {
	return fault.FileRefused(path, "the tree is more than 2048 levels deep", unix.ELOOP)
}

// join puts name after path, which may end in a slash.
func join(path, name string) string {
	if path == "" || path[len(path)-1] == '/' {
		return path + name
	}
	return path + "/" + name
}
