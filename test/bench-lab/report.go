package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// Goals, as ratios or in MiB.
const (
	goalFloor  = 1.15
	goalPeer   = 1
	goalCalls  = 3
	goalMemory = 16
)

// round is one boot of each; the peer's are 0 without one.
type round struct {
	ours                 time.Duration
	floor, floorEnd      time.Duration
	microsandbox, msbEnd time.Duration
}

func (r round) String() string {
	return fmt.Sprintf("ours %.0f, floor %.0f (until its end %.0f), microsandbox %.0f (%.0f) ms",
		ms(r.ours), ms(r.floor), ms(r.floorEnd), ms(r.microsandbox), ms(r.msbEnd))
}

// round boots each once. Whatever else the host does weighs on all alike.
func (b *bench) round(ctx context.Context) (r round, err error) {
	if r.ours, err = b.ours.boot(ctx, b.request); err != nil {
		return r, fmt.Errorf("ours: %w", err)
	}
	if r.floor, r.floorEnd, err = b.bootFloor(ctx); err != nil {
		return r, err
	}
	if b.peer {
		r.microsandbox, r.msbEnd, err = b.bootPeer(ctx)
	}
	return r, err
}

// results are all measurements.
type results struct {
	rounds    []round
	parts     []parts
	bareCalls []time.Duration
	// shimStart and floorStart are from spawn to end of programs that do nothing:
	// krun-shim --version, and the floor's.
	shimStart, floorStart []time.Duration
	memory                memory
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func mib(bytes int64) float64 { return float64(bytes) / (1 << 20) }

// median of at least one.
func median[T time.Duration | float64](list []T) T {
	sorted := slices.Sorted(slices.Values(list))
	mid := len(sorted) / 2
	if len(sorted)%2 == 1 {
		return sorted[mid]
	}
	return (sorted[mid-1] + sorted[mid]) / 2
}

// each collects one value of every item.
func each[T any, V any](list []T, get func(T) V) []V {
	var values []V
	for _, item := range list {
		values = append(values, get(item))
	}
	return values
}

// table is the result being written, with whether a goal was missed.
type table struct {
	text   strings.Builder
	missed bool
}

// row adds a line; the ratio is the median of the neighbours', and within its goal
// unless it is greater; goal 0 is none.
func (t *table) row(what string, ours, base []time.Duration, goal float64) {
	var ratios []float64
	for i := range ours {
		ratios = append(ratios, float64(ours[i])/float64(base[i]))
	}
	ratio, verdict := median(ratios), "no goal"
	if goal > 0 {
		verdict = fmt.Sprintf("ok, goal at most %.2f", goal)
		if ratio > goal {
			verdict, t.missed = fmt.Sprintf("MISSED, goal at most %.2f", goal), true
		}
	}
	fmt.Fprintf(&t.text, "%s\t%.1f\t%.1f\t%.2f (%.2f to %.2f)\t%s\n", what, ms(median(ours)), ms(median(base)),
		ratio, slices.Min(ratios), slices.Max(ratios), verdict)
}

// print writes the result and returns the status: 1 when a goal was missed.
func (r results) print(out io.Writer, o options) (int, error) {
	t := &table{}
	fmt.Fprintf(&t.text, "WHAT\tOURS ms\tBASE ms\tRATIO\tVERDICT\n")
	ours := each(r.rounds, func(r round) time.Duration { return r.ours })
	t.row("create to first exec : the floor's first output", ours, each(r.rounds, func(r round) time.Duration { return r.floor }), goalFloor)
	t.row("  : the floor until its end", ours, each(r.rounds, func(r round) time.Duration { return r.floorEnd }), 0)
	if o.peer {
		t.row("  : microsandbox's first output", ours, each(r.rounds, func(r round) time.Duration { return r.microsandbox }), goalPeer)
	}
	t.row("spawn to krun_start_enter : bare C program", each(r.parts, func(p parts) time.Duration { return p.enter }), r.bareCalls, goalCalls)
	if _, err := fmt.Fprintf(out, "\nmedian of %d, each in turn, 1 CPU, %d MiB, image busybox\n\n", o.runs, o.memory); err != nil {
		return 0, err
	}
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	if _, err := io.WriteString(table, t.text.String()); err != nil {
		return 0, err
	}
	if err := table.Flush(); err != nil {
		return 0, err
	}
	own := mib(r.memory.shim + r.memory.vmm)
	verdict := "ok"
	if own > goalMemory {
		verdict, t.missed = "MISSED", true
	}
	text := fmt.Sprintf("\nanonymous memory beyond the guest's: shim %.1f MiB, VMM %.1f MiB, together %.1f MiB: %s, goal at most %d MiB (the guest has %.1f MiB)\nthe VMM's largest parts in MiB: %s\n\nspawn to end of krun-shim --version: %.1f ms; of a C program that does nothing: %.1f ms\n\nwhere our time goes (median ms, with a libkrun that tells)\n",
		mib(r.memory.shim), mib(r.memory.vmm), own, verdict, goalMemory, mib(r.memory.guest), strings.Join(r.memory.parts, ", "), ms(median(r.shimStart)), ms(median(r.floorStart))) + r.timeline()
	if _, err := io.WriteString(out, text); err != nil {
		return 0, err
	}
	if t.missed {
		return 1, nil
	}
	return 0, nil
}

// timeline is a line for each part of a boot.
func (r results) timeline() string {
	var text strings.Builder
	for _, line := range []struct {
		what string
		get  func(parts) time.Duration
	}{
		{"request until the shim is spawned: directory, disk, copy of the agent, spec", func(p parts) time.Duration { return p.prepare }},
		{"spawn of the shim until it has forked the VMM's process", func(p parts) time.Duration { return p.shim }},
		{"then until libkrun is loaded: exec, confinement, dlopen", func(p parts) time.Duration { return p.child }},
		{"then until krun_create_ctx: symbols, log", func(p parts) time.Duration { return p.context }},
		{"then until krun_start_enter: the calls", func(p parts) time.Duration { return p.configure }},
		{"then until the guest's kernel starts: libkrun builds the VM", func(p parts) time.Duration { return p.build }},
		{"the guest's kernel and libkrun's init until the agent's main", func(p parts) time.Duration { return p.kernel }},
		{"the agent until the link is greeted: env, disks, overlay", func(p parts) time.Duration { return p.agent }},
		{"then until Hello is answered", func(p parts) time.Duration { return p.hello }},
		{"the first exec", func(p parts) time.Duration { return p.exec }},
	} {
		fmt.Fprintf(&text, "  %8.1f  %s\n", ms(median(each(r.parts, line.get))), line.what)
	}
	return text.String()
}
