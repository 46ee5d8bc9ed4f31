package vmassets

import (
	"bytes"
	"compress/gzip"
	"context"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"

	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"
)

// The formats of kernel files are those of the kernel's own documents:
// Documentation/arch/x86/boot.rst for a bzImage, arch/arm64/booting.rst for an
// arm64 Image, drivers/firmware/efi/libstub/zboot-header.S for an EFI zboot
// image, and the ELF note of Xen's PVH for direct entry.

const (
	// maxKernel bounds an unpacked kernel: a broken file must not fill the disk.
	maxKernel = 1 << 30
	// maxPacked bounds a compressed kernel, which is held in memory.
	maxPacked = 256 << 20

	xenNotePVH = 18
)

// errCannotUnpack marks kernels whose compression is known but not read here,
// or which have no direct entry: a bzImage can then still be booted as it is.
var errCannotUnpack = errors.New("cannot be entered directly")

// imageInfo is what was read out of a kernel file.
type imageInfo struct {
	arch, release string
	// reason is why the file itself was kept; nil when it was unpacked.
	reason error
}

// unpackImage writes to dst, an empty file, the form of the kernel src that
// QEMU enters with the least work.
func unpackImage(ctx context.Context, src, dst *os.File) (imageInfo, error) {
	head := make([]byte, 4096)
	n, err := src.ReadAt(head, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return imageInfo{}, err
	}
	head = head[:n]
	switch {
	case isBzImage(head):
		return unpackBzImage(ctx, src, dst, head)
	case isZboot(head):
		err = unpackZboot(ctx, src, dst, head)
	case bytes.HasPrefix(head, []byte{0x1f, 0x8b}):
		err = decompress(ctx, "gzip", src, dst)
	default:
		_, err = copyAtMost(dst, src, maxKernel)
	}
	if err != nil {
		return imageInfo{}, err
	}
	return inspectRaw(dst)
}

// inspectRaw reads an uncompressed kernel.
func inspectRaw(f *os.File) (imageInfo, error) {
	head := make([]byte, 64)
	if _, err := f.ReadAt(head, 0); err != nil {
		return imageInfo{}, fmt.Errorf("it has fewer than %d bytes", len(head))
	}
	var info imageInfo
	switch {
	case bytes.HasPrefix(head, []byte(elf.ELFMAG)):
		machine, pvh, err := inspectELF(f)
		if err != nil {
			return info, err
		}
		if machine != elf.EM_X86_64 {
			return info, fmt.Errorf("it is an ELF file for %s: give a vmlinux for x86-64, or an arm64 Image", machine)
		}
		if !pvh {
			return info, fmt.Errorf("%w: it has no PVH entry (CONFIG_PVH); give the vmlinuz instead of the vmlinux", errCannotUnpack)
		}
		info.arch = "amd64"
	case string(head[56:60]) == "ARM\x64":
		info.arch = "arm64"
	default:
		return info, errors.New("it is not a Linux kernel (bzImage, ELF vmlinux, arm64 Image, or one of these in gzip or EFI zboot form)")
	}
	var err error
	info.release, err = scanRelease(f)
	return info, err
}

func inspectELF(f io.ReaderAt) (elf.Machine, bool, error) {
	e, err := elf.NewFile(f)
	if err != nil {
		return 0, false, err
	}
	defer e.Close() //nolint:errcheck // closes nothing: the file is the caller's
	for _, p := range e.Progs {
		if p.Type != elf.PT_NOTE || p.Filesz > 1<<20 {
			continue
		}
		notes, err := io.ReadAll(p.Open())
		if err != nil {
			return 0, false, fmt.Errorf("read its notes: %w", err)
		}
		if hasNote(notes, e.ByteOrder, "Xen", xenNotePVH) {
			return e.Machine, true, nil
		}
	}
	return e.Machine, false, nil
}

func hasNote(notes []byte, order binary.ByteOrder, name string, kind uint32) bool {
	align := func(n uint64) uint64 { return (n + 3) &^ 3 }
	for len(notes) >= 12 {
		nameSize, descSize := uint64(order.Uint32(notes)), uint64(order.Uint32(notes[4:]))
		got := order.Uint32(notes[8:])
		end := 12 + align(nameSize) + align(descSize)
		if end > uint64(len(notes)) {
			return false
		}
		if got == kind && string(bytes.TrimRight(notes[12:12+nameSize], "\x00")) == name {
			return true
		}
		notes = notes[end:]
	}
	return false
}

// scanRelease finds the banner "Linux version <release> (" in a raw kernel.
func scanRelease(f *os.File) (string, error) {
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return "", err
	}
	const banner, keep = "Linux version ", 256
	buf := make([]byte, 0, 1<<20)
	for {
		n, err := io.ReadFull(f, buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		for rest := buf; ; {
			_, after, found := bytes.Cut(rest, []byte(banner))
			if !found {
				break
			}
			// A banner at the very end is found whole in the next round.
			if release, _, ok := bytes.Cut(after[:min(len(after), keep)], []byte(" ")); ok && validRelease(string(release)) {
				return string(release), nil
			}
			rest = after
		}
		if err != nil {
			return "", errors.New("it does not say its release (no \"Linux version\" in it)")
		}
		tail := copy(buf, buf[max(0, len(buf)-keep-len(banner)):])
		buf = buf[:tail]
	}
}

// validRelease tells whether s can be a directory below /lib/modules.
func validRelease(s string) bool {
	if s == "" || len(s) > 64 || s[0] < '0' || s[0] > '9' {
		return false
	}
	return !strings.ContainsFunc(s, func(c rune) bool {
		return !strings.ContainsRune("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_+~", c)
	})
}

func isBzImage(head []byte) bool {
	return len(head) >= 0x268 && string(head[0x202:0x206]) == "HdrS"
}

// unpackBzImage writes the vmlinux inside a bzImage, or where that is not to be
// had or not to be entered, the bzImage itself.
func unpackBzImage(ctx context.Context, src, dst *os.File, head []byte) (imageInfo, error) {
	release, err := bzRelease(src, head)
	if err != nil {
		return imageInfo{}, err
	}
	if head[0x236]&1 == 0 {
		return imageInfo{}, errors.New("it is a 32-bit x86 kernel: give an x86-64 one")
	}
	err = unpackBzPayload(ctx, src, dst, head)
	if err == nil {
		var info imageInfo
		if info, err = inspectRaw(dst); err == nil {
			info.release = release
			return info, nil
		}
	}
	if !errors.Is(err, errCannotUnpack) {
		return imageInfo{}, err
	}
	if terr := rewind(src, dst); terr != nil {
		return imageInfo{}, terr
	}
	if _, cerr := copyAtMost(dst, src, maxPacked); cerr != nil {
		return imageInfo{}, cerr
	}
	return imageInfo{arch: "amd64", release: release, reason: err}, nil
}

func rewind(src, dst *os.File) error {
	if err := dst.Truncate(0); err != nil {
		return err
	}
	for _, f := range []*os.File{src, dst} {
		if _, err := f.Seek(0, io.SeekStart); err != nil {
			return err
		}
	}
	return nil
}

func bzRelease(src io.ReaderAt, head []byte) (string, error) {
	at := int64(binary.LittleEndian.Uint16(head[0x20e:])) + 0x200
	buf := make([]byte, 256)
	n, err := src.ReadAt(buf, at)
	if err != nil && !errors.Is(err, io.EOF) {
		return "", err
	}
	line, _, _ := bytes.Cut(buf[:n], []byte{0})
	release, _, _ := strings.Cut(string(line), " ")
	if !validRelease(release) {
		return "", fmt.Errorf("its header names no release but %q", release)
	}
	return release, nil
}

func unpackBzPayload(ctx context.Context, src *os.File, dst *os.File, head []byte) error {
	if version := binary.LittleEndian.Uint16(head[0x206:]); version < 0x0208 {
		return fmt.Errorf("%w: its boot protocol %#x does not say where the kernel is", errCannotUnpack, version)
	}
	sectors := int64(head[0x1f1])
	if sectors == 0 {
		sectors = 4
	}
	offset := (sectors+1)*512 + int64(binary.LittleEndian.Uint32(head[0x248:]))
	return unpackPayload(ctx, src, dst, offset, int64(binary.LittleEndian.Uint32(head[0x24c:])), "")
}

func isZboot(head []byte) bool {
	return len(head) >= 64 && string(head[:2]) == "MZ" && string(head[4:8]) == "zimg"
}

func unpackZboot(ctx context.Context, src, dst *os.File, head []byte) error {
	offset, size := int64(binary.LittleEndian.Uint32(head[8:])), int64(binary.LittleEndian.Uint32(head[12:]))
	kind, _, _ := strings.Cut(string(head[24:56]), "\x00")
	return unpackPayload(ctx, src, dst, offset, size, kind)
}

// unpackPayload decompresses size bytes at offset. The build appends the
// unpacked size as 4 bytes, which in gzip are the format's own.
func unpackPayload(ctx context.Context, src io.ReaderAt, dst *os.File, offset, size int64, kind string) error {
	if size < 16 || size > maxPacked {
		return fmt.Errorf("its header gives a compressed kernel of %d bytes", size)
	}
	packed := make([]byte, size)
	if _, err := src.ReadAt(packed, offset); err != nil {
		return fmt.Errorf("its header puts %d bytes of compressed kernel at %d: %w", size, offset, err)
	}
	if kind == "" {
		kind = compressionOf(packed)
	}
	want := int64(binary.LittleEndian.Uint32(packed[size-4:]))
	if kind != "gzip" {
		packed = packed[:size-4]
	}
	if err := decompress(ctx, kind, bytes.NewReader(packed), dst); err != nil {
		return err
	}
	info, err := dst.Stat()
	if err != nil {
		return err
	}
	if info.Size() != want {
		return fmt.Errorf("its kernel unpacks to %d bytes instead of %d: the file is damaged", info.Size(), want)
	}
	return nil
}

func compressionOf(packed []byte) string {
	for _, known := range []struct{ magic, name string }{
		{"\x02\x21\x4c\x18", "lz4"},
		{"\x1f\x8b", "gzip"},
		{"\x28\xb5\x2f\xfd", "zstd"},
		{"\xfd7zXZ\x00", "xz"},
		{"BZh", "bzip2"},
		{"\x5d\x00\x00", "lzma"},
		{"\x89LZO", "lzo"},
		{elf.ELFMAG, "none"},
	} {
		if bytes.HasPrefix(packed, []byte(known.magic)) {
			return known.name
		}
	}
	return fmt.Sprintf("unknown (it begins with % x)", packed[:4])
}

// decompress writes what src holds to dst, at most maxKernel bytes.
func decompress(ctx context.Context, kind string, src io.Reader, dst io.Writer) error {
	var r io.Reader
	switch kind {
	case "none":
		r = src
	case "gzip":
		z, err := gzip.NewReader(src)
		if err != nil {
			return fmt.Errorf("gzip: %w", err)
		}
		z.Multistream(false)
		r = z
	case "lz4":
		r = lz4.NewReader(src)
	case "zstd":
		z, err := zstd.NewReader(src, zstd.WithDecoderMaxWindow(1<<28), zstd.WithDecoderConcurrency(1))
		if err != nil {
			return fmt.Errorf("zstd: %w", err)
		}
		defer z.Close()
		r = z
	case "xz", "xzkern":
		return decompressXZ(ctx, src, dst)
	default:
		return fmt.Errorf("%w: its compression, %s, is not read here (gzip, lz4, zstd and xz are)", errCannotUnpack, kind)
	}
	if _, err := copyAtMost(dst, r, maxKernel); err != nil {
		return fmt.Errorf("%s: %w", kind, err)
	}
	return nil
}

// decompressXZ takes the xz program: kernels use a filter for machine code that
// no Go library reads.
func decompressXZ(ctx context.Context, src io.Reader, dst io.Writer) error {
	program, err := exec.LookPath("xz")
	if err != nil {
		return fmt.Errorf("%w: it is compressed with xz, and the xz program is missing: install xz-utils", errCannotUnpack)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, program, "--decompress", "--stdout", "--single-stream")
	cmd.Stdin, cmd.Stderr = src, &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	_, copyErr := copyAtMost(dst, out, maxKernel)
	if copyErr != nil {
		cancel()
	}
	if err := cmd.Wait(); err != nil && copyErr == nil {
		return fmt.Errorf("xz: %w: %s", err, strings.TrimSpace(stderr.String()))
	}
	return copyErr
}

// copyAtMost is io.Copy that refuses more than limit bytes.
func copyAtMost(dst io.Writer, src io.Reader, limit int64) (int64, error) {
	n, err := io.Copy(dst, io.LimitReader(src, limit+1))
	if err == nil && n > limit {
		err = fmt.Errorf("it is longer than %d MiB", limit>>20)
	}
	return n, err
}
