package vmassets

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/klauspost/compress/zstd"
	"github.com/ulikunitz/xz"
)

// maxModule bounds one module: the largest in Debian has 10 MiB.
const maxModule = 64 << 20

// need is a driver that the guest uses.
type need struct {
	name     string
	optional bool
}

// needs lists what the guest loads, in this order; what these depend on comes
// before them. Both transports are there so that one archive serves every
// machine type: a driver without its device only costs its loading.
func needs() []need {
	return []need{
		{name: "virtio_pci"},
		{name: "virtio_mmio", optional: true}, // machine microvm
		{name: "virtio_blk"},
		{name: "virtio_console"},
		{name: "erofs"},
		{name: "ext4"},
		{name: "overlay"},
		{name: "virtio_net", optional: true}, // only VMs with a network
		{name: "af_packet", optional: true},
	}
}

// module is one file to load, uncompressed.
type module struct {
	name   string // with '_', without ".ko"
	source string // where it was read
	data   []byte
}

// moduleTree is a directory as made by a kernel's modules_install. It does not
// need modules.dep, which only depmod makes after installation: what a module
// needs stands in the module itself.
type moduleTree struct {
	files map[string]string
	// builtin names what is in the kernel image; nil when nobody knows.
	builtin map[string]bool
}

// openModules indexes dir, a /lib/modules/<release>.
func openModules(dir string) (*moduleTree, error) {
	t := &moduleTree{files: map[string]string{}}
	err := filepath.WalkDir(filepath.Join(dir, "kernel"), func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if base, _, found := strings.Cut(d.Name(), ".ko"); found && d.Type().IsRegular() {
			t.files[moduleName(base)] = path
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read the kernel's modules: %w", err)
	}
	f, err := os.Open(filepath.Join(dir, "modules.builtin"))
	if errors.Is(err, os.ErrNotExist) {
		return t, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close() //nolint:errcheck // only read
	t.builtin = map[string]bool{}
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		t.builtin[moduleName(strings.TrimSuffix(filepath.Base(lines.Text()), ".ko"))] = true
	}
	return t, lines.Err()
}

func moduleName(base string) string { return strings.ReplaceAll(base, "-", "_") }

// resolve returns the modules for wanted, each after those it depends on. What
// is not in the tree must be built in or optional; where there is no list of
// built-in drivers it is taken to be.
func (t *moduleTree) resolve(wanted []need) ([]module, error) {
	r := resolver{tree: t, seen: map[string]bool{}}
	for _, n := range wanted {
		switch _, there := t.files[n.name]; {
		case there:
			if err := r.add(n.name); err != nil {
				return nil, err
			}
		case t.builtin[n.name], n.optional, t.builtin == nil:
		default:
			return nil, fmt.Errorf("the kernel has no driver %s, neither as a module nor built in: choose a kernel that has it, such as Debian's cloud kernel", n.name)
		}
	}
	return r.order, nil
}

type resolver struct {
	tree  *moduleTree
	seen  map[string]bool
	order []module
}

// add appends name after its dependencies. The mark is set first, so a circle
// in damaged modules ends.
func (r *resolver) add(name string) error {
	if r.seen[name] {
		return nil
	}
	r.seen[name] = true
	path, there := r.tree.files[name]
	if !there {
		if r.tree.builtin == nil || r.tree.builtin[name] {
			return nil
		}
		return fmt.Errorf("module %s is needed by another but is not there", name)
	}
	data, err := readModule(path)
	if err != nil {
		return fmt.Errorf("module %s: %w", path, err)
	}
	depends, soft, err := moduleDepends(data)
	if err != nil {
		return fmt.Errorf("module %s: %w", path, err)
	}
	for _, dep := range soft {
		// A soft dependency names a service, like crc32c, that the kernel would
		// ask modprobe for; the guest has none.
		for _, candidate := range []string{dep, dep + "_generic"} {
			if _, there := r.tree.files[candidate]; there {
				if err := r.add(candidate); err != nil {
					return err
				}
				break
			}
		}
	}
	for _, dep := range depends {
		if err := r.add(dep); err != nil {
			return err
		}
	}
	r.order = append(r.order, module{name: name, source: path, data: data})
	return nil
}

// moduleDepends reads the fields depends and softdep (pre) of .modinfo, which
// holds NUL-terminated key=value strings.
func moduleDepends(data []byte) (depends, soft []string, err error) {
	f, err := elf.NewFile(bytes.NewReader(data))
	if err != nil {
		return nil, nil, err
	}
	section := f.Section(".modinfo")
	if section == nil {
		return nil, nil, errors.New("it has no .modinfo: it is not a kernel module")
	}
	info, err := section.Data()
	if err != nil {
		return nil, nil, err
	}
	for field := range bytes.SplitSeq(info, []byte{0}) {
		key, value, _ := strings.Cut(string(field), "=")
		switch key {
		case "depends":
			for name := range strings.SplitSeq(value, ",") {
				if name != "" {
					depends = append(depends, moduleName(name))
				}
			}
		case "softdep":
			before, _, _ := strings.Cut(value, "post:")
			for _, name := range strings.Fields(strings.ReplaceAll(before, "pre:", " ")) {
				soft = append(soft, moduleName(name))
			}
		}
	}
	return depends, soft, nil
}

// readModule reads a .ko, .ko.gz, .ko.xz or .ko.zst.
func readModule(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close() //nolint:errcheck // only read
	var r io.Reader = f
	switch filepath.Ext(path) {
	case ".ko":
	case ".gz":
		r, err = gzip.NewReader(f)
	case ".xz":
		r, err = xz.NewReader(bufio.NewReader(f))
	case ".zst":
		var z *zstd.Decoder
		if z, err = zstd.NewReader(f, zstd.WithDecoderConcurrency(1)); err == nil {
			defer z.Close()
			r = z
		}
	default:
		err = errors.New("its compression is not known (gz, xz and zst are)")
	}
	if err != nil {
		return nil, err
	}
	var data bytes.Buffer
	if _, err := copyAtMost(&data, r, maxModule); err != nil {
		return nil, err
	}
	return data.Bytes(), nil
}
