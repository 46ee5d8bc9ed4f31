// Command krun-shim is one VM: `krun-shim __vm-boot` reads a boot spec, runs the
// VMM, serves shim.v1 and guest.v1 on a socket, and ends with the VM. See
// docs/debugging.md for running one by hand.
package main

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/agentlink"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/krun"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/rpcbuffers"
)

// version is stamped by the build.
var version = "0.2.0-dev"

// A shim is one of many on its host, and does little but copy: it trades CPU
// time of the collector for memory, and runs on one CPU at a time, where what one
// goroutine hands to the next wakes no other thread. That is a good part of what a
// packet costs on its way between the guest and the host.
const (
	gcPercent   = 50
	memoryLimit = 24 << 20
	processors  = 1
)

// Commands. They are for the adapter and for debugging, hence the underscores.
const (
	commandBoot    = "__vm-boot"
	commandSave    = "__vm-save"
	commandConfine = "__confine"
	// commandDescribe is vmassets' too.
	commandDescribe = "__describe-libkrun"
)

// exitUsage is for what is wrong before there is a VM; bootspec has the others.
const exitUsage = 2

const usage = `krun-shim is one microVM: it runs the VMM, and ends with it.

  krun-shim __vm-boot
        As the adapter starts it: boot spec on stdin (package bootspec), file
        descriptor 3 gets a byte when the socket listens, 4 is the lifeline, 5
        the lock of the machine directory.
  krun-shim __vm-save
        As the adapter starts it: boot the machine of the boot spec on stdin
        until its agent waits for one, and save it to file descriptor 3, for
        other VMs to be resumed from.
  krun-shim __vm-boot --spec FILE [flags]
        By hand: boot a VM from a saved spec. Ctrl-C ends it.
  krun-shim --version | --help

Exit status:
   0  the guest shut down
   2  wrong usage
  10  bad-spec: the spec or a file that it names is wrong
  11  vmm-refused: the VMM is missing or refused the VM
  12  vmm-crashed: the VMM or the guest's kernel died
  13  killed: Kill, the lifeline, the idle time-out or a signal ended it

Environment:
  III_SHIM_LANDLOCK=off   run the VMM without Landlock confinement

`

func main() {
	rpcbuffers.Use()
	// The launcher may be gone before what is printed.
	signal.Ignore(syscall.SIGPIPE)
	os.Exit(run(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

func run(args []string, stdin *os.File, stdout, stderr io.Writer) int {
	if len(args) == 0 {
		return complain(stderr, errors.New("a command is missing: see krun-shim --help"))
	}
	if slices.ContainsFunc(args[:min(len(args), 2)], isHelp) {
		args = []string{"help"}
	}
	switch args[0] {
	case "help":
		_, _ = io.WriteString(stdout, usage)
		handFlags(&handOptions{}, stdout).PrintDefaults()
		return 0
	case "--version", "version":
		_, _ = fmt.Fprintf(stdout, "krun-shim %s, protocol %d, spec %d\n", version, agentlink.ProtocolVersion, bootspec.Version)
		return 0
	case commandConfine:
		return complain(stderr, confine(args[1:]))
	case krun.ChildCommand:
		return complain(stderr, errNoChild())
	case commandDescribe:
		return complain(stderr, describeLibkrun(args[1:], stdout, slog.New(slog.DiscardHandler)))
	case commandSave:
		return complain(stderr, saveGuest(stdin, stderr))
	case commandBoot:
		return boot(args[1:], stdin, stdout, stderr)
	default:
		return complain(stderr, fmt.Errorf("unknown command %q: see krun-shim --help", args[0]))
	}
}

func isHelp(arg string) bool { return arg == "--help" || arg == "-help" || arg == "-h" }

func boot(args []string, stdin *os.File, stdout, stderr io.Writer) int {
	debug.SetGCPercent(gcPercent)
	debug.SetMemoryLimit(memoryLimit)
	runtime.GOMAXPROCS(processors)
	log := slog.New(slog.NewTextHandler(stderr, nil))
	if err := prepareProcess(); err != nil {
		log.Warn("prepare the process", "error", err)
	}
	var end bootspec.End
	var err error
	if len(args) == 0 {
		end, err = bootSpawned(log, stdin, stderr)
	} else {
		end, err = bootByHand(log, args, stdout, stderr)
	}
	if err != nil {
		return complain(stderr, err)
	}
	_, _ = fmt.Fprintf(stderr, "krun-shim: %s\n", strings.ReplaceAll(end.Error(), "\n", "; "))
	return end.Class.ExitStatus()
}

// complain prints an error of usage; one that is a bootspec.End says itself
// what it is.
func complain(stderr io.Writer, err error) int {
	if err == nil {
		return 0
	}
	_, _ = fmt.Fprintf(stderr, "krun-shim: %v\n", err)
	if end := (bootspec.End{}); errors.As(err, &end) {
		return end.Class.ExitStatus()
	}
	return exitUsage
}
