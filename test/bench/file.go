package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/guest"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
	"github.com/iii-hq/workers/sandbox-libkrun/test/bench/sequence"
)

const (
	// goalChannel: 70 % of the throughput.
	goalChannel = 1 / 0.7
	fileBytes   = 200 << 20
	fileRuns    = 5
	filePath    = "/bench"
	// fileCopy is how much the caller reads and writes at a time.
	fileCopy = 64 << 10
)

// files compares a file's way through fs::write and fs::read with the agent's own
// streams, which have neither engine nor adapter between them and this program.
// Both guests have the same size and image.
func (b *bench) files(ctx context.Context, o options, s *served) (_ []row, err error) {
	m, err := b.launcher.Launch(ctx, b.request)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, m.Kill()) }()
	id, err := s.create(ctx, o)
	if err != nil {
		return nil, err
	}
	adapter := s.adapter.cmd.Process.Pid
	before, err := processMemory(adapter, "VmHWM")
	if err != nil {
		return nil, err
	}
	ways := []func() error{
		func() error { return b.bareWrite(ctx, m) },
		func() error { return s.upload(ctx, id) },
		func() error { return b.bareRead(ctx, m) },
		func() error { return s.download(ctx, id) },
	}
	times := make([][]time.Duration, len(ways))
	runs := min(b.runs, fileRuns)
	for i := range runs {
		for _, w := range inTurn(i) {
			begin := time.Now()
			if err := ways[w](); err != nil {
				return nil, err
			}
			times[w] = append(times[w], time.Since(begin))
		}
		b.note("files: %d of %d", i+1, runs)
	}
	after, err := processMemory(adapter, "VmHWM")
	if err != nil {
		return nil, err
	}
	return []row{
		fileRow("fs::write 200 MiB, intact", times[1], times[0]),
		fileRow("fs::read 200 MiB, intact", times[3], times[2]),
		newRow("growth by files, adapter", mebibytes(after-before), mebibytes(flatLimit), "MiB", goalFlat,
			"16 MiB, up to which a high-water mark counts as flat", fmt.Sprintf("from %.1f to %.1f MiB", mebibytes(before), mebibytes(after))),
	}, nil
}

// inTurn orders the four ways so that ours is first every second time; a file is
// read after it was written.
func inTurn(round int) []int {
	if round%2 == 0 {
		return []int{0, 1, 2, 3}
	}
	return []int{1, 0, 3, 2}
}

func fileRow(name string, ours, base []time.Duration) row {
	var ratios []float64
	for i := range ours {
		ratios = append(ratios, float64(ours[i])/float64(base[i]))
	}
	rate := func(ms float64) string { return fmt.Sprintf("%.1f MiB/s", mebibytes(fileBytes)/ms*1000) }
	r := newRow(name, median(ours), median(base), "ms", goalChannel,
		"the same file through the agent's stream, from this program by shim and link, into and out of a guest of the same kind",
		spread("ours, caller to engine to adapter to shim", ours), rate(median(ours)), spread("the agent's stream", base), rate(median(base)))
	return r.withRatio(ratios)
}

func (b *bench) bareWrite(ctx context.Context, m *vm.Machine) error {
	n, err := m.Guest().WriteFile(ctx, filePath, guest.WriteOptions{Mode: 0o644}, io.LimitReader(sequence.New(), fileBytes))
	if err == nil && n != fileBytes {
		err = fmt.Errorf("%d bytes were written", n)
	}
	return err
}

func (b *bench) bareRead(ctx context.Context, m *vm.Machine) error {
	f, err := m.Guest().OpenFile(ctx, filePath)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	return sequence.Check(f, fileBytes)
}

// upload writes the file through a channel.
func (s *served) upload(ctx context.Context, id string) error {
	w, r, err := s.client.CreateChannel(ctx, 0)
	if err != nil {
		return err
	}
	sent := make(chan error, 1)
	go func() {
		sent <- func() error {
			out, err := s.client.OpenWriter(ctx, w, iii.ChannelOptions{Idle: callTimeout})
			if err != nil {
				return err
			}
			defer func() { _ = out.Close() }()
			body := struct{ io.Reader }{io.LimitReader(sequence.New(), fileBytes)}
			_, err = io.CopyBuffer(struct{ io.Writer }{out}, body, make([]byte, fileCopy))
			return err
		}()
	}()
	var reply struct {
		Written int64 `json:"bytes_written"`
	}
	err = s.call(ctx, "fs::write", map[string]any{"sandbox_id": id, "path": filePath, "content": r}, &reply)
	if err := errors.Join(err, <-sent); err != nil {
		return err
	}
	if reply.Written != fileBytes {
		return fmt.Errorf("%d bytes were written", reply.Written)
	}
	return nil
}

// download reads the file from its channel.
func (s *served) download(ctx context.Context, id string) error {
	var reply struct {
		Content iii.ChannelRef `json:"content"`
	}
	if err := s.call(ctx, "fs::read", map[string]any{"sandbox_id": id, "path": filePath}, &reply); err != nil {
		return err
	}
	in, err := s.client.OpenReader(ctx, reply.Content, iii.ChannelOptions{Idle: callTimeout})
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	return sequence.Check(in, fileBytes)
}
