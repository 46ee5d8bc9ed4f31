package vmassets

import (
	"bytes"
	"compress/gzip"
	_ "embed"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

//go:generate go run ../../build/upper -dir upper

// UpperKind selects the template of a writable disk.
type UpperKind int

// The kinds of writable disks.
const (
	// Ephemeral is ext4 without journal and checksums: fastest, lost with the
	// VM, not to be mounted again after a crash.
	Ephemeral UpperKind = iota
	// Durable is ext4 with journal and checksums: it survives a killed VM.
	Durable
)

// UpperSize is the size that every writable disk shows to the guest, in bytes.
// It is fixed: the file is sparse and starts at some 200 KiB on the host.
const UpperSize = 16 << 30

// The template format, written by build/upper and gzipped: the magic; the size
// of the disk in bytes and of a block as little-endian uint64 and uint32; and
// the blocks that are not all zero, in ascending order, each its number as
// uint64 and its bytes.
const (
	templateMagic = "IIIUPPR1"
	templateBlock = 4096
)

//go:embed upper/ephemeral.gz
var ephemeralTemplate string

//go:embed upper/durable.gz
var durableTemplate string

// partialExt begins the extension of a disk being made; one older than
// partialAge was left by a killed process.
const (
	partialExt = ".partial-"
	partialAge = 10 * time.Minute
)

// CreateUpper makes a new, empty ext4 file system of UpperSize bytes at path,
// mode 0600. It takes a millisecond or so, a durable one what the host's disk
// needs for a flush: it is on the disk on return. An existing path is an error
// (fs.ErrExist) and stays as it is; the file appears complete or not at all.
func CreateUpper(path string, kind UpperKind) error {
	if err := createUpper(path, kind); err != nil {
		return fmt.Errorf("create disk %s: %w", path, explainSpace(err))
	}
	return nil
}

func createUpper(path string, kind UpperKind) (err error) {
	template := ephemeralTemplate
	if kind == Durable {
		template = durableTemplate
	}
	// Link below never replaces, but finding out first saves the work.
	if _, err := os.Lstat(path); err == nil {
		return os.ErrExist
	}
	dir, base := filepath.Split(filepath.Clean(path))
	if dir == "" {
		dir = "."
	}
	removePartials(dir, base)
	f, err := os.CreateTemp(dir, base+partialExt)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close(), removeIfThere(f.Name())) }()
	if err := expand(f, template); err != nil {
		return err
	}
	if kind == Durable {
		if err := f.Sync(); err != nil {
			return err
		}
	}
	if err := os.Link(f.Name(), path); err != nil {
		return err
	}
	if kind == Durable {
		return syncDir(dir)
	}
	return nil
}

// removePartials removes what killed processes left of earlier attempts; it is
// in the way of nobody, so a failure does not matter.
func removePartials(dir, base string) {
	found, err := filepath.Glob(filepath.Join(globQuote(dir), globQuote(base)+partialExt+"*"))
	if err != nil {
		return
	}
	for _, path := range found {
		if info, err := os.Lstat(path); err == nil && time.Since(info.ModTime()) > partialAge {
			_ = os.Remove(path)
		}
	}
}

// globQuote makes a path match itself alone.
func globQuote(path string) string {
	var quoted []byte
	for _, c := range []byte(path) {
		if c == '*' || c == '?' || c == '[' || c == '\\' {
			quoted = append(quoted, '\\')
		}
		quoted = append(quoted, c)
	}
	return string(quoted)
}

// expand writes the disk that template describes to the empty file f, leaving
// holes where it is zero.
func expand(f *os.File, template string) error {
	z, err := gzip.NewReader(bytes.NewReader([]byte(template)))
	if err != nil {
		return err
	}
	head := make([]byte, len(templateMagic)+12)
	if _, err := io.ReadFull(z, head); err != nil {
		return err
	}
	size, block := binary.LittleEndian.Uint64(head[8:]), binary.LittleEndian.Uint32(head[16:])
	if string(head[:8]) != templateMagic || size != UpperSize || block != templateBlock {
		return errors.New("the template built into this program is damaged")
	}
	if err := f.Truncate(UpperSize); err != nil {
		return err
	}
	record := make([]byte, 8+templateBlock)
	for {
		switch _, err := io.ReadFull(z, record); {
		case errors.Is(err, io.EOF):
			return z.Close()
		case err != nil:
			return err
		}
		number := binary.LittleEndian.Uint64(record)
		if number >= UpperSize/templateBlock {
			return errors.New("the template built into this program is damaged")
		}
		if _, err := f.WriteAt(record[8:], int64(number)*templateBlock); err != nil {
			return err
		}
	}
}

// explainSpace adds the cure where there is one.
func explainSpace(err error) error {
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return fmt.Errorf("%w: free some disk space or choose another directory", err)
	case errors.Is(err, unix.EFBIG):
		return fmt.Errorf("%w: the file system or the limit on file sizes (ulimit -f) does not allow files of %d GiB", err, UpperSize>>30)
	}
	return err
}
