package vmassets_test

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"os"
	"path/filepath"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vmassets"
)

// A real module keeps all that the kernel loads but what is named here.
func TestLeanRealModules(t *testing.T) {
	t.Parallel()
	roots, err := layout.FromEnvironment(os.Getenv)
	if err != nil {
		t.Skipf("SKIPPED: %v", err)
	}
	kernel, err := vmassets.Find(roots.VMM(), os.Getenv)
	if err != nil || len(kernel.Modules) == 0 {
		t.Skipf("SKIPPED: no kernel with modules here: %v", err)
	}
	for _, name := range kernel.Modules {
		before := readFile(t, filepath.Join(filepath.Dir(kernel.Image), "modules", name))
		checkLean(t, name, before, vmassets.Lean(before))
	}
}

func checkLean(t *testing.T, name string, before, after []byte) {
	t.Helper()
	old, err := elf.NewFile(bytes.NewReader(before))
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	lean, err := elf.NewFile(bytes.NewReader(after))
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	if len(old.Sections) != len(lean.Sections) {
		t.Fatalf("%s: %d sections became %d", name, len(old.Sections), len(lean.Sections))
	}
	gone := map[string]bool{".BTF": true, ".orc_unwind": true, ".orc_unwind_ip": true, "__mcount_loc": true, ".static_call_sites": true}
	for i, s := range old.Sections {
		now := lean.Sections[i]
		if gone[s.Name] {
			if now.Flags&elf.SHF_ALLOC != 0 || (s.Flags&elf.SHF_ALLOC == 0 && now.Size != 0) {
				t.Errorf("%s: %s is still loaded: %+v", name, s.Name, now.SectionHeader)
			}
			continue
		}
		if now.SectionHeader != s.SectionHeader {
			t.Errorf("%s: %s is %+v, not %+v", name, s.Name, now.SectionHeader, s.SectionHeader)
		}
	}
}

func TestLeanLeavesWhatItDoesNotUnderstand(t *testing.T) {
	t.Parallel()
	whole := elfFile(elf.ET_REL, elf.EM_X86_64, nil, []section{{".text", []byte("code")}, {".BTF", []byte("types")}})
	other := bytes.Clone(whole)
	other[elf.EI_DATA] = byte(elf.ELFDATA2MSB)
	far := bytes.Clone(whole)
	binary.LittleEndian.PutUint64(far[40:], 1<<62) // where the section headers are
	for name, in := range map[string][]byte{
		"nothing": nil, "text": []byte("\x7fELF the module"), "a part": whole[:len(whole)-1], "big-endian": other, "far headers": far,
	} {
		if got := vmassets.Lean(in); !bytes.Equal(got, in) {
			t.Errorf("%s became %q", name, got)
		}
	}
	lean, err := elf.NewFile(bytes.NewReader(vmassets.Lean(whole)))
	if err != nil {
		t.Fatal(err)
	}
	if text, types := lean.Section(".text"), lean.Section(".BTF"); text.Size != 4 || types.Size != 0 {
		t.Errorf("sizes are %d and %d", text.Size, types.Size)
	}
}
