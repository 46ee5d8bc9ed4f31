package main

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Requests of /dev/kvm and of a VM (linux/kvm.h).
const (
	kvmCreateVM      = 0xAE01
	kvmCreateIRQChip = 0xAE60
	kvmCreateVCPU    = 0xAE41
)

func main() {
	if err := hold(); err != nil {
		fmt.Printf("anchor: %v\n", err)
		os.Exit(1)
	}
	fmt.Println("held")
	for {
		_ = unix.Pause() // it only ever says that a signal came
	}
}

// hold makes a VM with a CPU and its interrupt controller, whose files stay open.
func hold() error {
	kvm, err := unix.Open("/dev/kvm", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open /dev/kvm: %w", err)
	}
	vm, err := unix.IoctlRetInt(kvm, kvmCreateVM)
	for errors.Is(err, unix.EINTR) { // Go's runtime signals its threads
		vm, err = unix.IoctlRetInt(kvm, kvmCreateVM)
	}
	if err != nil {
		return fmt.Errorf("make a VM: %w", err)
	}
	if _, err := unix.IoctlRetInt(vm, kvmCreateIRQChip); err != nil {
		return fmt.Errorf("make an interrupt controller: %w", err)
	}
	if _, err := unix.IoctlRetInt(vm, kvmCreateVCPU); err != nil {
		return fmt.Errorf("make a CPU: %w", err)
	}
	return nil
}
