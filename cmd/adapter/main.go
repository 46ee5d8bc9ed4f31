// Command adapter runs untrusted code in microVMs: see adapter --help.
package main

import (
	"context"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/term"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/cli"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/rpcbuffers"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/shimdriver"
)

// version is stamped by the build.
var version = "0.2.0-dev"

func main() {
	rpcbuffers.Use()
	// A reader that goes away (adapter run | head) is an error of that write:
	// the program in the guest ends and the sandbox is cleaned up.
	signal.Ignore(syscall.SIGPIPE)
	app := &cli.App{
		Version:   version,
		Stdin:     os.Stdin,
		Stdout:    os.Stdout,
		Stderr:    os.Stderr,
		Terminal:  isTerminal,
		Getenv:    os.Getenv,
		NewDriver: newDriver,
	}
	os.Exit(app.Execute(context.Background(), os.Args[1:]))
}

func isTerminal(stream any) bool {
	file, ok := stream.(*os.File)
	return ok && term.IsTerminal(int(file.Fd()))
}

func newDriver(vmm string, roots layout.Roots, log *slog.Logger) (vm.Driver, error) {
	return shimdriver.New(shimdriver.Config{VMM: vmm, Roots: roots, Log: log, Getenv: os.Getenv, Version: version})
}
