package main

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime"
	"slices"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/shim/libkrun"
)

// argConfined makes the VMM confine itself before it loads libkrun.
const argConfined = "confined"

// libkrunCommand is the program that calls libkrun: this one once more.
func libkrunCommand(log *slog.Logger) []string {
	// By this link the running program is found even if its file was replaced.
	command := []string{"/proc/self/exe", commandLibkrun}
	if runtime.GOOS != "linux" {
		self, err := os.Executable()
		if err != nil {
			log.Warn("find this program", "error", err)
		}
		command[0] = self
	}
	if canConfine(log) {
		command = append(command, argConfined)
	}
	return command
}

// enterLibkrun is the process of a VM. It ends with the VM, or says in one line
// why there is none.
func enterLibkrun(args []string, stdin *os.File, stderr io.Writer) int {
	err := libkrun.Enter(stdin, func(spec *bootspec.Spec) (libkrun.VM, error) {
		if slices.Contains(args, argConfined) {
			if err := confineLibkrun(spec); err != nil {
				return nil, err
			}
		}
		return openLibkrun(spec)
	})
	_, _ = fmt.Fprintf(stderr, "krun-shim: %v\n", err)
	return libkrun.StatusRefused
}
