package main

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// row is one line of the result: what was measured, against what, and whether
// the ratio is within its goal.
type row struct {
	Name string `json:"name"`
	// Ours and Base are in Unit; Base was measured in the same run.
	Ours float64 `json:"ours"`
	Base float64 `json:"base"`
	Unit string  `json:"unit"`
	// Ratio is Ours / Base, or the median of such ratios, and Goal its most; Goal 0 means that the row is there
	// to be seen and cannot fail.
	Ratio float64 `json:"ratio"`
	Goal  float64 `json:"goal,omitempty"`
	OK    bool    `json:"ok"`
	// Against says what Base is.
	Against string `json:"against"`
	// Notes explain where the value comes from.
	Notes []string `json:"notes,omitempty"`
}

// newRow computes ratio and verdict.
func newRow(name string, ours, base float64, unit string, goal float64, against string, notes ...string) row {
	r := row{Name: name, Ours: ours, Base: base, Unit: unit, Goal: goal, Against: against, Notes: notes}
	return r.withRatio([]float64{ours / base})
}

// withRatio sets the ratio to the median of those measured, and the verdict. A
// ratio that is no number meets no goal.
func (r row) withRatio(ratios []float64) row {
	r.Ratio = middle(ratios)
	if math.IsNaN(r.Ratio) || math.IsInf(r.Ratio, 0) {
		r.Ratio = -1 // JSON has no such number
	}
	r.OK = r.Goal == 0 || (r.Ratio >= 0 && r.Ratio <= r.Goal)
	return r
}

// middle is the median of at least one number.
func middle(list []float64) float64 {
	sorted := slices.Sorted(slices.Values(list))
	mid := len(sorted) / 2
	if len(sorted)%2 == 1 {
		return sorted[mid]
	}
	return (sorted[mid-1] + sorted[mid]) / 2
}

// verdict is the row's result in words.
func (r row) verdict() string {
	switch {
	case r.Goal == 0:
		return "no goal"
	case r.OK:
		return fmt.Sprintf("ok, goal at most %.2f", r.Goal)
	}
	return fmt.Sprintf("MISSED, goal at most %.2f", r.Goal)
}

// result is the whole run.
type result struct {
	Runs int    `json:"runs"`
	Host string `json:"host"`
	Rows []row  `json:"rows"`
}

func (r result) missed() bool {
	return slices.ContainsFunc(r.Rows, func(r row) bool { return !r.OK })
}

// print writes the table and what each row was measured against.
func (r result) print(w io.Writer) error {
	var out strings.Builder
	fmt.Fprintf(&out, "median of %d, ours and base measured in turn on %s\n\n", r.Runs, r.Host)
	table := tabwriter.NewWriter(&out, 0, 0, 2, ' ', 0)
	lines := []string{"WHAT\tOURS\tBASE\tUNIT\tRATIO\tVERDICT"}
	for _, r := range r.Rows {
		lines = append(lines, fmt.Sprintf("%s\t%.1f\t%.1f\t%s\t%.2f\t%s", r.Name, r.Ours, r.Base, r.Unit, r.Ratio, r.verdict()))
	}
	if _, err := fmt.Fprintln(table, strings.Join(lines, "\n")); err != nil {
		return err
	}
	if err := table.Flush(); err != nil {
		return err
	}
	for _, r := range r.Rows {
		fmt.Fprintf(&out, "\n%s\n  base: %s\n", r.Name, r.Against)
		for _, n := range r.Notes {
			fmt.Fprintf(&out, "  %s\n", n)
		}
	}
	_, err := io.WriteString(w, out.String())
	return err
}

func (r result) printJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}

// median of durations, in milliseconds; 0 for none.
func median(list []time.Duration) float64 {
	if len(list) == 0 {
		return 0
	}
	var ms []float64
	for _, d := range list {
		ms = append(ms, milliseconds(d))
	}
	return middle(ms)
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func mebibytes(bytes int64) float64 { return float64(bytes) / (1 << 20) }

// spread shows the least and the greatest beside a median.
func spread(name string, list []time.Duration) string {
	if len(list) == 0 {
		return name + ": none"
	}
	return fmt.Sprintf("%s: median %.1f, least %.1f, greatest %.1f ms", name, median(list),
		milliseconds(slices.Min(list)), milliseconds(slices.Max(list)))
}
