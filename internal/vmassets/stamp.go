package vmassets

import (
	"debug/elf"
	"fmt"
	"os"
	"syscall"
)

// identity tells a program's content from others: a Go program's own build ID,
// which is a hash of it, so that a build that changes nothing counts for nothing
// although it touches the file; any other file's stamp.
func identity(path string, info os.FileInfo) string {
	if id := goBuildID(path); id != "" {
		return fmt.Sprintf("go %s %d", id, info.Size())
	}
	return stamp(info)
}

// goBuildID is empty for what is no Go program for Linux. The note with it is like
// every ELF note: the sizes of name and content, a type, the name ("Go"), padded to
// four bytes, and the content.
func goBuildID(path string) string {
	file, err := elf.Open(path)
	if err != nil {
		return ""
	}
	defer file.Close() //nolint:errcheck // only read
	section := file.Section(".note.go.buildid")
	if section == nil {
		return ""
	}
	note, err := section.Data()
	const head, name = 12, 4
	if err != nil || len(note) < head+name {
		return ""
	}
	size := file.ByteOrder.Uint32(note[4:])
	if uint64(size) > uint64(len(note)-head-name) {
		return ""
	}
	return string(note[head+name:][:size])
}

// stamp is the identity of a file's content as far as the system tells without
// reading it: device, inode, size, times of the last change of content and
// inode in nanoseconds.
func stamp(info os.FileInfo) string {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return fmt.Sprintf("%d-%d", info.Size(), info.ModTime().UnixNano())
	}
	return fmt.Sprintf("%d-%d-%d-%d-%d", st.Dev, st.Ino, info.Size(), info.ModTime().UnixNano(), changeTime(st))
}
