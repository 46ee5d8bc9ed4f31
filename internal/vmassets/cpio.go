package vmassets

import (
	"fmt"
	"io"
	"math"
)

// File types and modes of the archive's entries, as in a Unix mode word.
const (
	cpioDir  = 0o040000
	cpioFile = 0o100000
	cpioChar = 0o020000
)

// cpioWriter writes an archive in the format newc, which the kernel unpacks
// before it starts /init (Documentation/driver-api/early-userspace/buffer-format.rst).
// Owners are root and times 0, so equal content gives equal bytes.
type cpioWriter struct {
	w     io.Writer
	inode uint32
	at    int64
}

// entry is one name of the archive.
type entry struct {
	name         string // without a leading slash
	mode         uint32
	major, minor uint32 // of a device
	size         int64
	data         io.Reader // nil when size is 0
}

// add writes one entry.
func (c *cpioWriter) add(e entry) error {
	if e.size < 0 || e.size > math.MaxUint32 {
		return fmt.Errorf("%s has %d bytes, too many for the archive", e.name, e.size)
	}
	c.inode++
	links := 1
	if e.mode&cpioDir == cpioDir {
		links = 2
	}
	head := fmt.Appendf(nil, "070701%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%s\x00",
		c.inode, e.mode, 0, 0, links, 0, e.size, 0, 0, e.major, e.minor, len(e.name)+1, 0, e.name)
	if err := c.write(head); err != nil {
		return err
	}
	if e.size == 0 {
		return nil
	}
	n, err := io.Copy(c.w, io.LimitReader(e.data, e.size))
	c.at += n
	if err != nil {
		return err
	}
	if n != e.size {
		return fmt.Errorf("%s ended after %d of %d bytes", e.name, n, e.size)
	}
	return c.write(nil)
}

// close writes the entry that ends the archive.
func (c *cpioWriter) close() error {
	return c.add(entry{name: "TRAILER!!!"})
}

// write writes b and pads the archive to a multiple of 4 bytes.
func (c *cpioWriter) write(b []byte) error {
	n, err := c.w.Write(b)
	c.at += int64(n)
	if err != nil {
		return err
	}
	n, err = c.w.Write(make([]byte, -c.at&3))
	c.at += int64(n)
	return err
}
