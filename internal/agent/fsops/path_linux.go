package fsops

import (
	"context"
	"errors"
	"io"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
)

// maxDepth is how deep a tree may be: every level on the way down is an open
// file. A path of 4096 bytes has no more.
const maxDepth = 2048

// resolve makes path absolute and refuses what is none.
func resolve(path string) (string, error) {
	switch {
	case path == "":
		return "", fault.NotFound(path, unix.ENOENT)
	case strings.IndexByte(path, 0) >= 0:
		return "", fault.FileIO(path, unix.EINVAL)
	case path[0] != '/':
		return "/" + path, nil
	}
	return path, nil
}

// split cuts an absolute path into the directory and the name in it. Trailing
// slashes do not count; the name is empty for "/" alone.
func split(path string) (dir, name string) {
	path = strings.TrimRight(path, "/")
	i := strings.LastIndexByte(path, '/')
	if i < 0 {
		return "/", ""
	}
	if dir = strings.TrimRight(path[:i], "/"); dir == "" {
		dir = "/"
	}
	return dir, path[i+1:]
}

// isDots reports whether name does not name an entry of its directory.
func isDots(name string) bool { return name == "" || name == "." || name == ".." }

// retry calls f until no signal interrupts it.
func retry(f func() error) error {
	for {
		if err := f(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// openAt opens name in dir, which may be unix.AT_FDCWD for an absolute path.
func openAt(dir int, name string, flags int, perm uint32) (fd int, err error) {
	err = retry(func() error {
		fd, err = unix.Openat(dir, name, flags|unix.O_CLOEXEC, perm)
		return err
	})
	return fd, err
}

// openPath opens a handle on what is at name; nothing happens to devices and
// FIFOs by that.
func openPath(dir int, name string, flags int) (int, unix.Stat_t, error) {
	var st unix.Stat_t
	fd, err := openAt(dir, name, unix.O_PATH|flags, 0)
	if err != nil {
		return -1, st, err
	}
	if err := unix.Fstat(fd, &st); err != nil {
		closeFD(fd)
		return -1, st, err
	}
	return fd, st, nil
}

// reopen opens what the handle fd is on.
func reopen(fd, flags int) (int, error) {
	opened, err := openAt(unix.AT_FDCWD, procPath(fd), flags, 0)
	return opened, viaProc(err)
}

// errNoProc says why procPath leads nowhere.
var errNoProc = errors.New("/proc is not mounted in the sandbox, and file operations need it: mount it again")

// viaProc is the error of a call with a procPath, which does not mean what it says
// when the guest's user has unmounted /proc.
func viaProc(err error) error {
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
		if _, missing := statAt(unix.AT_FDCWD, "/proc/self/fd", 0); missing != nil {
			return errNoProc
		}
	}
	return err
}

func procPath(fd int) string { return "/proc/self/fd/" + strconv.Itoa(fd) }

// closeFD closes what was only read, or has been synced: nothing is lost by an
// error.
func closeFD(fd int) { _ = unix.Close(fd) }

func statAt(dir int, name string, flags int) (unix.Stat_t, error) {
	var st unix.Stat_t
	err := retry(func() error { return unix.Fstatat(dir, name, &st, flags) })
	return st, err
}

func isType(st unix.Stat_t, format uint32) bool { return st.Mode&unix.S_IFMT == format }

// file is an open file that reads without Go's poller, so that a special file
// answers EAGAIN instead of waiting, and not beyond the end of its context. It
// is not for concurrent use.
type file struct {
	ctx context.Context //nolint:containedctx // a reader for the length of one operation
	fd  int
}

// Read implements io.Reader.
func (f *file) Read(p []byte) (int, error) {
	return f.read(func() (int, error) { return unix.Read(f.fd, p) }, len(p))
}

// ReadAt implements io.ReaderAt.
func (f *file) ReadAt(p []byte, off int64) (int, error) {
	done := 0
	for done < len(p) {
		n, err := f.read(func() (int, error) { return unix.Pread(f.fd, p[done:], off+int64(done)) }, len(p)-done)
		done += n
		if err != nil {
			return done, err
		}
	}
	return done, nil
}

func (f *file) read(call func() (int, error), want int) (n int, err error) {
	if err := f.ctx.Err(); err != nil {
		return 0, err
	}
	err = retry(func() error {
		n, err = call()
		return err
	})
	switch {
	case err != nil:
		return 0, err
	case n == 0 && want > 0:
		return 0, io.EOF
	}
	return n, nil
}

func (f *file) close() { closeFD(f.fd) }

// readError classes an error of reading path; the end of the file and of the
// context pass as they are.
func readError(ctx context.Context, path string, err error) error {
	if err == nil || errors.Is(err, io.EOF) || ctx.Err() != nil && errors.Is(err, ctx.Err()) {
		return err
	}
	return fault.FileErrno(path, err)
}
