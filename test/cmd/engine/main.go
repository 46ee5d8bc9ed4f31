// Command engine is an iii engine for development: workers connect to it, and
// `engine trigger` calls their functions as `iii trigger` does. It keeps nothing
// on disk.
//
//	go run ./test/cmd/engine &
//	go run ./test/cmd/engine trigger sandbox-libkrun::list
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
)

// defaultPort is where engines listen.
const defaultPort = 49134

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	p := program{stdout: os.Stdout, stderr: os.Stderr, getenv: os.Getenv}
	code := p.run(ctx, os.Args[1:])
	stop()
	os.Exit(code)
}

// A program is this one with what it uses of its process.
type program struct {
	stdout, stderr io.Writer
	getenv         func(string) string
}

// errTold is the error of a command that has told it already.
var errTold = errors.New("told")

// run runs the command line and returns the exit status: 0, or 1 on any error.
func (p program) run(ctx context.Context, args []string) int {
	root := &cobra.Command{
		Use:           "engine",
		Short:         "An iii engine for development",
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	serve := p.serveCommand()
	root.Flags().AddFlagSet(serve.Flags())
	root.RunE = serve.RunE
	// Of a help function, which cannot return one.
	var helpErr error
	root.AddCommand(serve, p.triggerCommand(&helpErr))
	root.CompletionOptions.DisableDefaultCmd = true
	root.SetArgs(args)
	root.SetOut(p.stdout)
	root.SetErr(p.stderr)
	err := root.ExecuteContext(ctx)
	if err == nil {
		err = helpErr
	}
	if err == nil {
		return 0
	}
	if !errors.Is(err, errTold) {
		_, _ = fmt.Fprintf(p.stderr, "Error: %v\n", err)
	}
	return 1
}
