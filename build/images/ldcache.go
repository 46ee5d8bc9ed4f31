package main

import (
	"bytes"
	"context"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"
)

// machine is what differs between the processors that Debian runs on.
type machine struct {
	dir   string // library directory below /usr/lib
	flags uint32 // mark of its libraries in ld.so.cache
}

func machines() map[elf.Machine]machine {
	return map[elf.Machine]machine{
		elf.EM_X86_64:  {"x86_64-linux-gnu", 0x0303},
		elf.EM_AARCH64: {"aarch64-linux-gnu", 0x0a03},
	}
}

// library is one entry of ld.so.cache.
type library struct {
	soname, path string
	flags        uint32
}

// loaderCache writes /etc/ld.so.cache as ldconfig would. The loader does
// without it, but "ldconfig -p" and with it Python's ctypes.util.find_library
// know only what is in there; and ldconfig itself would need root to run on a
// tree that is not /.
func loaderCache(_ context.Context, t *tree, _ string) error {
	var libs []library
	for _, p := range t.paths() {
		lib, ok, err := t.library(p)
		if err != nil {
			return fmt.Errorf("/%s: %w", p, err)
		}
		if ok {
			libs = append(libs, lib)
		}
	}
	if len(libs) == 0 {
		return errors.New("no shared library found for ld.so.cache: the recipe does not fit this Debian release")
	}
	return t.write("etc/ld.so.cache", 0o644, encodeLoaderCache(libs))
}

// library reads p as a shared library found under its soname in the library
// directory of its machine.
func (t *tree) library(p string) (library, bool, error) {
	name := path.Base(p)
	isLib := strings.HasPrefix(name, "lib") || strings.HasPrefix(name, "ld-")
	if !isLib || !strings.Contains(name, ".so") || path.Dir(path.Dir(p)) != "usr/lib" {
		return library{}, false, nil
	}
	n := t.resolve(p)
	if n == nil {
		return library{}, false, nil
	}
	content, err := io.ReadAll(t.open(n))
	if err != nil {
		return library{}, false, err
	}
	if !bytes.HasPrefix(content, []byte(elf.ELFMAG)) {
		return library{}, false, nil // a linker script
	}
	f, err := elf.NewFile(bytes.NewReader(content))
	if err != nil {
		return library{}, false, err
	}
	m, ok := machines()[f.Machine]
	if !ok || path.Base(path.Dir(p)) != m.dir || f.Type != elf.ET_DYN {
		return library{}, false, nil
	}
	sonames, err := f.DynString(elf.DT_SONAME)
	if err != nil {
		return library{}, false, err
	}
	// Only the name that programs ask for; the package ships the link.
	if len(sonames) > 0 && sonames[0] != name {
		return library{}, false, nil
	}
	return library{soname: name, path: "/lib/" + m.dir + "/" + name, flags: m.flags}, true, nil
}

// resolve follows symlinks within one directory, which is how libraries are
// linked, to a regular file; nil if there is none.
func (t *tree) resolve(p string) *node {
	for range 8 {
		n, ok := t.nodes[p]
		if !ok {
			return nil
		}
		if n.target == "" {
			if t.isFile(p) {
				return n
			}
			return nil
		}
		if strings.Contains(n.target, "/") {
			return nil
		}
		p = path.Join(path.Dir(p), n.target)
	}
	return nil
}

// encodeLoaderCache lays the entries out in glibc's format 1.1 (elf/cache.c of
// glibc 2.2 and later): a header of 48 bytes, entries of 24 in falling order of
// soname, then the strings, found by offsets from the file's begin.
func encodeLoaderCache(libs []library) []byte {
	const headerSize, entrySize, littleEndian = 48, 24, 2
	slices.SortFunc(libs, func(a, b library) int { return -compareSonames(a.soname, b.soname) })
	var text []byte
	base := headerSize + entrySize*len(libs)
	entries := make([]byte, 0, entrySize*len(libs))
	le := binary.LittleEndian
	for _, lib := range libs {
		entries = le.AppendUint32(entries, lib.flags)
		key := base + len(text)
		text = append(append(text, lib.soname...), 0)
		value := base + len(text)
		text = append(append(text, lib.path...), 0)
		entries = le.AppendUint32(entries, uint32(key))
		entries = le.AppendUint32(entries, uint32(value))
		entries = le.AppendUint32(entries, 0) // OS version: any
		entries = le.AppendUint64(entries, 0) // hardware capabilities: none
	}
	out := append(make([]byte, 0, base+len(text)), "glibc-ld.so.cache1.1"...)
	out = le.AppendUint32(out, uint32(len(libs)))
	out = le.AppendUint32(out, uint32(len(text)))
	out = append(out, littleEndian, 0, 0, 0)
	out = append(out, make([]byte, 16)...) // no extensions, three unused words
	return append(append(out, entries...), text...)
}

// compareSonames is the order by which the loader searches its cache: like
// strings, but runs of digits compare as numbers and come after other bytes.
func compareSonames(a, b string) int {
	for a != "" && b != "" {
		na, nb := leadingDigits(a), leadingDigits(b)
		switch {
		case na != "" && nb != "":
			if c := compareNumbers(na, nb); c != 0 {
				return c
			}
			a, b = a[len(na):], b[len(nb):]
		case na != "":
			return 1
		case nb != "":
			return -1
		case a[0] != b[0]:
			return int(a[0]) - int(b[0])
		default:
			a, b = a[1:], b[1:]
		}
	}
	if a != "" && leadingDigits(a) != "" {
		return 1
	}
	return len(a) - len(b)
}

func leadingDigits(s string) string {
	return s[:len(s)-len(strings.TrimLeft(s, "0123456789"))]
}

func compareNumbers(a, b string) int {
	a, b = strings.TrimLeft(a, "0"), strings.TrimLeft(b, "0")
	if len(a) != len(b) {
		return len(a) - len(b)
	}
	return strings.Compare(a, b)
}
