package rexp

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// flags are the inline flags of Rust's syntax.
type flags struct {
	fold     bool // i
	multi    bool // m
	dotAll   bool // s
	swap     bool // U: x* is lazy and x*? greedy
	verbose  bool // x
	bytes    bool // -u
	carriage bool // R: \r\n is a line end too
}

// parser reads Rust's regular expression syntax.
type parser struct {
	src    string
	pos    int
	flags  flags
	groups int
	depth  int
	ranges int
	names  map[string]int
	folds  folder

	unicodeBoundary, asciiBoundary bool
}

func (p *parser) fail(at int, format string, args ...any) error {
	return &Error{Offset: at, Reason: fmt.Sprintf(format, args...)}
}

// charge counts the ranges of a class that has been put together.
func (p *parser) charge(at int, s set) error {
	if p.ranges += len(s); p.ranges > maxRanges {
		return p.fail(at, "the pattern has too many large classes")
	}
	return nil
}

func (p *parser) parse() (*node, error) {
	if at := invalidUTF8(p.src); at >= 0 {
		return nil, p.fail(at, "the pattern is not valid UTF-8")
	}
	root, err := p.alternation()
	if err != nil {
		return nil, err
	}
	if !p.eof() {
		return nil, p.fail(p.pos, "unopened group: ')' without '('")
	}
	return root, nil
}

// literalText is the tree of a pattern that is plain text.
func (p *parser) literalText() (*node, error) {
	if at := invalidUTF8(p.src); at >= 0 {
		return nil, p.fail(at, "the text is not valid UTF-8")
	}
	n := &node{kind: kindConcat}
	for _, r := range p.src {
		n.subs = append(n.subs, p.literal(r))
	}
	return n, nil
}

func invalidUTF8(s string) int {
	for i, r := range s {
		if r == utf8.RuneError && !strings.HasPrefix(s[i:], "\uFFFD") {
			return i
		}
	}
	return -1
}

func (p *parser) eof() bool { return p.pos >= len(p.src) }

func (p *parser) char() rune {
	r, _ := utf8.DecodeRuneInString(p.src[p.pos:])
	return r
}

func (p *parser) bump() rune {
	r, n := utf8.DecodeRuneInString(p.src[p.pos:])
	p.pos += n
	return r
}

func (p *parser) accept(text string) bool {
	if strings.HasPrefix(p.src[p.pos:], text) {
		p.pos += len(text)
		return true
	}
	return false
}

// space skips white space and comments in verbose mode.
func (p *parser) space() {
	for p.flags.verbose && !p.eof() {
		switch r := p.char(); {
		case unicode.IsSpace(r):
			p.bump()
		case r == '#':
			for !p.eof() && p.bump() != '\n' {
			}
		default:
			return
		}
	}
}

func (p *parser) alternation() (*node, error) {
	branches := []*node{}
	for {
		branch, err := p.concat()
		if err != nil {
			return nil, err
		}
		branches = append(branches, branch)
		if p.eof() || p.char() != '|' {
			break
		}
		p.bump()
	}
	if len(branches) == 1 {
		return branches[0], nil
	}
	return &node{kind: kindAlternate, subs: branches}, nil
}

func (p *parser) concat() (*node, error) {
	n := &node{kind: kindConcat}
	for {
		p.space()
		if p.eof() {
			return n, nil
		}
		var (
			sub *node
			err error
		)
		switch r := p.char(); r {
		case '|', ')':
			return n, nil
		case '*', '+', '?', '{':
			if err := p.repeat(n); err != nil {
				return nil, err
			}
			continue
		case '(':
			sub, err = p.group()
		case '[':
			sub, err = p.bracket()
		default:
			sub, err = p.primitive()
		}
		if err != nil {
			return nil, err
		}
		n.subs = append(n.subs, sub)
	}
}

// repeat applies the operator at the position to the last part of n.
func (p *parser) repeat(n *node) error {
	at := p.pos
	if len(n.subs) == 0 || n.subs[len(n.subs)-1].kind == kindFlags {
		return p.fail(at, "repetition operator %q has nothing to repeat: write \\%c for the character", p.char(), p.char())
	}
	rep := &node{kind: kindRepeat, max: unbounded, greedy: true}
	switch p.bump() {
	case '+':
		rep.min = 1
	case '?':
		rep.max = 1
	case '{':
		if err := p.counts(rep, at); err != nil {
			return err
		}
	}
	if !p.eof() && p.char() == '?' {
		p.bump()
		rep.greedy = false
	}
	if p.flags.swap {
		rep.greedy = !rep.greedy
	}
	last := &n.subs[len(n.subs)-1]
	if rep.depth = (*last).depth + 1; rep.depth > maxNesting {
		return p.fail(at, "the pattern nests deeper than %d", maxNesting)
	}
	rep.subs = []*node{*last}
	*last = rep
	return nil
}

// counts reads "n}", "n,}" or "n,m}".
func (p *parser) counts(rep *node, at int) error {
	end := strings.IndexByte(p.src[p.pos:], '}')
	if end < 0 {
		return p.fail(at, "unclosed counted repetition: write \\{ for the character")
	}
	low, high, ranged := strings.Cut(p.src[p.pos:p.pos+end], ",")
	p.pos += end + 1
	low, high = strings.TrimSpace(low), strings.TrimSpace(high)
	var err error
	if rep.min, err = p.decimal(low, at); err != nil {
		return err
	}
	switch {
	case !ranged:
		rep.max = rep.min
	case high != "":
		if rep.max, err = p.decimal(high, at); err != nil {
			return err
		}
		if rep.max < rep.min {
			return p.fail(at, "counted repetition {%d,%d} ends before it begins", rep.min, rep.max)
		}
	}
	return nil
}

func (p *parser) decimal(s string, at int) (int, error) {
	n := 0
	for _, r := range s {
		if r < '0' || r > '9' {
			return 0, p.fail(at, "counted repetition: %q is not a number; write \\{ for the character", s)
		}
		// More than this is refused as too large whatever is repeated.
		n = min(n*10+int(r-'0'), 10*maxInstructions)
	}
	if s == "" {
		return 0, p.fail(at, "counted repetition without a number: write \\{ for the character")
	}
	return n, nil
}

func (p *parser) group() (*node, error) {
	at := p.pos
	p.bump()
	p.space()
	for _, look := range []string{"?=", "?!", "?<=", "?<!"} {
		if strings.HasPrefix(p.src[p.pos:], look) {
			return nil, p.fail(at, "look-around (%s) is not supported", look)
		}
	}
	outer := p.flags
	n := &node{kind: kindGroup}
	switch {
	case p.accept("?P<"), p.accept("?<"):
		p.groups++
		n.kind, n.capture = kindCapture, p.groups
		if err := p.groupName(); err != nil {
			return nil, err
		}
	case p.accept("?"):
		set, err := p.inlineFlags(at)
		if set || err != nil {
			return &node{kind: kindFlags}, err
		}
	default:
		p.groups++
		n.kind, n.capture = kindCapture, p.groups
	}
	if p.depth++; p.depth > maxNesting {
		return nil, p.fail(at, "the pattern nests deeper than %d", maxNesting)
	}
	sub, err := p.alternation()
	if err != nil {
		return nil, err
	}
	p.depth--
	if p.eof() {
		return nil, p.fail(at, "unclosed group")
	}
	p.bump()
	p.flags = outer
	n.subs = []*node{sub}
	return n, nil
}

func (p *parser) groupName() error {
	start := p.pos
	for !p.eof() && p.char() != '>' {
		r := p.bump()
		first := p.pos-utf8.RuneLen(r) == start
		if r != '_' && !unicode.IsLetter(r) && (first || !unicode.IsNumber(r) && r != '.' && r != '[' && r != ']') {
			return p.fail(start, "invalid character %q in a group name", r)
		}
	}
	name := p.src[start:p.pos]
	switch _, taken := p.names[name]; {
	case p.eof():
		return p.fail(start, "unclosed group name")
	case name == "":
		return p.fail(start, "empty group name")
	case taken:
		return p.fail(start, "duplicate group name %q", name)
	}
	p.bump()
	p.names[name] = p.groups
	return nil
}

// inlineFlags reads what follows "(?". It reports true for "(?flags)", which
// holds until the surrounding group ends, and false for "(?flags:".
func (p *parser) inlineFlags(at int) (bool, error) {
	f := p.flags
	on, seen, dangling := true, map[rune]bool{}, false
	for start := p.pos; !p.eof(); {
		r := p.bump()
		switch {
		case (r == ')' || r == ':') && dangling:
			return false, p.fail(at, "flag negation '-' without a flag")
		case r == ')' && p.pos == start+1:
			return false, p.fail(at, "empty flags (?)")
		case r == ')' || r == ':':
			p.flags = f
			return r == ')', nil
		case r == '-' && !on:
			return false, p.fail(at, "more than one '-' in flags")
		case r == '-':
			on, dangling = false, true
			continue
		case seen[r]:
			return false, p.fail(at, "duplicate flag %q", r)
		case !f.set(r, on):
			return false, p.fail(at, "unknown flag %q", r)
		}
		seen[r], dangling = true, false
	}
	return false, p.fail(at, "unclosed group")
}

func (f *flags) set(r rune, on bool) bool {
	switch r {
	case 'i':
		f.fold = on
	case 'm':
		f.multi = on
	case 's':
		f.dotAll = on
	case 'U':
		f.swap = on
	case 'u':
		f.bytes = !on
	case 'x':
		f.verbose = on
	case 'R':
		f.carriage = on
	default:
		return false
	}
	return true
}

// primitive reads one character, dot, anchor or escape.
func (p *parser) primitive() (*node, error) {
	at := p.pos
	switch r := p.bump(); r {
	case '\\':
		return p.escape(at)
	case '.':
		return p.dot(at)
	case '^':
		return p.anchor(at, `\A`, `(?m:^)`)
	case '$':
		return p.anchor(at, `\z`, `(?m:$)`)
	default:
		return p.literal(r), nil
	}
}

func (p *parser) dot(at int) (*node, error) {
	if p.flags.bytes {
		return nil, p.fail(at, "'.' without Unicode (?-u) could match half a character")
	}
	switch {
	case p.flags.dotAll:
		return leaf(`(?s:.)`), nil
	case p.flags.carriage:
		return leaf(`[^\r\n]`), nil
	}
	return leaf(`[^\n]`), nil
}

func (p *parser) anchor(at int, text, line string) (*node, error) {
	switch {
	case p.flags.multi && p.flags.carriage:
		return nil, p.fail(at, "line anchors in CRLF mode (?mR) are not supported")
	case p.flags.multi:
		return leaf(line), nil
	}
	return leaf(text), nil
}

// literal is the node of one character, in every case when folding.
func (p *parser) literal(r rune) *node {
	if p.flags.fold {
		s := p.fold(set{{r, r}})
		if s.size() > 1 {
			return leaf(s.text())
		}
	}
	return leaf(quote(r))
}
