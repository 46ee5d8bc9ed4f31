package main

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/guest"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
)

// memory compares the resident memory of our QEMU, its guest idle after its
// first program, with bare QEMUs of the same guest memory, and the shim's
// anonymous memory with its limit.
func memory(ctx context.Context, m *vm.Machine, qemu int, bare floors) ([]row, error) {
	ours, err := settledRSS(ctx, qemu)
	if err != nil {
		return nil, err
	}
	anon, err := processMemory(qemu, "RssAnon")
	if err != nil {
		return nil, err
	}
	same, err := bare.agent.residentSize(ctx)
	if err != nil {
		return nil, err
	}
	idle, err := bare.stays.residentSize(ctx)
	if err != nil {
		return nil, err
	}
	stats, err := m.Stats(ctx)
	if err != nil {
		return nil, err
	}
	status, err := agentStatus(ctx, m)
	if err != nil {
		return nil, err
	}
	agent, err := statusField(status, "VmRSS")
	if err != nil {
		return nil, err
	}
	note := fmt.Sprintf("ours has %.1f MiB anonymous; in the guest the agent has %.1f MiB resident", mebibytes(anon), mebibytes(agent))
	return []row{
		newRow("QEMU resident, same guest", mebibytes(ours), mebibytes(same), "MiB", goalMemory,
			"a bare QEMU by the same command line, whose agent has loaded its drivers and waits for a boot spec; no disk mounted, no program run", note),
		newRow("QEMU resident, empty guest", mebibytes(ours), mebibytes(idle), "MiB", 0,
			"a bare QEMU by the same command line, with an init of a few instructions that stays and does nothing"),
		newRow("shim RssAnon", mebibytes(int64(stats.ShimRSSAnon)), mebibytes(shimLimit), "MiB", goalShim,
			"its limit of 16 MiB, without a gateway"),
	}, nil
}

// agentStatus is /proc/1/status of the guest.
func agentStatus(ctx context.Context, m *vm.Machine) (string, error) {
	return output(ctx, m, guest.IO{}, "/bin/cat", "/proc/1/status")
}

// parent finds the parent of a process: a QEMU's is its shim.
func parent(pid int) (int, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	// The name in parentheses may have anything in it.
	text := string(raw)
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	if len(fields) < 2 {
		return 0, fmt.Errorf("/proc/%d/stat is %q", pid, text)
	}
	return strconv.Atoi(fields[1])
}
