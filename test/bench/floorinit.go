package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
)

// marker is what the floor's init prints as its first and only output.
const marker = "III-FLOOR-INIT\n"

// floorInit is the smallest init there is: a static ELF program of a few
// machine instructions that prints marker and then restarts the machine at
// once, or, to be looked at, stays.
func floorInit(arch string, stay bool) ([]byte, error) {
	switch arch {
	case "amd64":
		return elfProgram(62, func(text uint64) []byte { return amd64Code(text, stay) }), nil
	case "arm64":
		return elfProgram(183, func(text uint64) []byte { return arm64Code(text, stay) }), nil
	}
	return nil, fmt.Errorf("no floor init is known for %s", arch)
}

// Arguments of reboot(2), linux/reboot.h.
const (
	rebootMagic1  = 0xfee1dead
	rebootMagic2  = 672274793
	rebootRestart = 0x01234567
)

// elfProgram wraps code into an ELF executable for the machine, loaded at 4 MiB,
// with marker behind the header; code gets marker's address.
func elfProgram(machine uint16, code func(text uint64) []byte) []byte {
	const base, headers = 0x400000, 64 + 56
	text := append([]byte(marker), make([]byte, (8-len(marker)%8)%8)...)
	start := uint64(base + headers + len(text))
	body := append(text, code(base+headers)...)
	var out bytes.Buffer
	put := func(values ...any) {
		for _, v := range values {
			// A bytes.Buffer takes every fixed-size value.
			_ = binary.Write(&out, binary.LittleEndian, v)
		}
	}
	out.Write([]byte{0x7f, 'E', 'L', 'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0})
	put(uint16(2), machine, uint32(1), start, uint64(64), uint64(0), uint32(0)) // ET_EXEC, entry, program headers
	put(uint16(64), uint16(56), uint16(1), uint16(0), uint16(0), uint16(0))     // header sizes, one segment
	size := uint64(headers + len(body))
	put(uint32(1), uint32(5), uint64(0), uint64(base), uint64(base), size, size, uint64(0x1000)) // PT_LOAD, r-x
	out.Write(body)
	return out.Bytes()
}

// amd64Code: write(1, text, len), then reboot(2), then pause(2) forever.
func amd64Code(text uint64, stay bool) []byte {
	var c []byte
	imm := func(op byte, v uint32) { c = binary.LittleEndian.AppendUint32(append(c, op), v) }
	const eax, edx, esi, edi = 0xb8, 0xba, 0xbe, 0xbf // mov reg, imm32
	syscall := []byte{0x0f, 0x05}
	imm(eax, 1)
	imm(edi, 1)
	imm(esi, uint32(text))
	imm(edx, uint32(len(marker)))
	c = append(c, syscall...)
	if !stay {
		imm(eax, 169)
		imm(edi, rebootMagic1)
		imm(esi, rebootMagic2)
		imm(edx, rebootRestart)
		c = append(c, 0x45, 0x31, 0xd2) // xor r10d, r10d
		c = append(c, syscall...)
	}
	imm(eax, 34)
	c = append(c, syscall...)
	return append(c, 0xeb, 0xf7) // jump 9 bytes back, to the last mov
}

// arm64Code: write(1, text, len), then reboot(2), then ppoll(2) forever.
func arm64Code(text uint64, stay bool) []byte {
	var c []byte
	word := func(v uint32) { c = binary.LittleEndian.AppendUint32(c, v) }
	mov := func(reg, v uint32) {
		word(0xd2800000 | v&0xffff<<5 | reg)     // movz
		word(0xf2a00000 | v>>16&0xffff<<5 | reg) // movk, lsl 16
	}
	call := func(number uint32, args ...uint32) {
		for i, a := range args {
			mov(uint32(i), a)
		}
		mov(8, number)
		word(0xd4000001) // svc 0
	}
	call(64, 1, uint32(text), uint32(len(marker)))
	if !stay {
		call(142, rebootMagic1, rebootMagic2, rebootRestart, 0)
	}
	begin := len(c)
	call(73, 0, 0, 0, 0)
	back := int32(begin-len(c)) / 4
	word(0x14000000 | uint32(back)&0x03ffffff) // branch back
	return c
}

// floorInitramfs is a newc archive with that init and the console it prints to.
func floorInitramfs(arch string, stay bool) ([]byte, error) {
	program, err := floorInit(arch, stay)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	pad := func() { out.Write(make([]byte, -out.Len()&3)) }
	add := func(name string, mode uint32, major, minor int, data []byte) {
		fmt.Fprintf(&out, "070701%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%s\x00",
			0, mode, 0, 0, 1, 0, len(data), 0, 0, major, minor, len(name)+1, 0, name)
		pad()
		out.Write(data)
		pad()
	}
	add("dev", 0o040755, 0, 0, nil)
	add("dev/console", 0o020600, 5, 1, nil)
	add("init", 0o100755, 0, 0, program)
	add("TRAILER!!!", 0, 0, 0, nil)
	return out.Bytes(), nil
}
