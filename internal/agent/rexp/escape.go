package rexp

import (
	"strconv"
	"strings"
	"unicode/utf8"
)

// escape reads what follows a backslash outside of a class.
func (p *parser) escape(at int) (*node, error) {
	if p.eof() {
		return nil, p.fail(at, "the pattern ends with a backslash")
	}
	switch r := p.char(); r {
	case 'A':
		p.bump()
		return leaf(`\A`), nil
	case 'z':
		p.bump()
		return leaf(`\z`), nil
	case 'b', 'B':
		p.bump()
		return p.boundary(at, r)
	case '<', '>':
		return nil, p.fail(at, "\\%c is not supported: use \\b", r)
	}
	class, r, err := p.escapeClass(at)
	switch {
	case err != nil:
		return nil, err
	case class != nil:
		return class.leaf(), nil
	}
	return p.literal(r), nil
}

func (p *parser) boundary(at int, r rune) (*node, error) {
	if r == 'b' && strings.HasPrefix(p.src[p.pos:], "{") {
		for _, name := range []string{"{start}", "{end}", "{start-half}", "{end-half}"} {
			if strings.HasPrefix(p.src[p.pos:], name) {
				return nil, p.fail(at, "\\b%s is not supported: use \\b", name)
			}
		}
	}
	if p.flags.bytes {
		p.asciiBoundary = true
	} else {
		p.unicodeBoundary = true
	}
	return leaf(`\` + string(r)), nil
}

// escapeClass reads an escape that may also stand in a class: either a class or
// one character. The position is after the backslash.
func (p *parser) escapeClass(at int) (*charClass, rune, error) {
	if p.eof() {
		return nil, 0, p.fail(at, "the pattern ends with a backslash")
	}
	r := p.bump()
	switch r {
	case 'd', 'D', 's', 'S', 'w', 'W':
		class, err := p.perlClass(at, r)
		return class, 0, err
	case 'p', 'P':
		class, err := p.property(at, r == 'P')
		return class, 0, err
	case 'x', 'u', 'U':
		c, err := p.hex(at, r)
		return nil, c, err
	}
	if i := strings.IndexRune("afntrv", r); i >= 0 {
		return nil, rune("\a\f\n\t\r\v"[i]), nil
	}
	switch {
	case r >= '0' && r <= '9':
		return nil, 0, p.fail(at, "back-references and octal escapes (\\%c) are not supported", r)
	case r < utf8.RuneSelf && r != '<' && r != '>' && !isASCIIAlnum(r):
		return nil, r, nil
	}
	return nil, 0, p.fail(at, "unknown escape \\%c", r)
}

func isASCIIAlnum(r rune) bool {
	return r >= '0' && r <= '9' || r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z'
}

// hex reads \x41, \x{41}, \u0041, \u{41}, \U00000041 or \U{41}.
func (p *parser) hex(at int, kind rune) (rune, error) {
	var digits string
	if p.accept("{") {
		end := strings.IndexByte(p.src[p.pos:], '}')
		if end < 0 {
			return 0, p.fail(at, "unclosed hexadecimal escape")
		}
		digits = p.src[p.pos : p.pos+end]
		p.pos += end + 1
	} else {
		n := map[rune]int{'x': 2, 'u': 4, 'U': 8}[kind]
		if p.pos+n > len(p.src) {
			return 0, p.fail(at, "incomplete hexadecimal escape: \\%c takes %d digits", kind, n)
		}
		digits = p.src[p.pos : p.pos+n]
		p.pos += n
	}
	v, err := strconv.ParseUint(digits, 16, 32)
	if err != nil || strings.ContainsAny(digits, "_+") || !utf8.ValidRune(rune(min(v, utf8.MaxRune+1))) {
		return 0, p.fail(at, "%q is not the hexadecimal number of a character", digits)
	}
	if p.flags.bytes && v > 0x7F && kind == 'x' {
		return 0, p.fail(at, "a byte above 7F without Unicode (?-u) is no character")
	}
	return rune(v), nil
}
