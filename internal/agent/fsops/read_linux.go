package fsops

import (
	"context"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
)

// Reader is a regular file open for reading. It is not for concurrent use.
type Reader struct {
	// Entry describes the file that is open, not a link to it.
	Entry
	path string
	file
}

// Open opens the regular file at path, following links. Directories, devices,
// FIFOs and sockets are refused, without being opened. Read returns an error
// once ctx ends; the caller closes the Reader.
func Open(ctx context.Context, path string) (*Reader, error) {
	abs, err := resolve(path)
	if err != nil {
		return nil, err
	}
	handle, st, err := openPath(unix.AT_FDCWD, abs, 0)
	if err != nil {
		return nil, fault.FileErrno(path, err)
	}
	defer closeFD(handle)
	if err := requireRegular(path, st); err != nil {
		return nil, err
	}
	fd, err := reopen(handle, unix.O_RDONLY|unix.O_NONBLOCK)
	if err != nil {
		return nil, fault.FileErrno(path, err)
	}
	return &Reader{Entry: newEntry(entryName(path), st), path: path, file: file{ctx: ctx, fd: fd}}, nil
}

// Read implements io.Reader; its errors but io.EOF and the context's are faults.
func (r *Reader) Read(p []byte) (int, error) {
	n, err := r.file.Read(p)
	return n, readError(r.ctx, r.path, err)
}

// Close frees the file.
func (r *Reader) Close() { r.close() }

func requireRegular(path string, st unix.Stat_t) error {
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		return nil
	case unix.S_IFDIR:
		return fault.WrongType(path, "is a directory")
	case unix.S_IFIFO:
		return fault.WrongType(path, "is a FIFO: only regular files can be read; run a program to read it")
	case unix.S_IFSOCK:
		return fault.WrongType(path, "is a socket, not a regular file")
	}
	return fault.WrongType(path, "is a device: only regular files can be read; run a program to read it")
}
