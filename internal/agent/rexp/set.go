package rexp

import (
	"fmt"
	"slices"
	"strings"
	"unicode"
)

// span is the characters from lo to hi, both included.
type span struct{ lo, hi rune }

// set is a set of characters. Normal form: ascending, neither overlapping nor
// adjacent.
type set []span

// normal returns s in normal form; it may reorder s.
func (s set) normal() set {
	slices.SortFunc(s, func(a, b span) int {
		if a.lo != b.lo {
			return int(a.lo - b.lo)
		}
		return int(a.hi - b.hi)
	})
	var out set
	for _, next := range s {
		if n := len(out); n > 0 && next.lo <= out[n-1].hi+1 {
			out[n-1].hi = max(out[n-1].hi, next.hi)
			continue
		}
		out = append(out, next)
	}
	return out
}

// negate returns what s, in normal form, leaves out.
func (s set) negate() set {
	var out set
	next := rune(0)
	for _, r := range s {
		if r.lo > next {
			out = append(out, span{next, r.lo - 1})
		}
		next = r.hi + 1
	}
	if next <= unicode.MaxRune {
		out = append(out, span{next, unicode.MaxRune})
	}
	return out
}

// intersect returns what is in both sets, which are in normal form.
func (s set) intersect(t set) set {
	var out set
	for i, j := 0, 0; i < len(s) && j < len(t); {
		if lo, hi := max(s[i].lo, t[j].lo), min(s[i].hi, t[j].hi); lo <= hi {
			out = append(out, span{lo, hi})
		}
		if s[i].hi < t[j].hi {
			i++
		} else {
			j++
		}
	}
	return out
}

func (s set) size() int {
	n := 0
	for _, r := range s {
		n += int(r.hi-r.lo) + 1
	}
	return n
}

// text is the class in Go's syntax.
func (s set) text() string {
	if len(s) == 0 {
		return `[^\x00-\x{10FFFF}]`
	}
	var b strings.Builder
	b.WriteByte('[')
	for _, r := range s {
		fmt.Fprintf(&b, `\x{%X}`, r.lo)
		if r.hi > r.lo {
			fmt.Fprintf(&b, `-\x{%X}`, r.hi)
		}
	}
	b.WriteByte(']')
	return b.String()
}

// folder knows the characters that have another case.
type folder []rune

// fold adds to s, which is in normal form, every character that differs from one
// of its own in case only (simple folding); without Unicode, ASCII letters alone.
func (p *parser) fold(s set) set {
	if p.folds == nil {
		p.folds = cased()
	}
	out := slices.Clone(s)
	for _, r := range s {
		i, _ := slices.BinarySearch(p.folds, r.lo)
		for ; i < len(p.folds) && p.folds[i] <= r.hi; i++ {
			c := p.folds[i]
			for f := unicode.SimpleFold(c); f != c; f = unicode.SimpleFold(f) {
				if !p.flags.bytes || c <= unicode.MaxASCII && f <= unicode.MaxASCII {
					out = append(out, span{f, f})
				}
			}
		}
	}
	return out.normal()
}

func cased() folder {
	var out folder
	for _, r := range unicode.CaseRanges {
		for c := rune(r.Lo); c <= rune(r.Hi); c++ {
			// ß has no capital of its own, but ẞ folds to it: take the whole orbit.
			for f := unicode.SimpleFold(c); f != c; f = unicode.SimpleFold(f) {
				out = append(out, c, f)
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}
