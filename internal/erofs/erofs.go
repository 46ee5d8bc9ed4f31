// Package erofs turns the layers of an OCI image into one read-only EROFS file,
// in a single pass over each layer and without unpacking anything on the host.
//
// A [Builder] takes uncompressed tar streams, lowest layer first. The bytes of
// each file go straight to the image, to block-aligned places behind the
// superblock; what is kept in memory is the merged tree alone, 200 bytes an entry
// and as much again in garbage. [Builder.Finish] writes the directories and, last,
// the inodes. The same layers give the same bytes.
//
// The format is written here and not by a library. The one Go library for it
// (erofs/go-erofs 0.3) has no hard links, stores POSIX ACLs under an index that the
// kernel does not read, writes no checksum, buffers all file data a second time
// and cannot tell an opaque directory's own files from those it hides. What is
// left is the metadata of uncompressed EROFS, which is small and frozen: a
// superblock, 64-byte inodes, name-sorted directory blocks and inline xattrs, as in
// the kernel's Documentation/filesystems/erofs.rst and fs/erofs/erofs_fs.h. Tests
// compare images with the tar through the kernel, fsck.erofs and go-erofs' reader.
//
// # How layers merge
//
// As containerd and Docker do it, and where they differ or guess, as follows.
//
//   - A later entry replaces an earlier one of the same path, whatever the types;
//     only a directory over a directory keeps the children. Its owner, mode, times
//     and xattrs are then the later entry's.
//   - ".wh.NAME" and the opaque marker ".wh..wh..opq" hide what lower layers put
//     there, never what the same layer has, whatever the order in the tar. A parent
//     that survives only because of the same layer's entries counts as made by it.
//     Other names that begin with ".wh..wh." are aufs' own and skipped. ".wh." before
//     nothing, "." or "..", or in a parent's name, is an error.
//   - A leading "/" and "." are ignored; ".." in a name is an error.
//   - A parent that is a symbolic link in the merged tree is followed inside the
//     root: an absolute target begins at the image's root, ".." stops there, 40
//     links are the limit. Missing parents, those a link names included, are made
//     with mode 0755 and owner 0:0. A parent that is a file is an error.
//   - A hard link shares the inode of its target, found the same way without
//     following a link in the last place. The target may be in a lower layer or
//     later in the same one. The link entry's own owner, mode and times count for
//     nothing: they are those of its inode.
//   - Xattrs are those in SCHILY.xattr records. What Linux could not store is left
//     out and counted (Stats.DroppedXattrs); ACLs in text form, which we would
//     have to guess user numbers for, are an error.
package erofs

import (
	"errors"
	"fmt"
	"math"
	"os"
)

// Limits bound what one image may have. A zero field means its default.
type Limits struct {
	// Unpacked is the sum of all files' sizes in all layers, the hidden ones
	// included, plus symlink targets and xattrs, in bytes: 10 GiB.
	Unpacked int64
	// FileSize is the size of one file, in bytes: 5 GiB.
	FileSize int64
	// Entries is the number of tar entries and implied directories: 1,000,000.
	Entries int
	// Depth is the number of components of a path, after links: 128.
	Depth int
	// PathLen is the length of a path in the tar, in bytes: 4096.
	PathLen int
}

func (l Limits) withDefaults() Limits {
	if l.Unpacked == 0 {
		l.Unpacked = 10 << 30
	}
	if l.FileSize == 0 {
		l.FileSize = 5 << 30
	}
	if l.Entries == 0 {
		l.Entries = 1_000_000
	}
	if l.Depth == 0 {
		l.Depth = 128
	}
	if l.PathLen == 0 {
		l.PathLen = 4096
	}
	return l
}

// stream is the most bytes that the tar streams may have in all. It leaves 4 KiB
// of headers and padding an entry, so that it bites on nothing but bombs.
func (l Limits) stream() int64 {
	headers := int64(l.Entries) * 4096
	if l.Unpacked > math.MaxInt64-headers-1<<20 {
		return math.MaxInt64
	}
	return l.Unpacked + headers + 1<<20
}

// LimitError tells that an image is larger than the [Limits] allow.
type LimitError struct {
	// What is the thing that is limited, "bytes unpacked" for example.
	What string
	// Limit is the highest allowed value.
	Limit int64
	// Path is the entry that went over it, "" when it is no single one's fault.
	Path string
}

// Error says what is too much and at which entry.
func (e *LimitError) Error() string {
	at := ""
	if e.Path != "" {
		at = fmt.Sprintf(" at entry %q", clip(e.Path))
	}
	return fmt.Sprintf("image has more than %d %s%s: use a smaller image", e.Limit, e.What, at)
}

// EntryError tells that a layer has an entry that cannot be part of an image.
type EntryError struct {
	// Path is the entry's name as the tar has it.
	Path string
	// Reason is what is wrong with it.
	Reason string
}

// Error names the entry and the reason.
func (e *EntryError) Error() string {
	return fmt.Sprintf("entry %q %s: rebuild the image without it", clip(e.Path), e.Reason)
}

// clip shortens a hostile name for a message.
func clip(name string) string {
	if len(name) > 200 {
		return name[:200] + "..."
	}
	return name
}

// Stats describe a finished image.
type Stats struct {
	// Inodes is the number of files, directories and so on in the merged tree.
	Inodes int
	// Unpacked is what Limits.Unpacked counts.
	Unpacked int64
	// Size is the length of the image in bytes. Less may be allocated: runs of
	// zeros and hidden files are holes.
	Size int64
	// DroppedXattrs counts extended attributes in name spaces that Linux has not,
	// macOS' for example.
	DroppedXattrs int
}

var errFinished = errors.New("erofs builder is finished or failed: make a new one")

// Builder makes one image. It is not safe for concurrent use. After the first
// error of any method only dropping it and its files is left.
type Builder struct {
	limits Limits
	data   *blockWriter
	side   *sideFile
	tree   *tree
	stats  Stats
	stream int64
	layer  int32
	broken bool
}

// NewBuilder writes an image to image and uses side for what the inodes will need
// at the end: ends of files, symlink targets and xattrs, at most a few KiB an
// entry. Both are empty files opened for reading and writing, and stay the
// caller's to sync, close and remove.
func NewBuilder(image, side *os.File, limits Limits) *Builder {
	limits = limits.withDefaults()
	b := &Builder{limits: limits, data: newBlockWriter(image, 1), side: newSideFile(side)}
	b.tree = newTree(b)
	return b
}

// charge counts n bytes towards Limits.Unpacked.
func (b *Builder) charge(n int64, path string) error {
	if n > b.limits.Unpacked-b.stats.Unpacked {
		return &LimitError{What: "bytes unpacked", Limit: b.limits.Unpacked, Path: path}
	}
	b.stats.Unpacked += n
	return nil
}
