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
// first programs, with a bare QEMU whose guest has the same size and an init
// that stays; and the shim's anonymous memory with its limit.
func memory(ctx context.Context, m *vm.Machine, qemu int, bare *floor) ([]row, error) {
	ours, err := settledRSS(ctx, qemu)
	if err != nil {
		return nil, err
	}
	base, err := bare.residentSize(ctx)
	if err != nil {
		return nil, err
	}
	stats, err := m.Stats(ctx)
	if err != nil {
		return nil, err
	}
	anon, err := processMemory(qemu, "RssAnon")
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
	return []row{
		newRow("QEMU resident", mebibytes(ours), mebibytes(base), "MiB", goalMemory,
			"a bare QEMU with the same guest memory, whose init stays and does nothing",
			fmt.Sprintf("anonymous %.1f MiB; in it the guest's agent has %.1f MiB resident", mebibytes(anon), mebibytes(agent))),
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
