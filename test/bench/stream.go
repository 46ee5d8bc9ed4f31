package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/guest"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
	"github.com/iii-hq/workers/sandbox-libkrun/test/bench/sequence"
)

// streamBytes go each way; flatLimit is how much the high-water mark of a
// process's memory may rise by them and still be called flat.
const (
	streamBytes = 100 << 20
	flatLimit   = 16 << 20
)

// peaks are high-water marks of resident memory, in bytes.
type peaks struct{ adapter, shim, agent int64 }

func readPeaks(ctx context.Context, m *vm.Machine, shim int) (p peaks, err error) {
	var errs [4]error
	p.adapter, errs[0] = processMemory(os.Getpid(), "VmHWM")
	p.shim, errs[1] = processMemory(shim, "VmHWM")
	var status string
	if status, errs[2] = agentStatus(ctx, m); errs[2] == nil {
		p.agent, errs[3] = statusField(status, "VmHWM")
	}
	return p, errors.Join(errs[:]...)
}

// streams sends the sequence out of the guest and into it, both ends checking
// every byte, and compares the times with the same through a pipe between two
// processes of the guest.
func (b *bench) streams(ctx context.Context, m *vm.Machine, shim int) ([]row, error) {
	n := strconv.FormatInt(streamBytes, 10)
	before, err := readPeaks(ctx, m, shim)
	if err != nil {
		return nil, err
	}
	base, err := output(ctx, m, guest.IO{}, probePath, "pipe", n)
	if err != nil {
		return nil, err
	}
	ns, err := strconv.ParseInt(strings.TrimSpace(base), 10, 64)
	if err != nil {
		return nil, fmt.Errorf("the probe printed %q: %w", base, err)
	}
	pipe := milliseconds(time.Duration(ns))
	begin := time.Now()
	check := &sequence.Writer{}
	if _, err := output(ctx, m, guest.IO{Stdout: check}, probePath, "source", n); err != nil {
		return nil, err
	}
	out := milliseconds(time.Since(begin))
	if check.N != streamBytes {
		return nil, fmt.Errorf("%d bytes came out of the guest, not %s", check.N, n)
	}
	b.note("stream out: intact")
	begin = time.Now()
	stdin := io.LimitReader(sequence.New(), streamBytes)
	if _, err := output(ctx, m, guest.IO{Stdin: stdin}, probePath, "sink", n); err != nil {
		return nil, err
	}
	in := milliseconds(time.Since(begin))
	b.note("stream in: intact")
	after, err := readPeaks(ctx, m, shim)
	if err != nil {
		return nil, err
	}
	const against = "the same bytes through a pipe between two processes of the guest, made and checked by them"
	rows := []row{
		newRow("stdout 100 MiB, intact", out, pipe, "ms", 0, against, speed(out)),
		newRow("stdin 100 MiB, intact", in, pipe, "ms", 0, against, speed(in)),
	}
	for _, p := range []struct {
		name          string
		before, after int64
	}{
		{"host program", before.adapter, after.adapter},
		{"shim", before.shim, after.shim},
		{"agent", before.agent, after.agent},
	} {
		rows = append(rows, newRow("growth by streams, "+p.name, mebibytes(p.after-p.before), mebibytes(flatLimit), "MiB", goalFlat,
			"16 MiB, up to which a high-water mark counts as flat", fmt.Sprintf("from %.1f to %.1f MiB", mebibytes(p.before), mebibytes(p.after))))
	}
	return rows, nil
}

func speed(ms float64) string {
	return fmt.Sprintf("%.1f MiB/s", mebibytes(streamBytes)/ms*1000)
}
