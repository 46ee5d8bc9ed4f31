package vmassets_test

import (
	"bytes"
	"compress/gzip"
	"debug/elf"
	"encoding/binary"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"
	"github.com/ulikunitz/xz"
)

// This file makes small kernels, modules and agents for the tests.

// program is a part of an ELF file that its program header describes.
type program struct {
	kind elf.ProgType
	data []byte
}

// section is a named part of an ELF file.
type section struct {
	name string
	data []byte
}

// elfFile makes a 64-bit little-endian ELF file.
func elfFile(kind elf.Type, machine elf.Machine, programs []program, sections []section) []byte {
	const headSize, progSize, sectSize = 64, 56, 64
	var body bytes.Buffer
	at := func() uint64 { return uint64(headSize + progSize*len(programs) + body.Len()) }
	var progs, sects bytes.Buffer
	put := func(w io.Writer, v any) {
		if err := binary.Write(w, binary.LittleEndian, v); err != nil {
			panic(err)
		}
	}
	for _, p := range programs {
		put(&progs, elf.Prog64{Type: uint32(p.kind), Off: at(), Filesz: uint64(len(p.data)), Memsz: uint64(len(p.data))})
		body.Write(p.data)
	}
	names := []byte{0}
	put(&sects, elf.Section64{})
	add := func(name string, kind elf.SectionType, data []byte) {
		off := at()
		put(&sects, elf.Section64{Name: uint32(len(names)), Type: uint32(kind), Off: off, Size: uint64(len(data))})
		names = append(append(names, name...), 0)
		body.Write(data)
	}
	for _, s := range sections {
		add(s.name, elf.SHT_PROGBITS, s.data)
	}
	table := append(bytes.Clone(names), ".shstrtab\x00"...)
	add(".shstrtab", elf.SHT_STRTAB, table)
	var out bytes.Buffer
	head := elf.Header64{
		Type: uint16(kind), Machine: uint16(machine), Version: 1, Phoff: headSize, Shoff: at(), Ehsize: headSize,
		Phentsize: progSize, Phnum: uint16(len(programs)), Shentsize: sectSize,
		Shnum: uint16(len(sections) + 2), Shstrndx: uint16(len(sections) + 1),
	}
	copy(head.Ident[:], "\x7fELF\x02\x01\x01")
	put(&out, head)
	for _, part := range []bytes.Buffer{progs, body, sects} {
		out.Write(part.Bytes())
	}
	return out.Bytes()
}

// note is an ELF note.
func note(name string, kind uint32, desc []byte) []byte {
	out := binary.LittleEndian.AppendUint32(nil, uint32(len(name)+1))
	out = binary.LittleEndian.AppendUint32(out, uint32(len(desc)))
	out = binary.LittleEndian.AppendUint32(out, kind)
	out = append(append(out, name...), 0)
	out = append(out, make([]byte, -len(out)&3)...)
	return append(out, desc...)
}

const fakeRelease = "6.9.0-fake"

// vmlinux is an uncompressed x86-64 kernel, entered directly when pvh.
func vmlinux(pvh bool, extra string) []byte {
	notes := note("GNU", 3, []byte("0123"))
	if pvh {
		notes = append(notes, note("Xen", 18, make([]byte, 4))...)
	}
	banner := "junk Linux version %s junk\x00Linux version " + fakeRelease + " (someone@somewhere) #1 SMP\x00" + extra
	return elfFile(elf.ET_EXEC, elf.EM_X86_64, []program{{elf.PT_NOTE, notes}, {elf.PT_LOAD, []byte(banner)}}, nil)
}

// bzImage makes the boot file of a kernel, payload being what unpacks to it
// with the length that the build appends.
func bzImage(payload []byte) []byte {
	const setupSectors, payloadAt = 3, 0x100
	img := make([]byte, (setupSectors+1)*512+payloadAt)
	img[0x1f1] = setupSectors
	copy(img[0x202:], "HdrS")
	binary.LittleEndian.PutUint16(img[0x206:], 0x020f)
	binary.LittleEndian.PutUint16(img[0x20e:], 0x300)
	copy(img[0x500:], fakeRelease+" (someone@somewhere) #1\x00")
	img[0x236] = 1
	binary.LittleEndian.PutUint32(img[0x248:], payloadAt)
	binary.LittleEndian.PutUint32(img[0x24c:], uint32(len(payload)))
	return append(append(img, payload...), "signature or so"...)
}

// payload compresses a kernel as its build does.
func payload(t testing.TB, kind string, kernel []byte) []byte {
	t.Helper()
	packed := pack(t, kind, kernel)
	if kind == "gzip" {
		return packed // ends with the size anyway
	}
	return binary.LittleEndian.AppendUint32(packed, uint32(len(kernel)))
}

// pack compresses data.
func pack(t testing.TB, kind string, data []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	var w io.WriteCloser
	var err error
	switch kind {
	case "none":
		return bytes.Clone(data)
	case "gzip":
		w = gzip.NewWriter(&out)
	case "zstd":
		w, err = zstd.NewWriter(&out)
	case "xz":
		w, err = xz.WriterConfig{CheckSum: xz.CRC32}.NewWriter(&out)
	case "lz4":
		z := lz4.NewWriter(&out)
		err = z.Apply(lz4.LegacyOption(true))
		w = z
	default:
		t.Fatalf("no compression %s", kind)
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// ko is a kernel module with these fields of modinfo.
func ko(fields ...string) []byte {
	info := strings.Join(append([]string{"license=GPL"}, fields...), "\x00") + "\x00"
	return elfFile(elf.ET_REL, elf.EM_X86_64, nil, []section{{".modinfo", []byte(info)}})
}

// debianTree is the part of a /lib/modules/<release> that matters, as Debian 12
// builds it.
func debianTree() map[string][]byte {
	return map[string][]byte{
		"modules.builtin":                                  []byte("kernel/fs/ext4/ext4.ko\nkernel/crypto/crc32c_generic.ko\nkernel/net/packet/af_packet.ko\n"),
		"kernel/drivers/virtio/virtio.ko":                  ko("depends=virtio_ring"),
		"kernel/drivers/virtio/virtio_ring.ko":             ko("depends="),
		"kernel/drivers/virtio/virtio_pci_legacy_dev.ko":   ko("depends="),
		"kernel/drivers/virtio/virtio_pci_modern_dev.ko":   ko("depends="),
		"kernel/drivers/virtio/virtio_pci.ko":              ko("depends=virtio_ring,virtio_pci_modern_dev,virtio_pci_legacy_dev,virtio"),
		"kernel/drivers/virtio/virtio_mmio.ko":             ko("depends=virtio,virtio_ring"),
		"kernel/drivers/virtio/virtio_balloon.ko":          ko("depends=virtio,virtio_ring"),
		"kernel/drivers/block/virtio_blk.ko":               ko("depends=virtio,virtio_ring"),
		"kernel/drivers/char/virtio_console.ko":            ko("depends=virtio,virtio_ring"),
		"kernel/lib/libcrc32c.ko":                          ko("softdep=pre: crc32c", "depends="),
		"kernel/fs/erofs/erofs.ko":                         ko("depends=libcrc32c"),
		"kernel/fs/overlayfs/overlay.ko":                   ko("depends="),
		"kernel/net/core/failover.ko":                      ko("depends="),
		"kernel/drivers/net/net_failover.ko":               ko("depends=failover"),
		"kernel/drivers/net/virtio_net.ko":                 ko("depends=virtio_ring,virtio,net_failover"),
		"kernel/drivers/net/ethernet/intel/e1000/e1000.ko": ko("depends="),
	}
}

// writeTree writes files below a new directory and returns it.
func writeTree(t testing.TB, dir string, files map[string][]byte) string {
	t.Helper()
	for name, data := range files {
		writeFile(t, filepath.Join(dir, name), data, 0o644)
	}
	return dir
}

func writeFile(t testing.TB, path string, data []byte, mode os.FileMode) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, data, mode); err != nil {
		t.Fatal(err)
	}
	// The umask must not decide what a test sees.
	if err := os.Chmod(path, mode); err != nil {
		t.Fatal(err)
	}
}

func readFile(t testing.TB, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// privateDir is a directory that only this user may enter.
func privateDir(t testing.TB) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "vmm")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return dir
}

// env makes a getenv of pairs.
func env(pairs ...string) func(string) string {
	return func(key string) string {
		for i := 0; i < len(pairs); i += 2 {
			if pairs[i] == key {
				return pairs[i+1]
			}
		}
		return ""
	}
}

// needProgram skips the test, saying so, where a program is not installed.
func needProgram(t *testing.T, names ...string) string {
	t.Helper()
	for _, name := range names {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	t.Skipf("SKIP: none of %s is installed", strings.Join(names, ", "))
	return ""
}

// noTemporaries fails when something under a temporary name is left in dir.
func noTemporaries(t testing.TB, dir string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".") || strings.Contains(e.Name(), "partial") {
			t.Errorf("%s was left in %s", e.Name(), dir)
		}
	}
}
