package rexp

import (
	"io"
	"regexp/syntax"
	"unicode/utf8"
)

// endOfText stands for the rune before the beginning and after the end.
const endOfText rune = -1

// input is a text read rune by rune.
type input interface {
	// next returns the next rune and its length in bytes, or endOfText and 0.
	next() (rune, int)
}

type byteInput struct {
	text []byte
	pos  int
}

func (in *byteInput) next() (rune, int) {
	if in.pos >= len(in.text) {
		return endOfText, 0
	}
	r, n := utf8.DecodeRune(in.text[in.pos:])
	in.pos += n
	return r, n
}

type readerInput struct{ r io.RuneReader }

func (in readerInput) next() (rune, int) {
	r, n, err := in.r.ReadRune()
	if err != nil {
		return endOfText, 0
	}
	return r, n
}

// machine runs a program over a text in time proportional to both: all states
// step through the text together, in order of preference, so that the first to
// match is the leftmost-first match (Thompson's construction, with captures as
// Pike has them). Unlike Go's it takes word boundaries by Unicode and can start
// in the middle of a text.
type machine struct {
	prog *syntax.Prog
	// word tells what a word boundary is a boundary of.
	word func(rune) bool
	// now and soon are the states before and after the current rune.
	now, soon queue
	// caps are the positions of the match that was found.
	caps    []int
	matched bool
	free    [][]int
	// ended, where set, ends a run; steps counts the runes since it was asked.
	ended func() bool
	steps int
}

// queue is an ordered set of states: dense holds them, sparse where each is.
type queue struct {
	dense  []thread
	sparse []uint32
}

type thread struct {
	pc   uint32
	caps []int
}

// newMachine returns a machine that records ncaps positions; 0 asks only whether
// there is a match.
func newMachine(r *Regexp, ncaps int) *machine {
	n, word := len(r.prog.Inst), isASCIIWord
	if r.unicodeBoundary {
		word = isWord
	}
	return &machine{
		prog:  r.prog,
		word:  word,
		now:   queue{sparse: make([]uint32, n)},
		soon:  queue{sparse: make([]uint32, n)},
		caps:  make([]int, ncaps),
		ended: r.ended,
	}
}

// stepsBetween is how many runes a machine steps over until it asks whether to
// end.
const stepsBetween = 256

// interrupted asks that.
func (m *machine) interrupted() bool {
	if m.steps++; m.steps < stepsBetween || m.ended == nil {
		return false
	}
	m.steps = 0
	return m.ended()
}

// run searches the text of in, which is at pos, with prev the rune before it. It
// reports whether there is a match; its positions are then in m.caps.
func (m *machine) run(in input, pos int, prev rune) bool {
	m.matched = false
	m.clear(&m.now)
	m.clear(&m.soon)
	start := make([]int, len(m.caps))
	for i := range start {
		start[i] = -1
	}
	r, width := in.next()
	for {
		if !m.matched {
			if len(start) > 0 {
				start[0] = pos
			}
			m.add(&m.now, uint32(m.prog.Start), pos, m.conditions(prev, r), start)
		}
		if len(m.now.dense) == 0 && (m.matched || r == endOfText) {
			return m.matched
		}
		if m.interrupted() {
			return false
		}
		after, afterWidth := endOfText, 0
		if r != endOfText {
			after, afterWidth = in.next()
		}
		m.step(r, pos, pos+width, m.conditions(r, after))
		if m.matched && len(m.caps) == 0 {
			return true
		}
		if r == endOfText {
			return m.matched
		}
		m.now, m.soon = m.soon, m.now
		m.clear(&m.soon)
		prev, r, pos, width = r, after, pos+width, afterWidth
	}
}

// conditions are the assertions that hold between two runes.
func (m *machine) conditions(before, after rune) syntax.EmptyOp {
	var ops syntax.EmptyOp
	switch before {
	case endOfText:
		ops |= syntax.EmptyBeginText | syntax.EmptyBeginLine
	case '\n':
		ops |= syntax.EmptyBeginLine
	}
	switch after {
	case endOfText:
		ops |= syntax.EmptyEndText | syntax.EmptyEndLine
	case '\n':
		ops |= syntax.EmptyEndLine
	}
	if m.word(before) != m.word(after) {
		return ops | syntax.EmptyWordBoundary
	}
	return ops | syntax.EmptyNoWordBoundary
}

// step takes every state over r, from pos to next; ops hold there.
func (m *machine) step(r rune, pos, next int, ops syntax.EmptyOp) {
	for i, t := range m.now.dense {
		inst := &m.prog.Inst[t.pc]
		advance := false
		switch inst.Op {
		case syntax.InstMatch:
			m.matched = true
			if len(m.caps) > 0 {
				copy(m.caps, t.caps)
				m.caps[1] = pos
			}
			// What comes later is of lower preference.
			for _, rest := range m.now.dense[i+1:] {
				m.release(rest.caps)
			}
			m.release(t.caps)
			m.now.dense = m.now.dense[:0]
			return
		case syntax.InstRune:
			advance = r != endOfText && inst.MatchRune(r)
		case syntax.InstRune1:
			advance = r == inst.Rune[0]
		case syntax.InstRuneAny:
			advance = r != endOfText
		case syntax.InstRuneAnyNotNL:
			advance = r != endOfText && r != '\n'
		}
		if advance {
			m.add(&m.soon, inst.Out, next, ops, t.caps)
		}
		m.release(t.caps)
	}
	m.now.dense = m.now.dense[:0]
}

// add puts the state pc, and those reached from it without reading, into q.
// caps is copied.
func (m *machine) add(q *queue, pc uint32, pos int, ops syntax.EmptyOp, caps []int) {
	for {
		if j := q.sparse[pc]; j < uint32(len(q.dense)) && q.dense[j].pc == pc {
			return
		}
		q.sparse[pc] = uint32(len(q.dense))
		q.dense = append(q.dense, thread{pc: pc})
		at := len(q.dense) - 1
		inst := &m.prog.Inst[pc]
		switch inst.Op {
		case syntax.InstFail:
			return
		case syntax.InstNop:
			pc = inst.Out
		case syntax.InstAlt, syntax.InstAltMatch:
			m.add(q, inst.Out, pos, ops, caps)
			pc = inst.Arg
		case syntax.InstEmptyWidth:
			if syntax.EmptyOp(inst.Arg)&^ops != 0 {
				return
			}
			pc = inst.Out
		case syntax.InstCapture:
			if int(inst.Arg) >= len(caps) {
				pc = inst.Out
				continue
			}
			saved := caps[inst.Arg]
			caps[inst.Arg] = pos
			m.add(q, inst.Out, pos, ops, caps)
			caps[inst.Arg] = saved
			return
		default:
			q.dense[at].caps = m.copy(caps)
			return
		}
	}
}

func (m *machine) copy(caps []int) []int {
	if len(caps) == 0 {
		return nil
	}
	n := len(m.free)
	if n == 0 {
		return append([]int(nil), caps...)
	}
	c := m.free[n-1]
	m.free = m.free[:n-1]
	copy(c, caps)
	return c
}

func (m *machine) release(caps []int) {
	if caps != nil {
		m.free = append(m.free, caps)
	}
}

func (m *machine) clear(q *queue) {
	for _, t := range q.dense {
		m.release(t.caps)
	}
	q.dense = q.dense[:0]
}
