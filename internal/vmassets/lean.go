package vmassets

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
)

// lean makes a module load faster, without a change of what it does: it cuts off
// the signature and hides what only tracing, debugging and a shorter way for
// some calls need. Measured, it saves an emulated CPU a sixth of the loading.
func lean(ko []byte) []byte { return hideSections(unsigned(ko)) }

// unsigned cuts the signature off a module's end (Linux, module_signature.h: the
// signature, 12 bytes about it, a fixed text). The guest does not load the keys to
// check it with, which saves it time, but would still compute the hash.
func unsigned(ko []byte) []byte {
	const mark, about = "~Module signature appended~\n", 12
	body, found := bytes.CutSuffix(ko, []byte(mark))
	if !found || len(body) < about {
		return ko
	}
	head := body[len(body)-about:]
	size := uint64(head[3]) + uint64(head[4]) + uint64(binary.BigEndian.Uint32(head[8:])) + about
	if size > uint64(len(body)) {
		return ko
	}
	return body[:uint64(len(body))-size]
}

// hidden tells which sections of a module the kernel does without
// (kernel/module/main.c, find_module_sections):
//
//	.BTF                types for BPF programs, all of which it checks
//	.orc_unwind*        for traces of the stack: it sorts them
//	__mcount_loc        calls for function tracing, each of which it replaces
//	                    by nothing; left as they are they return at once
//	.static_call_sites  calls that it makes direct; left as they are they jump once more
func hidden(name string) bool {
	switch name {
	case ".BTF", ".orc_unwind", ".orc_unwind_ip", "__mcount_loc", ".static_call_sites":
		return true
	}
	return false
}

// hideSections makes the kernel overlook sections: it ignores one that is not to
// be loaded, and relocations into it, or that is empty. The rest stays in place.
// What is no whole ELF module is returned as it is: the kernel will say so.
func hideSections(ko []byte) []byte {
	file, err := elf.NewFile(bytes.NewReader(ko))
	if err != nil || file.Class != elf.ELFCLASS64 || file.ByteOrder != binary.LittleEndian {
		return ko
	}
	// ELF-64 object file format: e_shoff and e_shentsize; sh_flags and sh_size.
	const tableAt, sizeAt, flagsIn, sizeIn = 40, 58, 8, 32
	table := binary.LittleEndian.Uint64(ko[tableAt:])
	size := uint64(binary.LittleEndian.Uint16(ko[sizeAt:]))
	out := bytes.Clone(ko)
	for i, s := range file.Sections {
		if !hidden(s.Name) {
			continue
		}
		header := out[table+uint64(i)*size:]
		binary.LittleEndian.PutUint64(header[flagsIn:], uint64(s.Flags&^elf.SHF_ALLOC))
		if s.Flags&elf.SHF_ALLOC == 0 {
			binary.LittleEndian.PutUint64(header[sizeIn:], 0)
		}
	}
	return out
}
