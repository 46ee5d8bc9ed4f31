package fsops

import (
	"context"
	"errors"
	"io"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
)

// inode names a file on its file system.
type inode struct{ dev, ino uint64 }

// copying copies a tree to another file system.
type copying struct {
	ctx context.Context //nolint:containedctx // one copy
	// root is the directory that holds the copy, and links where in it the copy
	// of a file with several names is.
	root  int
	links map[inode]string
	// path is where in the source the copy is, for errors.
	path string
}

// entry copies name in from to newName in to; rel is the copy's path from root.
func (c *copying) entry(from int, name string, to int, newName, rel string, depth int) error {
	if err := c.ctx.Err(); err != nil {
		return err
	}
	if depth > maxDepth {
		return tooDeep(c.path)
	}
	handle, st, err := openPath(from, name, unix.O_NOFOLLOW)
	if err != nil {
		return fault.FileErrno(c.path, err)
	}
	defer closeFD(handle)
	if isMount(handle) {
		return fault.FileRefused(c.path, "is a mount point and cannot be moved", unix.EBUSY)
	}
	key := inode{st.Dev, st.Ino}
	if st.Nlink > 1 && !isType(st, unix.S_IFDIR) {
		if first, ok := c.links[key]; ok {
			err := retry(func() error { return unix.Linkat(c.root, first, to, newName, 0) })
			if !errors.Is(err, unix.EMLINK) {
				return fileError(c.path, err)
			}
		}
		c.links[key] = rel
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		err = c.directory(handle, to, newName, rel, depth)
	case unix.S_IFREG:
		err = c.regular(handle, st, to, newName)
	case unix.S_IFLNK:
		err = c.symlink(from, name, to, newName)
	default:
		err = retry(func() error { return unix.Mknodat(to, newName, st.Mode&unix.S_IFMT|0o600, int(st.Rdev)) })
	}
	if err == nil {
		err = c.metadata(handle, st, to, newName)
	}
	return c.fault(err)
}

// fault classes err unless it is one already, or the context's.
func (c *copying) fault(err error) error { return readError(c.ctx, c.path, err) }

func (c *copying) directory(handle, to int, newName, rel string, depth int) error {
	if err := retry(func() error { return unix.Mkdirat(to, newName, 0o700) }); err != nil {
		return err
	}
	target, err := openDir(to, newName)
	if err != nil {
		return err
	}
	defer target.close()
	dir, err := openDir(handle, ".")
	if err != nil {
		return err
	}
	defer dir.close()
	path := c.path
	defer func() { c.path = path }()
	for {
		names, err := dir.names(listBatch)
		for _, name := range names {
			c.path = join(path, name)
			if err := c.entry(dir.fd, name, target.fd, name, rel+"/"+name, depth+1); err != nil {
				return err
			}
		}
		switch {
		case errors.Is(err, io.EOF), err == nil && len(names) == 0:
			return nil
		case err != nil:
			return err
		}
	}
}

func (c *copying) regular(handle int, st unix.Stat_t, to int, newName string) error {
	source, err := reopen(handle, unix.O_RDONLY|unix.O_NONBLOCK)
	if err != nil {
		return err
	}
	defer closeFD(source)
	target, err := openAt(to, newName, unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer closeFD(target) // syncDir reports what a close would
	return copyData(c.ctx.Err, source, target, st.Size)
}

func (c *copying) symlink(from int, name string, to int, newName string) error {
	b := make([]byte, unix.PathMax)
	n := 0
	err := retry(func() (err error) {
		n, err = unix.Readlinkat(from, name, b)
		return err
	})
	if err != nil {
		return err
	}
	return retry(func() error { return unix.Symlinkat(string(b[:n]), to, newName) })
}

// metadata gives the copy what the original has. The owner comes first: a change
// of it clears capabilities and set-id bits.
func (c *copying) metadata(handle int, st unix.Stat_t, to int, newName string) error {
	err := retry(func() error {
		return unix.Fchownat(to, newName, int(st.Uid), int(st.Gid), unix.AT_SYMLINK_NOFOLLOW)
	})
	if err != nil {
		return err
	}
	// Of links only the kernel's own security labels could be copied.
	if !isType(st, unix.S_IFLNK) {
		target := join(procPath(to), newName)
		err := copyXattrs(handle, func(name string, value []byte) error {
			return unix.Lsetxattr(target, name, value, 0)
		})
		if err != nil {
			return err
		}
		if err := chmodAt(to, newName, st.Mode); err != nil {
			return err
		}
	}
	times := []unix.Timespec{st.Atim, st.Mtim}
	return retry(func() error { return unix.UtimesNanoAt(to, newName, times, unix.AT_SYMLINK_NOFOLLOW) })
}

// isMount reports whether a file system, or a single file, is mounted there.
func isMount(handle int) bool {
	var stx unix.Statx_t
	err := retry(func() error { return unix.Statx(handle, "", unix.AT_EMPTY_PATH|unix.AT_NO_AUTOMOUNT, 0, &stx) })
	return err == nil && stx.Attributes_mask&unix.STATX_ATTR_MOUNT_ROOT != 0 && stx.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0
}

// copyBuffer is how much is copied at a time.
const copyBuffer = 256 << 10

// copyData copies size bytes and leaves holes as they are. stop, where not nil,
// is asked between reads and ends the copy with its error.
func copyData(stop func() error, source, target int, size int64) error {
	buffer := make([]byte, min(copyBuffer, max(size, 1)))
	for at := int64(0); at < size; {
		data, err := unix.Seek(source, at, unix.SEEK_DATA)
		switch {
		case errors.Is(err, unix.ENXIO):
			data = size
		case err != nil:
			data = at // holes are not told: everything is data
		}
		end, err := unix.Seek(source, data, unix.SEEK_HOLE)
		if err != nil || end <= data {
			end = size
		}
		if at, err = copyRange(stop, source, target, buffer, data, min(end, size)); err != nil {
			return err
		}
	}
	return retry(func() error { return unix.Ftruncate(target, size) })
}

// copyRange copies from at to end and returns where it got to: end, or beyond
// where the source ends before it.
func copyRange(stop func() error, source, target int, buffer []byte, at, end int64) (int64, error) {
	for at < end {
		if stop != nil {
			if err := stop(); err != nil {
				return at, err
			}
		}
		n := 0
		err := retry(func() (err error) {
			n, err = unix.Pread(source, buffer[:min(int64(len(buffer)), end-at)], at)
			return err
		})
		if err != nil {
			return at, err
		}
		if n == 0 {
			return end, nil // it was cut meanwhile: what is left is a hole
		}
		for done := 0; done < n; {
			written := 0
			err := retry(func() (err error) {
				written, err = unix.Pwrite(target, buffer[done:n], at+int64(done))
				return err
			})
			if err != nil {
				return at, err
			}
			done += written
		}
		at += int64(n)
	}
	return at, nil
}

// copyXattrs calls set with the extended attributes of what the handle is on. One
// that set's file system cannot keep is left out, unless permissions hang on it:
// capabilities and access lists.
func copyXattrs(handle int, set func(name string, value []byte) error) error {
	source := procPath(handle)
	names, err := xattr(func(b []byte) (int, error) { return unix.Listxattr(source, b) })
	if errors.Is(err, unix.EOPNOTSUPP) {
		return nil
	}
	if err != nil {
		return viaProc(err)
	}
	for name := range strings.SplitSeq(strings.TrimSuffix(string(names), "\x00"), "\x00") {
		if name == "" {
			continue
		}
		value, err := xattr(func(b []byte) (int, error) { return unix.Getxattr(source, name, b) })
		if errors.Is(err, unix.ENODATA) {
			continue
		}
		if err == nil {
			err = retry(func() error { return set(name, value) })
		}
		matters := name == "security.capability" || strings.HasPrefix(name, "system.posix_acl_")
		if err != nil && (matters || !errors.Is(err, unix.EOPNOTSUPP)) {
			return err
		}
	}
	return nil
}

// xattr calls get with a buffer that is large enough.
func xattr(get func([]byte) (int, error)) ([]byte, error) {
	for size := 1 << 10; ; size *= 4 {
		b := make([]byte, size)
		n := 0
		err := retry(func() (err error) {
			n, err = get(b)
			return err
		})
		switch {
		case errors.Is(err, unix.ERANGE) && size < 1<<20:
			continue
		case err != nil:
			return nil, err
		}
		return b[:n], nil
	}
}
