package main

import (
	"bytes"
	"context"
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/proc"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vmassets"
)

func TestFloorInitIsAnExecutable(t *testing.T) {
	t.Parallel()
	for arch, machine := range map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64} {
		for _, stay := range []bool{false, true} {
			program, err := floorInit(arch, stay)
			if err != nil {
				t.Fatal(err)
			}
			f, err := elf.NewFile(bytes.NewReader(program))
			if err != nil {
				t.Fatalf("%s: %v", arch, err)
			}
			p := f.Progs[0]
			if f.Machine != machine || f.Type != elf.ET_EXEC || p.Filesz != uint64(len(program)) ||
				f.Entry < p.Vaddr || f.Entry >= p.Vaddr+p.Memsz || f.Entry%4 != 0 {
				t.Errorf("%s: %+v", arch, f.FileHeader)
			}
		}
	}
	if _, err := floorInit("mips", false); err == nil {
		t.Error("mips passed")
	}
}

// As an ordinary program the restart is refused and the init stays, having
// printed: that is all it may do outside a guest. It never runs with rights.
func TestFloorInitRuns(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("SKIPPED: the floor's init is a Linux program")
	}
	program, err := floorInit(runtime.GOARCH, true)
	if err != nil {
		t.Skipf("SKIPPED: %v", err)
	}
	file := filepath.Join(t.TempDir(), "init")
	if err := proc.WriteProgram(file, program); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), file)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(marker))
	if _, err := out.Read(got); err != nil || string(got) != marker {
		t.Errorf("printed %q, %v", got, err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Error(err)
	}
	_ = cmd.Wait() // says that it was killed
	if s, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || s.Signal() != syscall.SIGKILL {
		t.Errorf("it did not stay: %v", cmd.ProcessState)
	}
}

// The floor must be what it claims: on a real QEMU its init runs and restarts
// the machine, which ends QEMU.
func TestFloorBootsAndEnds(t *testing.T) {
	t.Parallel()
	roots, err := layout.FromEnvironment(os.Getenv)
	if err != nil {
		t.Skipf("SKIPPED: %v", err)
	}
	kernel, err := vmassets.Find(roots.VMM(), os.Getenv)
	if err != nil || kernel.Arch != "amd64" {
		t.Skipf("SKIPPED: no kernel for amd64 here: %v", err)
	}
	qemu, err := vmassets.FindQEMU(os.Getenv, kernel.Arch)
	if err != nil {
		t.Skipf("SKIPPED: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	argv := []string{
		qemu, "-M", "q35,accel=tcg", "-m", "256", "-nodefaults", "-display", "none", "-no-reboot",
		"-chardev", "socket,id=console,fd=3", "-serial", "chardev:console",
		"-kernel", kernel.Image, "-append", "console=ttyS0 quiet panic=-1",
		"-drive", "if=none,id=upper,format=raw,file=u", "-device", "virtio-blk-pci,drive=upper",
	}
	bare, err := newFloors(append(argv, "-initrd", "/nonexistent"), t.TempDir(), kernel.Arch)
	if err != nil {
		t.Fatal(err)
	}
	if b, err := bare.ends.run(ctx); err != nil || b.Init <= 0 || b.End <= b.Init {
		t.Errorf("got %+v, %v", b, err)
	}
	if size, err := bare.stays.residentSize(ctx); err != nil || size < 64<<20 || size > 512<<20 {
		t.Errorf("resident %d bytes, %v", size, err)
	}
	if size, err := bare.agent.residentSize(ctx); err == nil || !strings.Contains(err.Error(), "/nonexistent") {
		t.Errorf("without an initramfs: resident %d bytes, %v", size, err)
	}
}
