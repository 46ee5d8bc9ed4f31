package main

import (
	"errors"
	"log/slog"
	"os"
	"runtime"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/krun"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/shim/libkrun"
)

// newLibkrun runs VMs in a child that is this program once more.
func newLibkrun(log *slog.Logger) libkrun.Hypervisor {
	// By this link the running program is found even if its file was replaced.
	h := libkrun.Hypervisor{Command: "/proc/self/exe"}
	if runtime.GOOS != "linux" {
		self, err := os.Executable()
		if err != nil {
			log.Warn("find this program", "error", err)
		}
		h.Command = self
	}
	if canConfine(log) {
		h.Confine = libkrunRuleset
	}
	return h
}

// errNoChild is what the command of a child comes to that is not caught before:
// that takes C, and no more arguments.
func errNoChild() error {
	return errors.New(krun.ChildCommand + " is for krun-shim itself, which takes one built with cgo: if its shim says this, build it with CGO_ENABLED=1")
}
