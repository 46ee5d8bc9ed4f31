package rexp

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"unicode"
)

// kind is what a node of the pattern's tree stands for.
type kind int

const (
	kindLeaf      kind = iota // text: one class, character or assertion
	kindConcat                // subs one after another
	kindAlternate             // one of subs
	kindRepeat                // subs[0], min to max times
	kindGroup                 // subs[0] in (?:…)
	kindCapture               // subs[0] in (…), group number capture
	kindFlags                 // nothing; stands where (?flags) stood
)

// unbounded is the max of a repetition without an upper end.
const unbounded = -1

// goRepeat is the highest count that Go's regexp takes, also as the product of
// repetitions within repetitions.
const goRepeat = 1000

// node is a part of a pattern.
type node struct {
	kind     kind
	text     string
	subs     []*node
	min, max int
	greedy   bool
	capture  int
	depth    int
}

func leaf(text string) *node { return &node{kind: kindLeaf, text: text} }

// quote is one character in Go's syntax.
func quote(r rune) string {
	if !unicode.IsPrint(r) {
		return fmt.Sprintf(`\x{%X}`, r)
	}
	return regexp.QuoteMeta(string(r))
}

// rendered is a node in Go's syntax.
type rendered struct {
	text string
	// bare is text without capture groups, "" where it is the same.
	bare string
	// atom: a repetition operator may follow as it is.
	atom bool
	// cost is the number of instructions it compiles to, about.
	cost int
	// counted is the product of the counts of nested repetitions.
	counted int
}

func (r rendered) without() string {
	if r.bare != "" {
		return r.bare
	}
	return r.text
}

// render returns the tree in Go's syntax, or an error when it is too large.
func render(n *node) (string, error) {
	r, err := n.render()
	return r.text, err
}

func (r rendered) check() (rendered, error) {
	if r.cost > maxInstructions || len(r.text) > maxRewritten {
		return rendered{}, &Error{Reason: "the pattern is too large once its repetitions are written out"}
	}
	return r, nil
}

func (n *node) render() (rendered, error) {
	switch n.kind {
	case kindLeaf:
		return rendered{text: n.text, atom: true, cost: 1, counted: 1}, nil
	case kindConcat, kindAlternate:
		return n.renderList()
	case kindRepeat:
		return n.renderRepeat()
	case kindGroup, kindCapture:
		r, err := n.subs[0].render()
		if err != nil {
			return rendered{}, err
		}
		bare := "(?:" + r.without() + ")"
		r.text, r.bare, r.atom = "(?:"+r.text+")", bare, true
		if n.kind == kindCapture {
			r.text = "(" + r.text[len("(?:"):]
			r.cost += 2
		}
		return r.check()
	}
	return rendered{counted: 1}, nil
}

func (n *node) renderList() (rendered, error) {
	var text, bare strings.Builder
	out := rendered{counted: 1, atom: len(n.subs) == 1}
	for i, sub := range n.subs {
		r, err := sub.render()
		if err != nil {
			return rendered{}, err
		}
		if n.kind == kindAlternate && i > 0 {
			text.WriteByte('|')
			bare.WriteByte('|')
			out.cost++
		}
		text.WriteString(r.text)
		bare.WriteString(r.without())
		out.atom = out.atom && r.atom
		out.cost += r.cost
		out.counted = max(out.counted, r.counted)
		if out.cost > maxInstructions || text.Len() > maxRewritten {
			return out.check()
		}
	}
	out.text, out.bare = text.String(), bare.String()
	if n.kind == kindAlternate {
		out.text, out.bare, out.atom = "(?:"+out.text+")", "(?:"+out.bare+")", true
	}
	return out.check()
}

func (n *node) renderRepeat() (rendered, error) {
	sub, err := n.subs[0].render()
	if err != nil {
		return rendered{}, err
	}
	if !sub.atom {
		sub.text, sub.bare = "(?:"+sub.text+")", "(?:"+sub.without()+")"
	}
	lazy := "?"
	if n.greedy {
		lazy = ""
	}
	out := rendered{counted: sub.counted}
	copies := max(n.min, n.max, 1)
	// Checked before anything of that size is built.
	if out.cost = (sub.cost + 1) * copies; out.cost > maxInstructions {
		return out.check()
	}
	switch {
	case n.max == unbounded && n.min == 0:
		out.text, out.bare = sub.text+"*"+lazy, sub.without()+"*"+lazy
	case n.max == unbounded && n.min == 1:
		out.text, out.bare = sub.text+"+"+lazy, sub.without()+"+"+lazy
	case n.max == 1 && n.min == 0:
		out.text, out.bare = sub.text+"?"+lazy, sub.without()+"?"+lazy
	case copies*sub.counted <= goRepeat:
		out.counted = copies * sub.counted
		out.text, out.bare = sub.text+n.braces()+lazy, sub.without()+n.braces()+lazy
	case len(sub.text)*copies > maxRewritten && sub.counted > 1:
		return rendered{cost: maxInstructions + 1}.check()
	default:
		out.text, out.bare, out.counted = n.unroll(sub, sub.text, lazy), n.unroll(sub, sub.without(), lazy), max(out.counted, goRepeat)
	}
	return out.check()
}

func (n *node) braces() string {
	switch n.max {
	case n.min:
		return "{" + strconv.Itoa(n.min) + "}"
	case unbounded:
		return "{" + strconv.Itoa(n.min) + ",}"
	}
	return "{" + strconv.Itoa(n.min) + "," + strconv.Itoa(n.max) + "}"
}

// unroll writes a repetition out that Go would refuse. All rounds but the last
// are without capture groups, so that the groups keep their numbers.
func (n *node) unroll(sub rendered, last, lazy string) string {
	bare := sub.without()
	var b strings.Builder
	times := func(count int, suffix string) {
		if sub.counted == 1 && suffix == "" {
			for ; count >= goRepeat; count -= goRepeat {
				b.WriteString(bare + "{" + strconv.Itoa(goRepeat) + "}")
			}
			if count > 0 {
				b.WriteString(bare + "{" + strconv.Itoa(count) + "}")
			}
			return
		}
		for range count {
			b.WriteString(bare + suffix)
		}
	}
	b.WriteString("(?:")
	switch n.max {
	case unbounded:
		times(n.min-1, "")
		b.WriteString(last + "+" + lazy)
	case n.min:
		times(n.min-1, "")
		b.WriteString(last)
	default:
		times(n.min, "")
		times(n.max-n.min-1, "?"+lazy)
		b.WriteString(last + "?" + lazy)
	}
	b.WriteByte(')')
	return b.String()
}
