package shim

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"syscall"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/agentlink"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
)

// panicText begins the line that tells why a Linux kernel panicked.
const panicText = "Kernel panic - not syncing"

// agentText begins the line in which the agent says why it gives up; the kernel
// prints more behind it.
const agentText = "agent: "

// signalText is in what QEMU prints when SIGTERM, SIGINT or SIGHUP ends it; it
// then exits with 0.
const signalText = "terminating on signal"

// endOf is the end that an error before the start means; class is for one that
// does not say.
func endOf(err error, class bootspec.EndClass) bootspec.End {
	var end bootspec.End
	if !errors.As(err, &end) {
		end = bootspec.End{Class: class, Message: oneLine(err.Error())}
		if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
			end.Class = bootspec.EndKilled
		}
	}
	end.ExitCode = -1
	return end
}

// explain completes the hypervisor's view of the end with what the shim knows:
// who killed the VM and why, and what guest and VMM said last. cause is that
// of the context's end, nil while it lives.
func (r *run) explain(end bootspec.End, cause error) bootspec.End {
	words := r.wires.drain()
	end.Booted = r.state.booted()
	switch end.Class {
	case bootspec.EndKilled:
		if cause != nil {
			end.Message = killMessage(cause)
		}
	case bootspec.EndGuest:
		r.explainGuest(&end, words)
	case bootspec.EndCrashed, bootspec.EndRefused:
		// A VMM that fails before the guest printed anything did not want it; one
		// that had a guest has no say any more in what its status is.
		switch {
		case end.Booted:
			end.Class = bootspec.EndCrashed
		case !words.console.any && (end.ExitCode > 0 || end.Signal == int(syscall.SIGABRT)):
			end.Class = bootspec.EndRefused
		}
		if last := words.vmm.reason(); last != "" {
			end.Message += ": " + last
		}
	}
	return end
}

func killMessage(cause error) string {
	var end bootspec.End
	if errors.As(cause, &end) {
		return end.Message
	}
	return oneLine("it was stopped: " + cause.Error())
}

// explainGuest tells an orderly end from the others that look the same from
// outside: a VMM told to end at reboot exits with 0 after a panic too.
func (r *run) explainGuest(end *bootspec.End, words *lastWords) {
	asked, acked := r.state.shutdown()
	// libkrun has what the kernel prints in its own log.
	reason := cmp.Or(words.console.lineWith(panicText), words.vmm.lineWith(panicText))
	switch {
	case words.vmm.lineWith(signalText) != "":
		end.Class = bootspec.EndKilled
		end.Message = "the VMM was ended from outside: " + words.vmm.lineWith(signalText)
	case reason != "" && !acked:
		end.Class = bootspec.EndCrashed
		end.Message = "the guest's kernel died: " + reason + " (see the console log)"
	case !end.Booted:
		end.Class = bootspec.EndCrashed
		end.Message = "the guest ended before its agent was there"
		if failure := r.link.lastFailure(); failure != nil {
			end.Message += ": " + oneLine(failure.Error())
		} else if last := cmp.Or(words.console.lineWith(agentText), words.console.lastLine()); last != "" {
			end.Message += "; its console ends with: " + last
		} else if last := words.vmm.reason(); last != "" {
			end.Message += "; the VMM's log ends with: " + last
		} else {
			end.Message += " and printed nothing: is the kernel one for this machine?"
		}
	case asked:
		end.Message = "the guest shut down as asked"
	case end.ExitCode == agentlink.StatusNoAgent:
		end.Class = bootspec.EndCrashed
		end.Message = "the guest ended without its agent, which died, or a program restarted the guest"
	default:
		end.Message = "the guest powered off by itself"
	}
}

// report writes the end to the machine directory, whole or not at all. It is not
// flushed to the disk: after a crash of the host nobody asks for it.
func (r *run) report(end bootspec.End) {
	if !r.locked {
		return // it may be that of another VM
	}
	body, err := json.Marshal(end)
	part := r.files.End() + ".part"
	if err == nil {
		err = os.WriteFile(part, append(body, '\n'), 0o600)
	}
	if err == nil {
		err = os.Rename(part, r.files.End())
	}
	if err != nil {
		r.log.Warn("write the report of the VM's end", "error", fmt.Errorf("%s: %w", r.files.End(), err))
	}
}
