// Command upper makes the templates of the writable disks that package vmassets
// embeds: it runs mke2fs on a sparse file and keeps the blocks that are not
// zero. The same mke2fs gives the same bytes.
//
//	go run ./build/upper -dir internal/vmassets/upper
package main

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// The format is described in internal/vmassets/upper.go.
const (
	magic     = "IIIUPPR1"
	blockSize = 4096
	diskSize  = 16 << 30
)

// Everything that mke2fs would choose at random or by the clock. All uppers
// share one UUID: a guest sees one of them, and nothing mounts by UUID.
const (
	uuid     = "6f0c9a52-3d7e-4b0e-9d5a-2f2f1f6e1a01"
	hashSeed = "6f0c9a52-3d7e-4b0e-9d5a-2f2f1f6e1a02"
	fakeTime = "1700000000"
)

// features that both kinds have. They are named one by one so that neither
// mke2fs.conf nor the version of mke2fs changes the outcome. There is no
// resize_inode: the size is fixed.
const features = "none,ext_attr,dir_index,filetype,extent,flex_bg,sparse_super,large_file,huge_file,dir_nlink,extra_isize,64bit"

// kind is one template and the arguments that make it.
type kind struct {
	name string
	args []string
}

func kinds() []kind {
	return []kind{
		// uninit_bg lets the file system know that unused groups and inode
		// tables are zero, which the checksums of the other kind do too.
		{name: "ephemeral", args: []string{"-O", features + ",uninit_bg"}},
		// A small journal keeps the file small: the guest overwrites it in turn.
		{name: "durable", args: []string{"-O", features + ",has_journal,metadata_csum", "-J", "size=32"}},
	}
}

func main() {
	dir := flag.String("dir", "internal/vmassets/upper", "where to write the templates")
	flag.Parse()
	for _, k := range kinds() {
		if err := generate(k, filepath.Join(*dir, k.name+".gz")); err != nil {
			fmt.Fprintf(os.Stderr, "upper: %s: %v\n", k.name, err)
			os.Exit(1)
		}
	}
}

func generate(k kind, path string) (err error) {
	disk, err := os.CreateTemp("", "upper-*.ext4")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, disk.Close(), os.Remove(disk.Name())) }()
	if err := disk.Truncate(diskSize); err != nil {
		return err
	}
	if err := mke2fs(k, disk.Name()); err != nil {
		return err
	}
	if err := addDirectories(disk.Name()); err != nil {
		return err
	}
	var packed bytes.Buffer
	z, err := gzip.NewWriterLevel(&packed, gzip.BestCompression)
	if err != nil {
		return err
	}
	head := binary.LittleEndian.AppendUint64([]byte(magic), diskSize)
	if _, err := z.Write(binary.LittleEndian.AppendUint32(head, blockSize)); err != nil {
		return err
	}
	if err := writeBlocks(z, disk); err != nil {
		return err
	}
	if err := z.Close(); err != nil {
		return err
	}
	return os.WriteFile(path, packed.Bytes(), 0o644)
}

func mke2fs(k kind, disk string) error {
	// The file is zero already: inode tables and journal need no zeroing, now
	// or later by the guest's kernel in the background.
	args := append([]string{
		"-q", "-F", "-t", "ext4", "-b", "4096", "-I", "256", "-i", "16384", "-m", "0", "-U", uuid,
		"-E", "hash_seed=" + hashSeed + ",assume_storage_prezeroed=1,nodiscard,root_owner=0:0",
	}, k.args...)
	_, err := e2fsprogs("mke2fs", append(args, disk)...)
	return err
}

// addDirectories makes the two that overlayfs needs, so that no guest has to.
func addDirectories(disk string) error {
	for _, command := range []string{"mkdir upper", "set_inode_field upper mode 040755", "mkdir work", "set_inode_field work mode 040700"} {
		// debugfs ends with 0 even after an error; it says its version first.
		out, err := e2fsprogs("debugfs", "-w", "-R", command, disk)
		if err != nil {
			return err
		}
		if lines := strings.Split(strings.TrimSpace(out), "\n"); len(lines) > 1 {
			return fmt.Errorf("debugfs: %s: %s", command, out)
		}
	}
	return nil
}

// e2fsprogs runs one of its programs with nothing left to chance.
func e2fsprogs(name string, args ...string) (string, error) {
	program, err := exec.LookPath(name)
	if err != nil {
		program = "/usr/sbin/" + name // where an ordinary user's PATH does not look
	}
	cmd := exec.Command(program, args...)
	cmd.Env = []string{"MKE2FS_CONFIG=/dev/null", "E2FSPROGS_FAKE_TIME=" + fakeTime, "SOURCE_DATE_EPOCH=" + fakeTime}
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s (Debian: apt-get install e2fsprogs): %w: %s", name, err, out)
	}
	return string(out), nil
}

// writeBlocks writes number and bytes of every block that is not zero.
func writeBlocks(w io.Writer, disk *os.File) error {
	var at int64
	for {
		start, err := unix.Seek(int(disk.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil
		}
		if err != nil {
			return err
		}
		end, err := unix.Seek(int(disk.Fd()), start, unix.SEEK_HOLE)
		if err != nil {
			return err
		}
		block := make([]byte, blockSize)
		for at = start &^ (blockSize - 1); at < end; at += blockSize {
			if _, err := disk.ReadAt(block, at); err != nil {
				return err
			}
			if bytes.Count(block, []byte{0}) == blockSize {
				continue
			}
			if _, err := w.Write(binary.LittleEndian.AppendUint64(nil, uint64(at/blockSize))); err != nil {
				return err
			}
			if _, err := w.Write(block); err != nil {
				return err
			}
		}
	}
}
