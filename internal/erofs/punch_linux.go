package erofs

import (
	"os"

	"golang.org/x/sys/unix"
)

// punchHole frees a block-aligned range of file, which then reads as zeros.
func punchHole(file *os.File, offset, length int64) error {
	return unix.Fallocate(int(file.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, offset, length)
}
