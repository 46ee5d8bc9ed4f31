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

// fault is a wrong instruction of QEMU and the right one of the same length, with the
// code around it that tells it from others. Each anyByte of right is that of wrong.
type fault struct{ before, wrong, after, right []int }

// faults are those of QEMU 7.2 as compiled for Debian 12: two of helper_vmrun in
// target/i386/tcg/sysemu/svm_helper.c and one of cpu_clear_ignne in fpu_helper.c.
func faults() []fault {
	const x = anyByte
	return []fault{
		// VMRUN with an interrupt to inject leaves the interrupt's vector behind as a
		// pending exception although it was delivered. When another thread of QEMU
		// then wants the CPU, which is at every tick of a clock, and the CPU is just
		// looking for work, that exception is delivered too: the guest gets its
		// interrupt a second time, in the midst of the handler and with interrupts
		// off, and deadlocks or dies.
		{
			before: []int{0x44, 0x89, 0xab, x, x, x, x}, // mov %r13d, error_code
			wrong:  []int{0x89, 0xb3, x, x, 0xff, 0xff}, // mov %esi, exception_index
			after: []int{
				0xc7, 0x83, x, x, x, x, 0, 0, 0, 0, // movl $0, exception_is_int
				0x48, 0xc7, 0x83, x, x, x, x, 0xff, 0xff, 0xff, 0xff, // movq $-1, exception_next_eip
				0xf6, 0x05, x, x, x, x, 2, // testb $2, loglevel
				0x0f, 0x85, x, x, x, x, // jne
				0xba, 1, 0, 0, 0, // mov $1, %edx
				0x48, 0x89, 0xdf, // mov %rbx, %rdi
				0xe8, // call do_interrupt_x86_hardirq
			},
			right: []int{0x66, 0x0f, 0x1f, 0x44, 0, 0}, // nop
		},
		// VMRUN with a virtual interrupt pending adds that to the CPU's requests
		// without a lock: a request that another thread makes meanwhile is lost. When
		// that is the tick of a CPU's clock, which asks for the next one itself, the
		// CPU stands still.
		{
			before: []int{0x39, 0xf9, 0x72, 0x0e, 0x85, 0xf6, 0x74, 0x0a}, // cmp, jb, test, je: whether one is pending
			wrong:  []int{0x81, 0x8b, x, x, x, x, 0, 1, 0, 0},             // orl $0x100, interrupt_request
			right:  []int{0xf0, 0x0f, 0xba, 0xab, x, x, x, x, 8, 0x90},    // lock btsl $8, interrupt_request; nop
		},
		// Whichever CPU loads the state of its FPU, as at every change of tasks, clears
		// a flag of the first CPU, without a lock, in the word that also tells whether
		// that CPU is in a guest with nested paging and takes interrupts. When the
		// first CPU leaves a guest just then, what it clears there comes back: the
		// kernel's next instruction is looked for in the guest's memory, and the
		// kernel's registers become the guest's, which dies of a triple fault. The
		// flag is for programs of DOS.
		{
			before: []int{
				0x48, 0x8d, 0x15, x, x, x, x, // lea, the second argument
				0x48, 0x8d, 0x35, x, x, x, x, // lea, the first one
				0xe8, x, x, x, x, // call object_dynamic_cast_assert
			},
			wrong: []int{0x81, 0xa0, x, x, x, x, 0x7f, 0xff, 0xff, 0xff}, // andl $~0x80, hflags2
			after: []int{0x48, 0x83, 0xc4, 8, 0xc3},                      // add $8, %rsp; ret
			right: []int{0x66, 0x2e, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0},    // nop
		},
	}
}

// find returns where in a QEMU program the wrong instruction is.
func (f fault) find(program []byte) (int64, error) {
	code := slices.Concat(f.before, f.wrong, f.after)
	first := []byte{byte(code[0]), byte(code[1]), byte(code[2])} // never anyByte
	found := int64(-1)
	for at := 0; ; at++ {
		next := bytes.Index(program[at:], first)
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
		found = int64(at + len(f.before))
	}
	if found < 0 {
		return 0, errUnknownQEMU
	}
	return found, nil
}

// mended is the right instruction in the place of that wrong one.
func (f fault) mended(wrong []byte) []byte {
	var operands []byte
	for i, b := range f.wrong {
		if b == anyByte {
			operands = append(operands, wrong[i])
		}
	}
	var code []byte
	for _, b := range f.right {
		if b == anyByte {
			b = int(operands[0])
			operands = operands[1:]
		}
		code = append(code, byte(b))
	}
	return code
}

// mend takes the faults out of a running QEMU, a child of this process that has not
// emulated a VMRUN yet: its file stays as it is. The error is errUnknownQEMU, and
// nothing is changed, if one of them is not in it.
func mend(pid int) (err error) {
	proc := fmt.Sprintf("/proc/%d/", pid)
	program, err := os.ReadFile(proc + "exe")
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
	patches := map[int64][]byte{}
	for _, f := range faults() {
		offset, err := f.find(program)
		if err != nil {
			return err
		}
		address, err := addressOf(string(maps), path, offset)
		if err != nil {
			return err
		}
		patches[address] = f.mended(program[offset : offset+int64(len(f.wrong))])
	}
	memory, err := os.OpenFile(proc+"mem", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, memory.Close()) }()
	for address, right := range patches {
		if _, err := memory.WriteAt(right, address); err != nil {
			return err
		}
	}
	return nil
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
