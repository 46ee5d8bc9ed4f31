package main

import (
	"bytes"
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/guest"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
)

// probePath is where the probe lies in the guest.
const probePath = "/tmp/iii-bench-probe"

// install puts the probe into the guest through exec's stdin.
func install(ctx context.Context, m *vm.Machine, probe []byte) error {
	_, err := output(ctx, m, guest.IO{Stdin: bytes.NewReader(probe)},
		"/bin/sh", "-c", "cat > "+probePath+" && chmod 755 "+probePath)
	return err
}

// output runs a program and returns its stdout; anything but exit code 0 is an
// error with its stderr.
func output(ctx context.Context, m *vm.Machine, with guest.IO, argv ...string) (string, error) {
	var stdout, stderr bytes.Buffer
	if with.Stdout == nil {
		with.Stdout = &stdout
	}
	with.Stderr = &stderr
	res, err := m.Guest().Exec(ctx, guest.Command{Argv: argv}, with)
	if err != nil {
		return "", fmt.Errorf("%q in the guest: %w", argv, err)
	}
	if res.ExitCode != 0 {
		return "", fmt.Errorf("%q in the guest: exit code %d: %s", argv, res.ExitCode, bytes.TrimSpace(stderr.Bytes()))
	}
	return stdout.String(), nil
}

// execs measures exec of argv against fork, exec and wait of the same by the
// probe in the same guest, perRound of each in turn.
func (b *bench) execs(ctx context.Context, m *vm.Machine, name string, perRound int, argv ...string) (row, error) {
	var ours, base []time.Duration
	for range b.runs {
		for range perRound {
			begin := time.Now()
			if err := succeed(ctx, m, argv...); err != nil {
				return row{}, err
			}
			ours = append(ours, time.Since(begin))
		}
		out, err := output(ctx, m, guest.IO{}, append([]string{probePath, "fork", strconv.Itoa(perRound)}, argv...)...)
		if err != nil {
			return row{}, err
		}
		for _, field := range strings.Fields(out) {
			ns, err := strconv.ParseInt(field, 10, 64)
			if err != nil {
				return row{}, fmt.Errorf("the probe printed %q: %w", field, err)
			}
			base = append(base, time.Duration(ns))
		}
		b.note("%s: %d of %d", name, len(ours), b.runs*perRound)
	}
	return newRow("exec "+name, median(ours), median(base), "ms", goalExec,
		fmt.Sprintf("fork (vfork), exec and wait of the same program in the same guest by a static program with its streams on /dev/null, %d of each in turn", perRound),
		spread("ours, from the host, pipes read to their end", ours), spread("in the guest", base)), nil
}
