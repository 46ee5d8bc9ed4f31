package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
)

// memory is what a running VM's processes have of anonymous memory, in bytes.
type memory struct {
	// shim is the shim's, vmm the VMM's beyond the guest's memory, which is guest.
	shim, vmm, guest int64
	// parts are the VMM's largest, by what is mapped there.
	parts []string
}

// shownParts is how many of them are shown.
const shownParts = 6

func (l *launches) memory(ctx context.Context, req vm.Request) (mem memory, err error) {
	ctx, cancel := context.WithTimeout(ctx, once)
	defer cancel()
	m, err := l.plain.Launch(ctx, req)
	if err != nil {
		return mem, err
	}
	defer func() { err = errors.Join(err, m.Kill()) }()
	if err := first(ctx, m); err != nil {
		return mem, err
	}
	stats, err := m.Stats(ctx)
	if err != nil {
		return mem, err
	}
	status, err := m.Status(ctx)
	if err != nil {
		return mem, err
	}
	all, err := anonymous(status.VMMPID)
	if err != nil {
		return mem, err
	}
	mem.shim, mem.guest = int64(stats.ShimRSSAnon), all[guestPart]
	delete(all, guestPart)
	for _, name := range slices.SortedFunc(maps.Keys(all), func(a, b string) int { return cmp.Compare(all[b], all[a]) }) {
		mem.vmm += all[name]
		if len(mem.parts) < shownParts {
			mem.parts = append(mem.parts, fmt.Sprintf("%s %.1f", name, mib(all[name])))
		}
	}
	return mem, nil
}

// guestPart is the guest's memory among the parts.
const guestPart = "guest"

// leastRegion is the least size of a region of the guest's memory, in bytes.
const leastRegion = 4 << 20

// mapping is one of a process's.
type mapping struct {
	name            string
	size, anonymous int64
}

// anonymous sums up a process's anonymous memory by what is mapped. The guest's
// are large mappings without a name and without a reservation of swap, as libkrun
// makes them, one below and one above the kernel; and those of libkrunfw, which is
// the guest's kernel in its place: what the guest has written there has become
// anonymous.
func anonymous(pid int) (map[string]int64, error) {
	file, err := os.Open(fmt.Sprintf("/proc/%d/smaps", pid))
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	sums := map[string]int64{}
	var m mapping
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		var kib int64
		switch {
		case len(fields) >= 5 && strings.Contains(fields[0], "-"):
			m = mapping{}
			if len(fields) > 5 {
				m.name = filepath.Base(fields[5])
			}
		case len(fields) == 3 && fields[2] == "kB":
			if _, err := fmt.Sscan(fields[1], &kib); err != nil {
				return nil, fmt.Errorf("smaps has %q: %w", lines.Text(), err)
			}
			switch fields[0] {
			case "Size:":
				m.size = kib << 10
			case "Anonymous:":
				m.anonymous = kib << 10
			}
		case len(fields) > 0 && fields[0] == "VmFlags:": // the last line of a mapping
			sums[m.part(slices.Contains(fields, "nr"))] += m.anonymous
		}
	}
	return sums, lines.Err()
}

// part is whose the mapping is, or its name.
func (m mapping) part(noReserve bool) string {
	switch {
	case strings.HasPrefix(m.name, "libkrunfw"), m.name == "" && noReserve && m.size >= leastRegion:
		return guestPart
	case m.name == "":
		return fmt.Sprintf("unnamed of %.1f", mib(m.size))
	}
	return m.name
}
