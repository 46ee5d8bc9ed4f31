package vmassets_test

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/vmassets"
)

// own finds the kernel that a user named.
func own(t *testing.T, dir, image, modules string) (*vmassets.Kernel, error) {
	t.Helper()
	if runtime.GOARCH != "amd64" {
		t.Skip("SKIP: the kernels made here are for amd64")
	}
	return vmassets.Find(dir, env("III_VM_KERNEL", image, "III_VM_MODULES", modules))
}

func TestOwnKernelIsUnpacked(t *testing.T) {
	t.Parallel()
	kernel := vmlinux(true, strings.Repeat("text ", 300_000))
	for name, file := range map[string][]byte{
		"lz4":     bzImage(payload(t, "lz4", kernel)),
		"gzip":    bzImage(payload(t, "gzip", kernel)),
		"zstd":    bzImage(payload(t, "zstd", kernel)),
		"none":    bzImage(payload(t, "none", kernel)),
		"xz":      bzImage(payload(t, "xz", kernel)),
		"vmlinux": kernel,
		"gz":      pack(t, "gzip", kernel),
		"zboot":   zboot(t, kernel),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if name == "xz" {
				needProgram(t, "xz")
			}
			dir := privateDir(t)
			image := filepath.Join(t.TempDir(), "kernel")
			writeFile(t, image, file, 0o644)
			k, err := own(t, dir, image, writeTree(t, t.TempDir(), debianTree()))
			if err != nil {
				t.Fatal(err)
			}
			if got := readFile(t, k.Image); !bytes.Equal(got, kernel) {
				t.Errorf("the image has %d bytes that differ from the %d of the kernel", len(got), len(kernel))
			}
			if k.Indirect != "" || k.Release != fakeRelease || k.Version != "own" || k.Arch != "amd64" {
				t.Errorf("kernel is %+v", k)
			}
			noTemporaries(t, filepath.Join(dir, "kernels"))
		})
	}
}

func TestOwnKernelThatCannotBeEnteredDirectlyBootsAsItIs(t *testing.T) {
	t.Parallel()
	kernel := vmlinux(true, "")
	old := bzImage(payload(t, "lz4", kernel))
	binary.LittleEndian.PutUint16(old[0x206:], 0x0207)
	for name, c := range map[string]struct {
		file   []byte
		reason string
	}{
		"lzma":         {bzImage([]byte("\x5d\x00\x00 some lzma stream")), "lzma"},
		"unknown":      {bzImage([]byte("what is this now?")), "77 68 61 74"},
		"no PVH":       {bzImage(payload(t, "lz4", vmlinux(false, ""))), "PVH"},
		"old protocol": {old, "0x207"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			image := filepath.Join(t.TempDir(), "vmlinuz")
			writeFile(t, image, c.file, 0o644)
			k, err := own(t, privateDir(t), image, writeTree(t, t.TempDir(), debianTree()))
			if err != nil {
				t.Fatal(err)
			}
			if !strings.Contains(k.Indirect, c.reason) {
				t.Errorf("the reason is %q, without %q", k.Indirect, c.reason)
			}
			if !bytes.Equal(readFile(t, k.Image), c.file) {
				t.Error("the image is not the file as it was")
			}
		})
	}
}

// mutate returns a copy of img that change was applied to.
func mutate(img []byte, change func([]byte) []byte) []byte { return change(bytes.Clone(img)) }

func TestOwnKernelThatIsNoneIsRefused(t *testing.T) {
	t.Parallel()
	good := bzImage(payload(t, "lz4", vmlinux(true, strings.Repeat("text", 1000))))
	arm := make([]byte, 128)
	copy(arm[56:], "ARM\x64")
	for name, c := range map[string]struct {
		file []byte
		want string
	}{
		"empty":           {nil, "fewer than"},
		"text":            {[]byte(strings.Repeat("not a kernel ", 1000)), "not a Linux kernel"},
		"cut off":         {good[:0x300], "release"},
		"payload cut off": {mutate(good, func(b []byte) []byte { return b[:0x900] }), "bytes of compressed kernel at"},
		"payload beyond the file": {mutate(good, func(b []byte) []byte {
			binary.LittleEndian.PutUint32(b[0x248:], 0xfffffff0)
			return b
		}), "bytes of compressed kernel at"},
		"payload of no size": {mutate(good, func(b []byte) []byte {
			binary.LittleEndian.PutUint32(b[0x24c:], 0)
			return b
		}), "compressed kernel of 0 bytes"},
		"payload of 4 GiB": {mutate(good, func(b []byte) []byte {
			binary.LittleEndian.PutUint32(b[0x24c:], 0xffffffff)
			return b
		}), "compressed kernel of"},
		"other size": {bzImage(binary.LittleEndian.AppendUint32(pack(t, "lz4", vmlinux(true, "")), 7)), "damaged"},
		"payload damaged": {bzImage(mutate(payload(t, "gzip", vmlinux(true, "")), func(b []byte) []byte {
			b[len(b)/2] ^= 0xff
			return b
		})), "gzip"},
		"32 bit": {mutate(good, func(b []byte) []byte {
			b[0x236] = 0
			return b
		}), "32-bit"},
		"release with a path": {mutate(good, func(b []byte) []byte {
			copy(b[0x500:], "6.1/../../x \x00")
			return b
		}), "release"},
		"arm64":           {arm, "release"},
		"vmlinux, no PVH": {vmlinux(false, ""), "PVH"},
		"other machine":   {elfFile(elf.ET_EXEC, elf.EM_RISCV, nil, nil), "EM_RISCV"},
		"damaged ELF":     {vmlinux(true, "")[:70], "EOF"},
		"no banner":       {elfFile(elf.ET_EXEC, elf.EM_X86_64, []program{{elf.PT_NOTE, note("Xen", 18, nil)}}, nil), "release"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := privateDir(t)
			image := filepath.Join(t.TempDir(), "vmlinuz")
			writeFile(t, image, c.file, 0o644)
			_, err := own(t, dir, image, writeTree(t, t.TempDir(), debianTree()))
			if err == nil {
				t.Fatal("it was taken")
			}
			for _, want := range []string{c.want, image, "III_VM_KERNEL"} {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q does not say %q", err, want)
				}
			}
			noTemporaries(t, filepath.Join(dir, "kernels"))
		})
	}
}

func TestModulesAreLoadedAfterWhatTheyNeed(t *testing.T) {
	t.Parallel()
	golden := []string{
		"virtio_ring.ko", "virtio_pci_modern_dev.ko", "virtio_pci_legacy_dev.ko", "virtio.ko", "virtio_pci.ko", "virtio_mmio.ko",
		"virtio_blk.ko", "virtio_console.ko", "libcrc32c.ko", "erofs.ko", "overlay.ko", "failover.ko", "net_failover.ko", "virtio_net.ko",
	}
	without := func(remove ...string) map[string][]byte {
		tree := debianTree()
		for _, name := range remove {
			delete(tree, name)
		}
		return tree
	}
	compressed := map[string][]byte{}
	kinds, exts := []string{"xz", "zstd", "gzip"}, []string{".xz", ".zst", ".gz"}
	names := make([]string, 0, len(debianTree()))
	for name := range debianTree() {
		names = append(names, name)
	}
	slices.Sort(names)
	for i, name := range names {
		data := debianTree()[name]
		if strings.HasSuffix(name, ".ko") {
			compressed[name+exts[i%3]] = pack(t, kinds[i%3], data)
		} else {
			compressed[name] = data
		}
	}
	// Where the checksum is a module, it comes before its user.
	soft := without("modules.builtin")
	soft["modules.builtin"] = []byte("kernel/fs/ext4/ext4.ko\n")
	soft["kernel/crypto/crc32c-generic.ko"] = ko("depends=")
	withSoft := slices.Insert(slices.Clone(golden), slices.Index(golden, "libcrc32c.ko"), "crc32c_generic.ko")
	circle := debianTree()
	circle["kernel/drivers/virtio/virtio_ring.ko"] = ko("depends=virtio")
	inCircle := slices.Clone(golden)
	inCircle = slices.DeleteFunc(inCircle, func(s string) bool { return s == "virtio.ko" })
	inCircle = slices.Insert(inCircle, 0, "virtio.ko")

	for name, c := range map[string]struct {
		tree map[string][]byte
		want []string
	}{
		"Debian 12":       {debianTree(), golden},
		"compressed":      {compressed, golden},
		"soft":            {soft, withSoft},
		"circle":          {circle, inCircle},
		"without microvm": {without("kernel/drivers/virtio/virtio_mmio.ko"), slices.DeleteFunc(slices.Clone(golden), func(s string) bool { return s == "virtio_mmio.ko" })},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			image := filepath.Join(t.TempDir(), "vmlinux")
			writeFile(t, image, vmlinux(true, ""), 0o644)
			k, err := own(t, privateDir(t), image, writeTree(t, t.TempDir(), c.tree))
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(k.Modules, c.want) {
				t.Errorf("the order is\n%v, not\n%v", k.Modules, c.want)
			}
			dir := filepath.Join(filepath.Dir(k.Image), "modules")
			if got := string(readFile(t, filepath.Join(dir, "order"))); got != strings.Join(c.want, "\n")+"\n" {
				t.Errorf("the order file is %q", got)
			}
			if got := readFile(t, filepath.Join(dir, "overlay.ko")); !bytes.Equal(got, debianTree()["kernel/fs/overlayfs/overlay.ko"]) {
				t.Error("overlay.ko is not what it was")
			}
		})
	}
}

func TestModulesThatCannotWorkAreRefused(t *testing.T) {
	t.Parallel()
	change := func(name string, data []byte) map[string][]byte {
		tree := debianTree()
		delete(tree, strings.TrimSuffix(name, ".bz2"))
		if data != nil {
			tree[name] = data
		}
		return tree
	}
	const erofs = "kernel/fs/erofs/erofs.ko"
	for name, c := range map[string]struct {
		tree map[string][]byte
		want string
	}{
		"missing driver":     {change(erofs, nil), "no driver erofs"},
		"missing dependency": {change("kernel/lib/libcrc32c.ko", nil), "libcrc32c is needed"},
		"not ELF":            {change(erofs, []byte("no module")), "erofs.ko"},
		"not a module":       {change(erofs, elfFile(elf.ET_REL, elf.EM_X86_64, nil, nil)), "not a kernel module"},
		"bzip2":              {change(erofs+".bz2", []byte("BZh")), "compression"},
		"no modules":         {map[string][]byte{"modules.builtin": nil}, "no such file"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := privateDir(t)
			image := filepath.Join(t.TempDir(), "vmlinux")
			writeFile(t, image, vmlinux(true, ""), 0o644)
			_, err := own(t, dir, image, writeTree(t, t.TempDir(), c.tree))
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("the error is %v, without %q", err, c.want)
			}
			noTemporaries(t, filepath.Join(dir, "kernels"))
		})
	}
}

// Its open would wait for a writer.
func TestOwnKernelThatIsAFifoIsRefused(t *testing.T) {
	t.Parallel()
	image := filepath.Join(t.TempDir(), "kernel")
	if err := syscall.Mkfifo(image, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := vmassets.Find(t.TempDir(), env("III_VM_KERNEL", image))
	if err == nil || !strings.Contains(err.Error(), "not a regular file") {
		t.Errorf("error is %v", err)
	}
}

func TestOwnKernelWithoutModulesHasAllBuiltIn(t *testing.T) {
	t.Parallel()
	image := filepath.Join(t.TempDir(), "vmlinux")
	writeFile(t, image, vmlinux(true, ""), 0o644)
	k, err := own(t, privateDir(t), image, "")
	if err != nil {
		t.Fatal(err)
	}
	if len(k.Modules) != 0 {
		t.Errorf("modules are %v", k.Modules)
	}
}

func TestOwnKernelFollowsItsFiles(t *testing.T) {
	t.Parallel()
	dir := privateDir(t)
	image := filepath.Join(t.TempDir(), "vmlinux")
	writeFile(t, image, vmlinux(true, "one"), 0o644)
	modules := writeTree(t, t.TempDir(), debianTree())
	first, err := own(t, dir, image, modules)
	if err != nil {
		t.Fatal(err)
	}
	again, err := own(t, dir, image, modules)
	if err != nil || again.Image != first.Image {
		t.Errorf("an unchanged kernel was made again: %v, %v", again, err)
	}
	writeFile(t, image+".new", vmlinux(true, "two"), 0o644)
	if err := os.Rename(image+".new", image); err != nil {
		t.Fatal(err)
	}
	second, err := own(t, dir, image, modules)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(readFile(t, second.Image), vmlinux(true, "two")) {
		t.Error("the new image was not taken")
	}
	writeFile(t, filepath.Join(modules, "kernel/fs/overlayfs/overlay.ko"), ko("depends=", "version=2"), 0o644)
	third, err := own(t, dir, image, modules)
	if err != nil {
		t.Fatal(err)
	}
	if third.Image == second.Image {
		t.Error("a changed module was not taken")
	}
	for _, k := range []*vmassets.Kernel{first, second, third} {
		if _, err := os.Stat(k.Image); err != nil {
			t.Errorf("a kernel in use was removed: %v", err)
		}
	}
}

func TestOldOwnKernelsAreRemoved(t *testing.T) {
	t.Parallel()
	dir := privateDir(t)
	image := filepath.Join(t.TempDir(), "vmlinux")
	const made = 7
	long := time.Now().Add(-72 * time.Hour)
	var kernels []*vmassets.Kernel
	for i := range made {
		writeFile(t, image, vmlinux(true, strings.Repeat("x", i)), 0o644)
		k, err := own(t, dir, image, "")
		if err != nil {
			t.Fatal(err)
		}
		kernels = append(kernels, k)
		if i < made-1 {
			if err := os.Chtimes(filepath.Dir(k.Image), long, long.Add(time.Duration(i)*time.Minute)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, err := os.Stat(kernels[0].Image); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the oldest of %d kernels is still there: %v", made, err)
	}
	for _, k := range kernels[made-3:] {
		if _, err := os.Stat(k.Image); err != nil {
			t.Errorf("a kernel used lately was removed: %v", err)
		}
	}
}

func TestFindWithoutKernelNamesTheCure(t *testing.T) {
	t.Parallel()
	for name, prepare := range map[string]func(dir string){
		"nothing there": func(string) {},
		"kernel gone":   func(dir string) { writeFile(t, filepath.Join(dir, "kernels/current"), []byte("6.1_00"), 0o600) },
		"damaged name":  func(dir string) { writeFile(t, filepath.Join(dir, "kernels/current"), []byte("../../etc"), 0o600) },
		"empty name":    func(dir string) { writeFile(t, filepath.Join(dir, "kernels/current"), nil, 0o600) },
		"damaged manifest": func(dir string) {
			writeFile(t, filepath.Join(dir, "kernels/current"), []byte("k"), 0o600)
			writeFile(t, filepath.Join(dir, "kernels/k/kernel.json"), []byte("{"), 0o600)
		},
		"later format": func(dir string) {
			writeFile(t, filepath.Join(dir, "kernels/current"), []byte("k"), 0o600)
			writeFile(t, filepath.Join(dir, "kernels/k/kernel.json"), []byte(`{"format":99}`), 0o600)
		},
	} {
		dir := privateDir(t)
		prepare(dir)
		_, err := vmassets.Find(dir, env())
		if !errors.Is(err, vmassets.ErrNoKernel) || !strings.Contains(err.Error(), "adapter vmm setup") {
			t.Errorf("%s: the error is %v", name, err)
		}
	}
}
