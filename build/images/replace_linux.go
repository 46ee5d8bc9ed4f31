package main

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// replaceDir puts fresh in the place of dir in one step; what was there is then
// at old. Where the file system cannot exchange two names, there is a moment
// with no dir at all, never one with a half of it.
func replaceDir(fresh, dir, old string) error {
	if err := os.Rename(fresh, dir); err == nil || errors.Is(err, os.ErrNotExist) {
		return err
	}
	err := unix.Renameat2(unix.AT_FDCWD, fresh, unix.AT_FDCWD, dir, unix.RENAME_EXCHANGE)
	if err == nil {
		return os.Rename(fresh, old)
	}
	return swapDir(fresh, dir, old)
}
