package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/cleanup"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/egress"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/guest"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vmassets"
	"github.com/iii-hq/workers/sandbox-libkrun/test/netprobe/wire"
)

const (
	// networkBytes go each way, roundTrips are made in each round, networkFlood
	// connections are open at once.
	networkBytes = 100 << 20
	roundTrips   = 500
	networkFlood = 200
	// idleGateway and busyGateway bound the anonymous memory of a shim with its
	// gateway, in bytes.
	idleGateway = 12 << 20
	busyGateway = 48 << 20
	// gateway is where both networks have the host's loopback.
	gateway = "198.18.0.1"
)

// slirpScript stands before QEMU and gives the VM QEMU's own user network in the
// place of our gateway, under the same addresses.
const slirpScript = `#!/bin/sh
for arg; do
	shift
	case $arg in
	stream,id=network,*) arg=user,id=network,net=198.18.0.0/24,host=198.18.0.1,dns=198.18.0.3 ;;
	esac
	set -- "$@" "$arg"
done
exec %s "$@"
`

// network measures our gateway against slirp: two VMs of the same kind, in turn.
func (b *bench) network(ctx context.Context, o options, dir string) (rows []row, err error) {
	var undo cleanup.Stack
	defer func() { err = errors.Join(err, undo.Run()) }()
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	undo.Add(listener.Close)
	go wire.Serve(listener)
	address, _ := listener.Addr().(*net.TCPAddr)
	probe, err := buildProgram(ctx, dir, "netprobe", "test/netprobe")
	if err != nil {
		return nil, err
	}
	slirp, err := b.slirpLauncher(o, dir)
	if err != nil {
		return nil, err
	}
	ours, err := b.networked(ctx, &undo, b.emulated, uint16(address.Port), probe)
	if err != nil {
		return nil, err
	}
	base, err := b.networked(ctx, &undo, slirp, uint16(address.Port), probe)
	if err != nil {
		return nil, err
	}
	// Slirp takes no more, and is slower where the guest believes that it does.
	if _, err := output(ctx, base.machine, guest.IO{}, "/bin/sh", "-c", "echo 1500 > /sys/class/net/eth0/mtu"); err != nil {
		return nil, err
	}
	idle, err := ours.machine.Stats(ctx)
	if err != nil {
		return nil, err
	}
	if rows, err = b.compareNetworks(ctx, ours, base, roundTrip()); err != nil {
		return nil, err
	}
	// Only now: each look at the memory costs a round trip some of its time.
	watch := watchMemory(ctx, ours.machine)
	more, err := b.compareNetworks(ctx, ours, base, transfers()...)
	if err == nil {
		err = ours.flood(ctx)
	}
	peak := watch()
	if err != nil {
		return nil, err
	}
	return append(append(rows, more...),
		newRow("gateway memory, idle", mebibytes(int64(idle.ShimRSSAnon)), mebibytes(idleGateway), "MiB", 1, "12 MiB; ours is RssAnon of the whole shim"),
		newRow("gateway memory, under load", mebibytes(int64(peak)), mebibytes(busyGateway), "MiB", 1,
			fmt.Sprintf("48 MiB; ours is the highest RssAnon of the whole shim during the transfers and %d connections at once", networkFlood)),
	), nil
}

// slirpLauncher boots VMs whose QEMU is behind slirpScript. Slirp dials for the
// guest, so QEMU cannot be confined.
func (b *bench) slirpLauncher(o options, dir string) (*vm.Launcher, error) {
	qemu, err := vmassets.FindQEMU(os.Getenv, b.arch)
	if err != nil {
		return nil, err
	}
	script := filepath.Join(dir, "qemu-with-slirp")
	if err := os.WriteFile(script, fmt.Appendf(nil, slirpScript, qemu), 0o755); err != nil {
		return nil, err
	}
	return b.launcherWith(o, "qemu", map[string]string{"III_QEMU": script, "III_SHIM_LANDLOCK": "off", "III_SANDBOX_SNAPSHOT": "off"})
}

// networkedVM is a VM that reaches the server.
type networkedVM struct {
	machine *vm.Machine
	server  string
}

func (b *bench) networked(ctx context.Context, undo *cleanup.Stack, launcher *vm.Launcher, port uint16, probe []byte) (*networkedVM, error) {
	req := b.request
	req.Network = &vm.Network{Policy: egress.Policy{Mode: egress.Open, HostPorts: []uint16{port}}}
	m, err := launcher.Launch(ctx, req)
	if err != nil {
		return nil, err
	}
	undo.Add(m.Kill)
	return &networkedVM{machine: m, server: net.JoinHostPort(gateway, strconv.Itoa(int(port)))}, install(ctx, m, probe)
}

// ask runs the probe and returns the number of that name that it prints.
func (v *networkedVM) ask(ctx context.Context, field, command string, n int) (time.Duration, error) {
	text, err := output(ctx, v.machine, guest.IO{}, probePath, command, v.server, strconv.Itoa(n))
	if err != nil {
		return 0, err
	}
	var all map[string]int64
	if err := json.Unmarshal([]byte(text), &all); err != nil {
		return 0, fmt.Errorf("the probe printed %q: %w", text, err)
	}
	return time.Duration(all[field]) * time.Microsecond, nil
}

func (v *networkedVM) flood(ctx context.Context) error {
	text, err := output(ctx, v.machine, guest.IO{}, probePath, "flood", v.server, strconv.Itoa(networkFlood))
	if err != nil {
		return err
	}
	var out struct{ OK int }
	if err := json.Unmarshal([]byte(text), &out); err != nil || out.OK != networkFlood {
		return fmt.Errorf("%d connections at once: %s", networkFlood, text)
	}
	return nil
}

// networkRow is something that the probe measures.
type networkRow struct {
	name, command, field string
	n                    int
	goal                 float64
}

func roundTrip() networkRow {
	return networkRow{"network round trip", "rtt", "P50", roundTrips, goalRoundTrip}
}

// transfers may have at least 0.8 of slirp's speed, so at most 1.25 of its time.
func transfers() []networkRow {
	return []networkRow{
		{"network into the guest, 100 MiB", "get", "Micros", networkBytes, goalSpeed},
		{"network out of the guest, 100 MiB", "put", "Micros", networkBytes, goalSpeed},
	}
}

// compareNetworks measures both in turn.
func (b *bench) compareNetworks(ctx context.Context, ours, base *networkedVM, what ...networkRow) ([]row, error) {
	var rows []row
	for _, what := range what {
		var times [2][]time.Duration
		var ratios []float64
		for range b.runs {
			var pair [2]time.Duration
			for i, v := range []*networkedVM{ours, base} {
				var err error
				if pair[i], err = v.ask(ctx, what.field, what.command, what.n); err != nil {
					return nil, err
				}
				times[i] = append(times[i], pair[i])
			}
			ratios = append(ratios, float64(pair[0])/float64(pair[1]))
			b.note("%s: %d of %d", what.name, len(ratios), b.runs)
		}
		notes := []string{spread("ours", times[0]), spread("slirp", times[1])}
		if what.n == networkBytes {
			notes = append(notes, "ours "+speed(median(times[0]))+", slirp "+speed(median(times[1])))
		}
		r := newRow(what.name, median(times[0]), median(times[1]), "ms", what.goal,
			"QEMU's own user network (slirp) in a VM of the same kind, the same server on the host; the ratio is the median of those of each turn", notes...)
		rows = append(rows, r.withRatio(ratios))
	}
	return rows, nil
}

// watchMemory looks at the shim's anonymous memory many times a second until the
// function that it returns is called, which tells the most that was seen.
func watchMemory(ctx context.Context, m *vm.Machine) func() uint64 {
	ctx, cancel := context.WithCancel(ctx)
	var peak uint64
	var work sync.WaitGroup
	work.Go(func() {
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				if stats, err := m.Stats(ctx); err == nil {
					peak = max(peak, stats.ShimRSSAnon)
				}
			}
		}
	})
	return func() uint64 {
		cancel()
		work.Wait()
		return peak
	}
}
