package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/shim"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/vmtest"
)

// fakeShim is krun-shim __vm-boot with a fake for the machine: programs run on
// this host. It gets what package shimdriver gives to a shim.
func fakeShim() int {
	files := []*os.File{}
	for i, name := range []string{"ready", "lifeline", "lock"} {
		fd := 3 + i
		unix.CloseOnExec(fd)
		if err := unix.SetNonblock(fd, name == "lifeline"); err != nil {
			_, _ = fmt.Fprintf(os.Stderr, "bench: %s: %v\n", name, err)
			return 2
		}
		files = append(files, os.NewFile(uintptr(fd), name))
	}
	spec, err := bootspec.Read(os.Stdin)
	if err != nil {
		_, _ = fmt.Fprintf(os.Stderr, "bench: %v\n", err)
		return bootspec.EndBadSpec.ExitStatus()
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	end := shim.Run(context.Background(), spec, shim.Options{
		Hypervisor: (&vmtest.Fake{Log: log}).Hypervisor(), Version: "bench", Log: log, VMMLog: os.Stderr,
		Ready: files[0], Lifeline: files[1], Lock: files[2],
	})
	return end.Class.ExitStatus()
}
