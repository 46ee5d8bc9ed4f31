package l1

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
)

// errUnknownQEMU tells that a QEMU has not the machine code that is mended.
var errUnknownQEMU = errors.New("its code is not that of Debian 12's QEMU")

// anyByte stands for a byte of the code that differs from build to build.
const anyByte = -1

// injection is QEMU's code for VMRUN with an interrupt to inject, as compiled for
// Debian 12 from helper_vmrun in target/i386/tcg/sysemu/svm_helper.c. Its second
// store, at injectionStore, is one too many: it leaves the interrupt's vector
// behind as a pending exception although the interrupt was delivered. When
// another thread of QEMU then wants the CPU, which is at every tick of a clock,
// and the CPU is just looking for work, that exception is delivered too: the
// guest gets its interrupt a second time, in the midst of the handler and with
// interrupts off, and deadlocks or dies.
func injection() []int {
	code := []int{0x44, 0x89, 0xab, anyByte, anyByte, anyByte, anyByte} // mov %r13d, error_code
	code = append(code, 0x89, 0xb3, anyByte, anyByte, 0xff, 0xff)       // mov %esi, exception_index
	code = append(code, 0xc7, 0x83, anyByte, anyByte, anyByte, anyByte, // movl $0, exception_is_int
		0, 0, 0, 0)
	code = append(code, 0x48, 0xc7, 0x83, anyByte, anyByte, anyByte, anyByte, // movq $-1, exception_next_eip
		0xff, 0xff, 0xff, 0xff)
	code = append(code, 0xf6, 0x05, anyByte, anyByte, anyByte, anyByte, 2) // testb $2, loglevel
	code = append(code, 0x0f, 0x85, anyByte, anyByte, anyByte, anyByte)    // jne
	return append(code, 0xba, 1, 0, 0, 0,                                  // mov $1, %edx
		0x48, 0x89, 0xdf, // mov %rbx, %rdi
		0xe8) // call do_interrupt_x86_hardirq
}

// injectionStore is where in injection the wrong store is, and nothing what
// takes its place: an instruction that does nothing.
const injectionStore = 7

func nothing() []byte { return []byte{0x66, 0x0f, 0x1f, 0x44, 0, 0} }

// findStore returns where in a QEMU program the wrong store is.
func findStore(program []byte) (int64, error) {
	code := injection()
	found := int64(-1)
	for at := 0; ; at++ {
		next := bytes.Index(program[at:], []byte{byte(code[0]), byte(code[1]), byte(code[2])})
		if next < 0 || at+next+len(code) > len(program) {
			break
		}
		at += next
		same := func(want int, b byte) bool { return want == anyByte || want == int(b) }
		if !slices.EqualFunc(code, program[at:at+len(code)], same) {
			continue
		}
		if found >= 0 {
			return 0, errUnknownQEMU
		}
		found = int64(at) + injectionStore
	}
	if found < 0 {
		return 0, errUnknownQEMU
	}
	return found, nil
}

// mend takes the wrong store out of a running QEMU, a child of this process that
// has not emulated a VMRUN yet: its file stays as it is. The error is
// errUnknownQEMU if there is no such store in it.
func mend(pid int) (err error) {
	proc := fmt.Sprintf("/proc/%d/", pid)
	program, err := os.ReadFile(proc + "exe")
	if err != nil {
		return err
	}
	offset, err := findStore(program)
	if err != nil {
		return err
	}
	path, err := os.Readlink(proc + "exe")
	if err != nil {
		return err
	}
	maps, err := os.ReadFile(proc + "maps")
	if err != nil {
		return err
	}
	address, err := addressOf(string(maps), path, offset)
	if err != nil {
		return err
	}
	memory, err := os.OpenFile(proc+"mem", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, memory.Close()) }()
	_, err = memory.WriteAt(nothing(), address)
	return err
}

// addressOf is where the byte at an offset of a program's code is in a process
// with these maps.
func addressOf(maps, path string, offset int64) (int64, error) {
	for lines := bufio.NewScanner(strings.NewReader(maps)); lines.Scan(); {
		var start, end, from int64
		var mode, device, inode string
		n, err := fmt.Sscanf(lines.Text(), "%x-%x %s %x %s %s", &start, &end, &mode, &from, &device, &inode)
		if n < 6 || err != nil || !strings.Contains(mode, "x") || !strings.HasSuffix(lines.Text(), " "+path) {
			continue
		}
		if offset >= from && offset < from+end-start {
			return start + offset - from, nil
		}
	}
	return 0, fmt.Errorf("the code of %s is not in its process", path)
}
