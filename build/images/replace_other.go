//go:build !linux

package main

import "os"

// replaceDir puts fresh in the place of dir; what was there is then at old.
func replaceDir(fresh, dir, old string) error {
	if err := os.Rename(fresh, dir); err == nil {
		return nil
	}
	return swapDir(fresh, dir, old)
}
