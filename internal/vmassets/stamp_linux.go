package vmassets

import "syscall"

// changeTime is the time of the inode's last change in nanoseconds.
func changeTime(st *syscall.Stat_t) int64 { return st.Ctim.Nano() }
