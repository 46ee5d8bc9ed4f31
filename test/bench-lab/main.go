// Command bench-lab measures libkrun's VMs where there is no hardware
// virtualization, in one run of an emulated machine (test/l1), each beside what it
// is measured against, in turn:
//
//   - create to first exec: ours against the floor, a C program that boots a shell
//     with libkrun's defaults, and against microsandbox, all with the same image,
//     CPUs and memory; and where our time goes
//   - spawn of krun-shim to krun_start_enter against a C program making those calls
//   - the anonymous memory of our processes beyond the guest's
//
// usage:
//
//	bench-lab [--runs 5] [--memory 256] [--peer=false]
//
// It exits with 1 when a goal is missed. Times in the emulated machine are some ten
// times those of hardware, and what the kernel does weighs more: ratios tell.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// options are what the command line asks for.
type options struct {
	runs, memory int
	peer         bool
	timeout      time.Duration
	// inside tells that this is the program in the machine.
	inside bool
}

func parse(args []string) (options, error) {
	var o options
	flags := flag.NewFlagSet("bench-lab", flag.ContinueOnError)
	flags.IntVar(&o.runs, "runs", 5, "how often each is measured")
	flags.IntVar(&o.memory, "memory", 256, "memory of each VM in MiB")
	flags.BoolVar(&o.peer, "peer", true, "measure microsandbox, which npm fetches")
	flags.DurationVar(&o.timeout, "timeout", 30*time.Minute, "how long the machine may run")
	flags.BoolVar(&o.inside, "inside", false, "measure on this host, which is the machine")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	if flags.NArg() > 0 || o.runs < 1 {
		return o, errors.New("usage: bench-lab [flags], with at least one run")
	}
	return o, nil
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	status, err := command(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintf(os.Stderr, "bench-lab: %v\n", err)
		status = 1
	}
	os.Exit(status)
}

func command(ctx context.Context, args []string) (int, error) {
	o, err := parse(args)
	if err != nil {
		return 0, err
	}
	if o.inside {
		return measure(ctx, o, os.Stdout)
	}
	return runMachine(ctx, o)
}
