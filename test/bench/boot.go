package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/guest"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
)

// Goals of the issue, as ratios.
const (
	goalBoot   = 1.35
	goalExec   = 2
	goalMemory = 1.1
	goalShim   = 1
	goalFlat   = 1
	// Times against slirp's: a speed of at least 0.8 of its, round trips of at most
	// 1.5 times its.
	goalSpeed     = 1.25
	goalRoundTrip = 1.5
)

// shimLimit is what the shim may have of anonymous memory, in bytes.
const shimLimit = 16 << 20

// bootTimes is one create → first exec and its parts. The guest's parts lie
// within the time from shim to link and from link to answer.
type bootTimes struct {
	total time.Duration
	// On the host: until the shim ran, from there until the guest's link was up,
	// from there until the agent had answered, the first exec.
	shim, link, answer, exec time.Duration
	// In the guest: from the boot spec's arrival until the agent served.
	agent time.Duration
	// cpu is what QEMU has used when all is done: it depends less than the rest
	// on what else the host does.
	cpu time.Duration
}

// bootOnce launches a VM, runs its first program and stops it again; the stop
// is not part of the times.
func (b *bench) bootOnce(ctx context.Context, launcher *vm.Launcher) (t bootTimes, err error) {
	begin := time.Now()
	m, err := launcher.Launch(ctx, b.request)
	if err != nil {
		return t, err
	}
	defer func() { err = errors.Join(err, m.Kill()) }()
	launched := time.Now()
	if err := succeed(ctx, m, "/bin/true"); err != nil {
		return t, err
	}
	end := time.Now()
	status, err := m.Status(ctx)
	if err != nil {
		return t, err
	}
	stats, err := m.Stats(ctx)
	if err != nil {
		return t, err
	}
	info := m.Info()
	return bootTimes{
		total: end.Sub(begin), exec: end.Sub(launched), agent: info.AgentTime,
		shim: status.Started.Sub(begin), link: status.Running.Sub(status.Started), answer: launched.Sub(status.Running),
		cpu: stats.CPU,
	}, nil
}

// succeed runs a program that must exit with 0.
func succeed(ctx context.Context, m *vm.Machine, argv ...string) error {
	_, err := output(ctx, m, guest.IO{}, argv...)
	return err
}

// boots measures create → first exec against the bare boot, resumed from a
// snapshot and booted from the kernel, in turn and each first every third time,
// after one of each that does not count. The ratio is the median of the ratios of
// neighbours: what else the host does then weighs on all alike.
func (b *bench) boots(ctx context.Context, bare *floor) ([]row, error) {
	var resumed, cold []bootTimes
	var base []boot
	for i := range b.runs + 1 {
		resumedNow := func() error {
			t, err := b.bootOnce(ctx, b.launcher)
			resumed = append(resumed, t)
			return err
		}
		coldNow := func() error {
			t, err := b.bootOnce(ctx, b.cold)
			cold = append(cold, t)
			return err
		}
		bareNow := func() error {
			t, err := bare.run(ctx)
			base = append(base, t)
			return err
		}
		turn := []func() error{resumedNow, bareNow, coldNow}
		for j := range turn {
			if err := turn[(i+j)%len(turn)](); err != nil {
				return nil, err
			}
		}
		b.note("boot %d of %d", i, b.runs)
	}
	return []row{
		bootRow("create to first exec", goalBoot, resumed[1:], base[1:]),
		bootRow("the same without a snapshot", 0, cold[1:], base[1:]),
	}, nil
}

// bootRow sums up pairs of boots.
func bootRow(name string, goal float64, ours []bootTimes, base []boot) row {
	part := func(name string, get func(bootTimes) time.Duration) string {
		var list []time.Duration
		for _, t := range ours {
			list = append(list, get(t))
		}
		return spread(name, list)
	}
	var totals, ends, inits, cpus []time.Duration
	var ratios, cpuRatios []float64
	for i, t := range ours {
		totals, ends, inits = append(totals, t.total), append(ends, base[i].End), append(inits, base[i].Init)
		ratios = append(ratios, float64(t.total)/float64(base[i].End))
		cpus, cpuRatios = append(cpus, base[i].CPU), append(cpuRatios, float64(t.cpu)/float64(base[i].CPU))
	}
	r := newRow(name, median(totals), median(ends), "ms", goal,
		"spawn to exit of a bare QEMU: the same command line, devices included, but with an init of a few instructions that restarts the machine",
		spread("ours, the image being in the store: launch, first /bin/true", totals),
		part("  until the shim runs", func(t bootTimes) time.Duration { return t.shim }),
		part("  then until the guest's link is up", func(t bootTimes) time.Duration { return t.link }),
		part("  then until the agent has answered", func(t bootTimes) time.Duration { return t.answer }),
		part("  then the first exec", func(t bootTimes) time.Duration { return t.exec }),
		part("  in the guest, from the boot spec until the agent serves", func(t bootTimes) time.Duration { return t.agent }),
		part("  CPU time of QEMU", func(t bootTimes) time.Duration { return t.cpu }),
		spread("bare QEMU until its exit", ends), spread("  until its init ran", inits), spread("  CPU time", cpus),
		fmt.Sprintf("ratio of the CPU times, median of neighbours: %.2f", middle(cpuRatios)),
		fmt.Sprintf("ratio of the least of each: %.2f", float64(slices.Min(totals))/float64(slices.Min(ends))))
	return r.withRatio(ratios)
}
