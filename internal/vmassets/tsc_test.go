package vmassets_test

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/vmassets"
)

// tscHost is a host whose counter can be trusted and measures as told, in turn.
func tscHost(t *testing.T, rates ...float64) (vmassets.TSCHost, *int) {
	t.Helper()
	dir, asked := t.TempDir(), new(int)
	file := func(name, content string) string {
		path := filepath.Join(dir, name)
		writeFile(t, path, []byte(content), 0o644)
		return path
	}
	return vmassets.TSCHost{
		CPUInfo:     file("cpuinfo", "processor\t: 0\nflags\t\t: fpu tsc constant_tsc nonstop_tsc svm\n"),
		ClockSource: file("clocksource", "tsc\n"),
		BootID:      file("boot_id", "first\n"),
		Exact:       filepath.Join(dir, "none"),
		Measure: func(time.Duration) (float64, error) {
			rate := rates[min(*asked, len(rates)-1)]
			*asked++
			if rate == 0 {
				return 0, errors.New("too busy")
			}
			return rate, nil
		},
	}, asked
}

func TestTSCRateIsRememberedForOneBoot(t *testing.T) {
	t.Parallel()
	h, asked := tscHost(t, 2_600_000, 2_600_400, 2_600_100, 2_600_100, 2_600_100, 2_100_000)
	dir := privateDir(t)
	check := func(step string, want, wantAsked int) {
		t.Helper()
		khz, err := h.KHz(dir)
		if err != nil || khz != want || *asked != wantAsked {
			t.Errorf("%s: %d kHz, %v, measured %d times", step, khz, err, *asked)
		}
	}
	check("first", 2_600_200, 2)
	check("remembered and confirmed", 2_600_200, 3)
	writeFile(t, h.BootID, []byte("second\n"), 0o644)
	check("another boot", 2_600_100, 5)
	check("moved to another host", 2_100_000, 8)
	check("remembered again", 2_100_000, 9)
	writeFile(t, filepath.Join(dir, "tsc.json"), []byte(`{"boot_id":"second","khz":`), 0o600)
	check("damaged record", 2_100_000, 11)
}

func TestTSCRateInDoubtIsAnError(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		rates  []float64
		change func(h *vmassets.TSCHost)
		want   string
	}{
		"differ":       {[]float64{2_600_000, 2_603_000}, nil, "differ"},
		"busy":         {[]float64{0}, nil, "busy"},
		"busy later":   {[]float64{2_600_000, 0}, nil, "busy"},
		"too slow":     {[]float64{1000}, nil, "not believable"},
		"too fast":     {[]float64{1e8}, nil, "not believable"},
		"not constant": {[]float64{2_600_000}, func(h *vmassets.TSCHost) { writeFile(t, h.CPUInfo, []byte("flags : tsc nonstop_tsc\n"), 0o644) }, "constant_tsc"},
		"not nonstop":  {[]float64{2_600_000}, func(h *vmassets.TSCHost) { writeFile(t, h.CPUInfo, []byte("flags : tsc constant_tsc\n"), 0o644) }, "nonstop_tsc"},
		"no flags":     {[]float64{2_600_000}, func(h *vmassets.TSCHost) { writeFile(t, h.CPUInfo, nil, 0o644) }, "no tsc"},
		"hpet":         {[]float64{2_600_000}, func(h *vmassets.TSCHost) { writeFile(t, h.ClockSource, []byte("hpet\n"), 0o644) }, `"hpet"`},
		"no source":    {[]float64{2_600_000}, func(h *vmassets.TSCHost) { h.ClockSource += "x" }, "no such file"},
		"contradicted": {[]float64{2_600_000}, func(h *vmassets.TSCHost) { writeFile(t, h.Exact, []byte("2500000\n"), 0o644) }, "2500000"},
		"nonsense":     {[]float64{2_600_000}, func(h *vmassets.TSCHost) { writeFile(t, h.Exact, []byte("fast\n"), 0o644) }, "fast"},
	} {
		h, _ := tscHost(t, c.rates...)
		if c.change != nil {
			c.change(&h)
		}
		if khz, err := h.KHz(privateDir(t)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %d kHz, error %v without %q", name, khz, err, c.want)
		}
	}
}

func TestTSCRateThatTheHostTells(t *testing.T) {
	t.Parallel()
	h, _ := tscHost(t, 2_600_900)
	writeFile(t, h.Exact, []byte("2600000\n"), 0o644)
	if khz, err := h.KHz(privateDir(t)); err != nil || khz != 2_600_000 {
		t.Errorf("%d kHz, %v", khz, err)
	}
}

func TestTSCRateOfThisHost(t *testing.T) {
	t.Parallel()
	dir := privateDir(t)
	first, err := vmassets.TSCKHz(dir)
	if err != nil {
		t.Skip("SKIP: this host's counter is in doubt:", err)
	}
	second, err := vmassets.TSCKHz(filepath.Join(dir, "other"))
	if err != nil {
		t.Skip("SKIP: this host is too busy:", err)
	}
	if diff := fmt.Sprint(first - second); max(first, second)-min(first, second) > first/1000 {
		t.Errorf("two measurements differ by %s kHz", diff)
	}
}
