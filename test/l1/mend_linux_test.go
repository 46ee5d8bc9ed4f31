package l1_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/vmassets"
	"github.com/iii-hq/workers/sandbox-libkrun/test/l1"
)

// sample is the code that is looked for, with fill where builds differ.
func sample(f l1.Fault, fill byte) []byte {
	before, wrong, after := f.Code(fill)
	return slices.Concat(before, wrong, after)
}

func TestFindsEachFaultInOneProgramAlone(t *testing.T) {
	t.Parallel()
	for i, f := range l1.Faults() {
		before, wrong, _ := f.Code(7)
		// A beginning that goes on otherwise, the code, and another at the very end.
		noise := append(slices.Repeat(before[:3], 20), sample(f, 1)[:len(before)+2]...)
		program := slices.Concat(noise, sample(f, 7), noise)
		at, err := f.Find(program)
		if err != nil {
			t.Fatal(err)
		}
		if want := int64(len(noise) + len(before)); at != want {
			t.Errorf("fault %d: found at %d, want %d", i, at, want)
		}
		right := f.Mended(wrong)
		if len(right) != len(wrong) || bytes.Equal(right, wrong) {
			t.Errorf("fault %d: % x in the place of % x", i, right, wrong)
		}
		for name, other := range map[string][]byte{
			"none": noise, "empty": nil, "two": slices.Concat(sample(f, 1), noise, sample(f, 2)), "cut": sample(f, 3)[:len(before)+len(wrong)-1],
		} {
			if at, err := f.Find(other); !errors.Is(err, l1.ErrUnknownQEMU) {
				t.Errorf("fault %d: %s: %d, %v", i, name, at, err)
			}
		}
	}
}

func TestAddressIsInTheProgramsCode(t *testing.T) {
	t.Parallel()
	const maps = `5500000000-5500400000 r--p 00000000 fe:00 11 /usr/bin/qemu
5500400000-5500900000 r-xp 00400000 fe:00 11 /usr/bin/qemu
5500900000-5500a00000 rw-p 00900000 fe:00 11 /usr/bin/qemu
7f00000000-7f00100000 r-xp 00400000 fe:00 12 /lib/qemu
7f00200000-7f00300000 rw-p 00000000 00:00 0
`
	if at, err := l1.AddressOf(maps, "/usr/bin/qemu", 0x65b284); err != nil || at != 0x550065b284 {
		t.Errorf("%#x, %v", at, err)
	}
	for _, offset := range []int64{0x1000, 0x900000} {
		if at, err := l1.AddressOf(maps, "/usr/bin/qemu", offset); err == nil {
			t.Errorf("offset %#x, which is no code, is at %#x", offset, at)
		}
	}
}

// The QEMU that the lab runs on is one whose fault is known.
func TestMendsARunningQEMU(t *testing.T) {
	t.Parallel()
	path, err := vmassets.FindQEMU(os.Getenv, "amd64")
	if err != nil {
		t.Skipf("SKIPPED: %v", err)
	}
	qemu := exec.Command(path, "-M", "none", "-S", "-nodefaults", "-no-user-config", "-display", "none")
	if err := qemu.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = qemu.Process.Kill()
		_ = qemu.Wait() // killed
	})
	if err := l1.Mend(qemu.Process.Pid); errors.Is(err, l1.ErrUnknownQEMU) {
		t.Skipf("SKIPPED: %s: %v", path, err)
	} else if err != nil {
		t.Fatal(err)
	}
	proc := fmt.Sprintf("/proc/%d/", qemu.Process.Pid)
	maps, err := os.ReadFile(proc + "maps")
	if err != nil {
		t.Fatal(err)
	}
	file, err := os.Readlink(proc + "exe")
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	memory, err := os.Open(proc + "mem")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = memory.Close() }()
	for i, f := range l1.Faults() {
		offset, err := f.Find(program)
		if err != nil {
			t.Fatal(err)
		}
		address, err := l1.AddressOf(string(maps), file, offset)
		if err != nil {
			t.Fatal(err)
		}
		// The instruction in question, between what is before and behind.
		_, wrong, _ := f.Code(0)
		const around = 7
		want := slices.Clone(program[offset-around : offset+int64(len(wrong))+around])
		copy(want[around:], f.Mended(want[around:around+len(wrong)]))
		got := make([]byte, len(want))
		if _, err := memory.ReadAt(got, address-around); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("fault %d: the code is % x, want % x", i, got, want)
		}
	}
}

func TestLastLinesAreTheLogsEnd(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]int{"": 0, "a": 1, "a\nb\n": 2, strings.Repeat("x\n", 100): 40} {
		got := string(l1.LastLines([]byte(text)))
		if !strings.HasSuffix(text, got) || strings.Count(strings.TrimSuffix(got, "\n")+"\n", "\n") != max(want, 1) {
			t.Errorf("of %d bytes the last lines are %q", len(text), got)
		}
	}
}
