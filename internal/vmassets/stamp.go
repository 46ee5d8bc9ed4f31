package vmassets

import (
	"fmt"
	"os"
	"syscall"
)

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
