package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/cleanup"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
)

const (
	// goalLoad is that of the adapter's memory, against loadLimit in bytes.
	goalLoad  = 1
	loadLimit = 80 << 20
	// loadBoxes and loadExecs are the shipped limits on sandboxes and on programs
	// in each.
	loadBoxes = 32
	loadExecs = 4
	// loadLists of list are timed while all programs run.
	loadLists = 100
)

// load measures the adapter with all sandboxes and programs that it admits. The
// VMs are fakes, each in a process of its own: this program in the place of
// krun-shim, see fakeShim.
func (b *bench) load(ctx context.Context, o options, dir, entry string) (_ []row, err error) {
	var undo cleanup.Stack
	defer func() { err = errors.Join(err, undo.Run()) }()
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	s, err := serve(ctx, &undo, o.bin, dir, entry, "III_SANDBOX_VMM=qemu", "III_KRUN_SHIM="+self)
	if err != nil {
		return nil, err
	}
	idle, err := processMemory(s.adapter.cmd.Process.Pid, "VmRSS")
	if err != nil {
		return nil, err
	}
	ids, err := s.fill(ctx, o)
	if err != nil {
		return nil, err
	}
	b.note("load: %d sandboxes", len(ids))
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer func() {
		cancel()
		running.Wait()
	}()
	ended := make(chan error, loadBoxes*loadExecs)
	for _, id := range ids {
		for range loadExecs {
			running.Go(func() {
				var reply json.RawMessage
				err := s.call(ctx, "exec", map[string]any{"sandbox_id": id, "cmd": "sleep 120"}, &reply)
				ended <- fmt.Errorf("a program that was to run ended: %s (%w)", reply, err)
			})
		}
	}
	if err := s.awaitFull(ctx, ended); err != nil {
		return nil, err
	}
	if err := s.refuses(ctx, "exec", map[string]any{"sandbox_id": ids[0], "cmd": "true"}, "S003"); err != nil {
		return nil, err
	}
	lists, err := timeCalls(ctx, s.client, prefix+"list", loadLists)
	if err != nil {
		return nil, err
	}
	full, err := processMemory(s.adapter.cmd.Process.Pid, "VmHWM")
	if err != nil {
		return nil, err
	}
	return []row{newRow("adapter resident, 32 x 4 execs", mebibytes(full), mebibytes(loadLimit), "MiB", goalLoad,
		"its limit of 80 MiB; the greatest so far, with 128 programs in flight in 32 fake VMs, one process each",
		fmt.Sprintf("%.1f MiB before the first sandbox", mebibytes(idle)),
		"one sandbox more and one program more were refused",
		fmt.Sprintf("list meanwhile: median %.0f µs", 1000*median(lists)))}, nil
}

// fill makes all sandboxes that there may be.
func (s *served) fill(ctx context.Context, o options) ([]string, error) {
	ids := make([]string, loadBoxes)
	errs := make([]error, loadBoxes)
	var creates sync.WaitGroup
	for i := range ids {
		creates.Go(func() { ids[i], errs[i] = s.create(ctx, o) })
	}
	creates.Wait()
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return ids, s.refuses(ctx, "create", map[string]any{"image": o.image}, "S400")
}

// awaitFull waits until all programs are in flight.
func (s *served) awaitFull(ctx context.Context, ended <-chan error) error {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		var reply struct {
			Sandboxes []struct {
				InFlight int `json:"exec_in_flight"`
			} `json:"sandboxes"`
		}
		if err := s.call(ctx, "list", map[string]any{}, &reply); err != nil {
			return err
		}
		sum := 0
		for _, box := range reply.Sandboxes {
			sum += box.InFlight
		}
		if sum == loadBoxes*loadExecs {
			return nil
		}
		select {
		case <-tick.C:
		case err := <-ended:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// refuses calls a function that is to fail with the code.
func (s *served) refuses(ctx context.Context, function string, payload any, code string) error {
	var reply json.RawMessage
	err := s.call(ctx, function, payload, &reply)
	var refused *iii.Error
	if !errors.As(err, &refused) || !strings.Contains(refused.Message, `"code":"`+code+`"`) {
		return fmt.Errorf("%s was to fail with %s: %s, %w", function, code, reply, err)
	}
	return nil
}
