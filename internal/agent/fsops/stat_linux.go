package fsops

import (
	"context"
	"errors"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
)

// Type is the kind of a file.
type Type int

// The kinds of files.
const (
	Other Type = iota // a device, FIFO or socket
	Regular
	Directory
	Symlink
)

// Entry describes a file.
type Entry struct {
	// Name is the last element of its path, or the path as given where that has
	// none, as "/" and "..".
	Name string
	Type Type
	// Size is in bytes; for a link, the length of its target.
	Size uint64
	// Mode is the 12 permission bits.
	Mode uint32
	// MtimeUnix is when the content changed last, in whole seconds since 1970.
	MtimeUnix int64
}

func newEntry(name string, st unix.Stat_t) Entry {
	e := Entry{Name: name, Size: uint64(max(st.Size, 0)), Mode: st.Mode & 0o7777, MtimeUnix: st.Mtim.Sec}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		e.Type = Regular
	case unix.S_IFDIR:
		e.Type = Directory
	case unix.S_IFLNK:
		e.Type = Symlink
	}
	return e
}

// Stat describes what is at path; a link there is not followed, unless a slash
// comes after it.
func Stat(path string) (Entry, error) {
	abs, err := resolve(path)
	if err != nil {
		return Entry{}, err
	}
	st, err := statAt(unix.AT_FDCWD, abs, unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return Entry{}, fault.FileErrno(path, err)
	}
	return newEntry(entryName(path), st), nil
}

// entryName is the last element of path: "." elements and slashes at its end do
// not count; a path that is nothing else, or ends in "..", is its own name.
func entryName(path string) string {
	rest := path
	for {
		rest = strings.TrimRight(rest, "/")
		i := strings.LastIndexByte(rest, '/')
		switch name := rest[i+1:]; {
		case name == "." && i >= 0:
			rest = rest[:i]
		case isDots(name):
			return path
		default:
			return name
		}
	}
}

// How much List gives at a time: entries, and bytes of names.
const (
	listBatch = 512
	listBytes = 256 << 10
)

// List calls emit with the entries of the directory at path, without "." and
// "..", in the file system's order, a few hundred at a time; emit may keep the
// slice. An error of emit ends the listing and is returned.
func List(ctx context.Context, path string, emit func([]Entry) error) error {
	abs, err := resolve(path)
	if err != nil {
		return err
	}
	handle, st, err := openPath(unix.AT_FDCWD, abs, unix.O_NOFOLLOW)
	if err != nil {
		return fault.FileErrno(path, err)
	}
	defer closeFD(handle)
	switch {
	case isType(st, unix.S_IFLNK):
		return fault.WrongType(path, "is a symbolic link, not a directory: list what it points to")
	case !isType(st, unix.S_IFDIR):
		return fault.WrongType(path, "is not a directory")
	}
	dir, err := openDir(handle, ".")
	if err != nil {
		return fault.FileErrno(path, err)
	}
	defer dir.close()
	for {
		names, err := dir.names(listBatch)
		if err != nil && !errors.Is(err, io.EOF) {
			return fault.FileErrno(path, err)
		}
		batch, statErr := statNames(ctx, dir.fd, names, emit)
		if statErr != nil {
			return statErr
		}
		if len(batch) > 0 {
			if err := emit(batch); err != nil {
				return err
			}
		}
		if err != nil || len(names) == 0 {
			return nil
		}
	}
}

// statNames describes the names and leaves out those that have vanished. Where
// they are long it emits early; it returns the rest.
func statNames(ctx context.Context, dir int, names []string, emit func([]Entry) error) ([]Entry, error) {
	batch, size := make([]Entry, 0, len(names)), 0
	for _, name := range names {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		st, err := statAt(dir, name, unix.AT_SYMLINK_NOFOLLOW)
		if errors.Is(err, unix.ENOENT) {
			continue
		}
		if err != nil {
			return nil, fault.FileErrno(name, err)
		}
		if size += len(name); size > listBytes {
			if err := emit(batch); err != nil {
				return nil, err
			}
			batch, size = make([]Entry, 0, len(names)), len(name)
		}
		batch = append(batch, newEntry(name, st))
	}
	return batch, nil
}

// directory is a directory open for reading.
type directory struct {
	fd int
	f  *os.File
}

// openDir opens name in dir for reading, without following a link.
func openDir(dir int, name string) (*directory, error) {
	fd, err := openAt(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	// The name lets os find the type of entries of which the directory does not
	// tell it.
	return &directory{fd: fd, f: os.NewFile(uintptr(fd), procPath(fd))}, nil
}

// names returns up to n more names, and io.EOF at the end.
func (d *directory) names(n int) ([]string, error) { return d.f.Readdirnames(n) }

func (d *directory) rewind() error {
	_, err := d.f.Seek(0, io.SeekStart)
	return err
}

func (d *directory) close() { _ = d.f.Close() }
