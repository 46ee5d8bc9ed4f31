package vmassets

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
)

const (
	tscName = "tsc.json"
	// tscWindow is the time over which one measurement runs, tscRecheck the
	// shorter one that confirms a remembered rate.
	tscWindow  = 20 * time.Millisecond
	tscRecheck = 2 * time.Millisecond
	// Two measurements must agree to one part in tscAgree.
	tscAgree = 1000
	// No x86-64 counter is known outside these rates in kHz.
	tscMin, tscMax = 200_000, 10_000_000
)

// tscHost is where the facts about the host's counter come from.
type tscHost struct {
	cpuinfo, clocksource, bootID, exact string
	// measure returns the counter's rate in kHz seen over a time.
	measure func(time.Duration) (float64, error)
}

func thisHost() tscHost {
	return tscHost{
		cpuinfo:     "/proc/cpuinfo",
		clocksource: "/sys/devices/system/clocksource/clocksource0/current_clocksource",
		bootID:      "/proc/sys/kernel/random/boot_id",
		exact:       "/sys/devices/system/cpu/cpu0/tsc_freq_khz",
		measure:     measureTSC,
	}
}

// tscRecord is tsc.json.
type tscRecord struct {
	BootID string `json:"boot_id"`
	KHz    int    `json:"khz"`
}

// TSCKHz returns the rate of the host's time-stamp counter in kHz, which QEMU's
// microvm machine needs under emulation: a guest that is told a wrong rate has
// a clock that runs at a wrong speed. It takes 40 ms once per boot of the host
// and 2 ms after that. dir is layout.Roots.VMM(), where the rate is remembered.
//
// It returns an error wherever the rate is in any doubt: the counter is not
// constant or the host's kernel does not trust it, or measurements differ by
// more than 0.1 %. Then use another machine type.
func TSCKHz(dir string) (int, error) {
	khz, err := thisHost().khz(dir)
	if err != nil {
		return 0, fmt.Errorf("rate of the time-stamp counter: %w", err)
	}
	return khz, nil
}

func (h tscHost) khz(dir string) (int, error) {
	if err := h.trusted(); err != nil {
		return 0, err
	}
	boot, err := os.ReadFile(h.bootID)
	if err != nil {
		return 0, err
	}
	bootID := strings.TrimSpace(string(boot))
	if khz := rememberedKHz(dir, bootID); khz > 0 {
		// A virtual machine may have moved to another host since.
		if now, err := h.measure(tscRecheck); err == nil && agree(float64(khz), now) {
			return khz, nil
		}
	}
	khz, err := h.measured()
	if err != nil {
		return 0, err
	}
	body, err := json.Marshal(tscRecord{BootID: bootID, KHz: khz})
	if err != nil {
		return 0, err
	}
	if err := layout.MakePrivate(dir); err != nil {
		return 0, err
	}
	return khz, writeFile(dir, tscName, false, func(f *os.File) error {
		_, err := f.Write(body)
		return err
	})
}

// rememberedKHz returns the rate measured earlier in this boot of the host, or 0.
func rememberedKHz(dir, bootID string) int {
	body, err := os.ReadFile(filepath.Join(dir, tscName))
	if err != nil {
		return 0
	}
	var r tscRecord
	if json.Unmarshal(body, &r) != nil || r.BootID != bootID || r.KHz < tscMin || r.KHz > tscMax {
		return 0
	}
	return r.KHz
}

// trusted tells why the counter is not to be used as a clock.
func (h tscHost) trusted() error {
	info, err := os.ReadFile(h.cpuinfo)
	if err != nil {
		return err
	}
	flags := cpuFlags(string(info))
	for _, flag := range []string{"tsc", "constant_tsc", "nonstop_tsc"} {
		if !slices.Contains(flags, flag) {
			return fmt.Errorf("the processor does not promise a constant counter (no %s in %s)", flag, h.cpuinfo)
		}
	}
	source, err := os.ReadFile(h.clocksource)
	if err != nil {
		return err
	}
	// These are read from the counter; with any other the host's kernel has
	// found it wanting.
	name := strings.TrimSpace(string(source))
	if !slices.Contains([]string{"tsc", "kvm-clock", "hyperv_clocksource_tsc_page"}, name) {
		return fmt.Errorf("the host's own clock is %q and not the counter", name)
	}
	return nil
}

// cpuFlags returns the flags of the first processor in a /proc/cpuinfo.
func cpuFlags(cpuinfo string) []string {
	for line := range strings.SplitSeq(cpuinfo, "\n") {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == "flags" {
			return strings.Fields(value)
		}
	}
	return nil
}

// measured measures twice. Where the host tells the exact rate, that is the
// result if the measurements confirm it.
func (h tscHost) measured() (int, error) {
	first, err := h.measure(tscWindow)
	if err != nil {
		return 0, err
	}
	second, err := h.measure(tscWindow)
	if err != nil {
		return 0, err
	}
	if !agree(first, second) {
		return 0, fmt.Errorf("two measurements differ: %.0f and %.0f kHz", first, second)
	}
	mean := (first + second) / 2
	if mean < tscMin || mean > tscMax {
		return 0, fmt.Errorf("%.0f kHz is not believable", mean)
	}
	body, err := os.ReadFile(h.exact)
	if errors.Is(err, os.ErrNotExist) {
		return int(mean + 0.5), nil
	}
	if err != nil {
		return 0, err
	}
	exact, err := strconv.Atoi(strings.TrimSpace(string(body)))
	if err != nil || !agree(float64(exact), mean) {
		return 0, fmt.Errorf("%s says %q but the counter runs at %.0f kHz", h.exact, strings.TrimSpace(string(body)), mean)
	}
	return exact, nil
}

func agree(a, b float64) bool {
	return (a-b)*tscAgree <= a && (b-a)*tscAgree <= a
}
