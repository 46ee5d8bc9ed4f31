package rexp

import (
	"strings"
	"unicode"
)

// charClass is a set of characters and, where it has a short one, its text in
// Go's syntax.
type charClass struct {
	set   set
	short string
}

func (c *charClass) leaf() *node {
	if c.short != "" {
		return leaf(c.short)
	}
	return leaf(c.set.text())
}

// bracket reads a class in brackets.
func (p *parser) bracket() (*node, error) {
	s, err := p.bracketSet(0)
	if err != nil {
		return nil, err
	}
	return leaf(s.text()), nil
}

// classOp is a set operation that waits for its right side.
type classOp byte

const (
	opNone       classOp = 0
	opIntersect  classOp = '&'
	opDifference classOp = '-'
	opSymmetric  classOp = '~'
)

// bracketSet reads from '[' to its ']' and returns the set, folded and negated
// as flags and '^' say. The operations && -- ~~ are left-associative and bind
// weaker than putting items side by side.
func (p *parser) bracketSet(depth int) (set, error) {
	at := p.pos
	if depth > maxNesting {
		return nil, p.fail(at, "the pattern nests deeper than %d", maxNesting)
	}
	p.bump()
	p.space()
	negated := p.accept("^")
	p.space()
	var left, union set
	op := opNone
	for !p.eof() && p.char() == '-' {
		p.bump()
		p.space()
		union = append(union, span{'-', '-'})
	}
	if len(union) == 0 && p.accept("]") {
		union = append(union, span{']', ']'})
	}
	for {
		p.space()
		if p.eof() {
			return nil, p.fail(at, "unclosed character class")
		}
		rest := p.src[p.pos:]
		switch {
		case rest[0] == ']':
			p.bump()
			result := p.combine(op, left, union)
			return p.negateIf(at, result, negated)
		case rest[0] == '[':
			item, err := p.nested(depth)
			if err != nil {
				return nil, err
			}
			union = append(union, item...)
		case strings.HasPrefix(rest, "&&"), strings.HasPrefix(rest, "--"), strings.HasPrefix(rest, "~~"):
			left, union = p.combine(op, left, union), nil
			op = classOp(rest[0])
			p.pos += 2
		default:
			item, err := p.classItem(at)
			if err != nil {
				return nil, err
			}
			union = append(union, item...)
		}
	}
}

// combine applies op to the sets, folded before where the flags say so.
func (p *parser) combine(op classOp, left, right set) set {
	right = right.normal()
	if p.flags.fold {
		right = p.fold(right)
	}
	switch op {
	case opIntersect:
		return left.intersect(right)
	case opDifference:
		return left.intersect(right.negate())
	case opSymmetric:
		return append(left.intersect(right.negate()), right.intersect(left.negate())...).normal()
	}
	return right
}

func (p *parser) negateIf(at int, s set, negated bool) (set, error) {
	if p.flags.bytes && (negated || len(s) > 0 && s[len(s)-1].hi > 0x7F) {
		return nil, p.fail(at, "a class without Unicode (?-u) must not match beyond ASCII")
	}
	if negated {
		s = s.negate()
	}
	return s, p.charge(at, s)
}

// nested reads "[:name:]", or a class within a class.
func (p *parser) nested(depth int) (set, error) {
	if rest, ok := strings.CutPrefix(p.src[p.pos:], "[:"); ok {
		rest, negated := strings.CutPrefix(rest, "^")
		name, _, closed := strings.Cut(rest, ":]")
		if s, known := posix(name); closed && known {
			at := p.pos
			p.pos += len("[:") + len(name) + len(":]")
			if negated {
				p.pos++
			}
			if p.flags.fold {
				s = p.fold(s)
			}
			return p.negateIf(at, s, negated)
		}
	}
	return p.bracketSet(depth + 1)
}

// classItem reads a character, a range of characters or an escape.
func (p *parser) classItem(at int) (set, error) {
	class, low, err := p.classAtom()
	if err != nil {
		return nil, err
	}
	p.space()
	rest := p.src[p.pos:]
	if rest == "" {
		return nil, p.fail(at, "unclosed character class")
	}
	if rest[0] != '-' || strings.HasPrefix(rest, "--") || p.dashIsLast() {
		if class != nil {
			return class.set, nil
		}
		return set{{low, low}}, nil
	}
	p.bump()
	p.space()
	if p.eof() {
		return nil, p.fail(at, "unclosed character class")
	}
	end, high, err := p.classAtom()
	switch {
	case err != nil:
		return nil, err
	case class != nil || end != nil:
		return nil, p.fail(at, "a range in a class must begin and end with a character")
	case high < low:
		return nil, p.fail(at, "the range %q-%q ends before it begins", low, high)
	}
	return set{{low, high}}, nil
}

// dashIsLast reports whether the '-' at the position stands before the ']'.
func (p *parser) dashIsLast() bool {
	saved := p.pos
	defer func() { p.pos = saved }()
	p.bump()
	p.space()
	return !p.eof() && p.char() == ']'
}

func (p *parser) classAtom() (*charClass, rune, error) {
	at := p.pos
	r := p.bump()
	switch {
	case r == '\\':
		return p.escapeClass(at)
	case p.flags.bytes && r > unicode.MaxASCII:
		return nil, 0, p.fail(at, "a character beyond ASCII in a class without Unicode (?-u)")
	}
	return nil, r, nil
}

// perlClass is \d, \s, \w or, for a capital, what they leave out.
func (p *parser) perlClass(at int, r rune) (*charClass, error) {
	if p.flags.bytes {
		if r < 'a' {
			return nil, p.fail(at, "\\%c without Unicode (?-u) could match half a character", r)
		}
		name := map[rune]string{'d': "digit", 's': "space", 'w': "word"}[r]
		s, _ := posix(name)
		return &charClass{set: s}, nil
	}
	var c charClass
	switch r | 0x20 {
	case 'd':
		c = charClass{set: digits(), short: `[\p{Nd}]`}
	case 's':
		c = charClass{set: spaces()}
	case 'w':
		c = charClass{set: words(), short: `[` + wordText + `]`}
	}
	if r < 'a' {
		c.set = c.set.negate()
		if c.short != "" {
			c.short = "[^" + c.short[1:]
		}
	}
	return &c, p.charge(at, c.set)
}
