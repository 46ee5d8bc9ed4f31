package rexp

import (
	"fmt"
	"regexp"
	"strings"
)

// Globs is an ordered list of gitignore patterns. As in git the last one that
// matches a path decides, one beginning with '!' takes a path out again, and
// what lies in a matched directory matches whatever later patterns say.
//
// Everything is bytes: '?' and '[…]' match one byte, also of a longer character,
// and case counts. A Globs may be used concurrently.
type Globs struct {
	rules []rule
}

// rule is one pattern.
type rule struct {
	re *regexp.Regexp
	// negated: '!'. dirOnly: a trailing '/'. base: it is matched against the
	// last element of a path, not against the whole.
	negated, dirOnly, base bool
}

// maxGlob is the longest pattern in bytes; a longer one can match no path.
const maxGlob = 4096

// ParseGlobs parses the patterns. Empty ones and comments ('#') stand for
// nothing; a pattern that git takes for broken (an unclosed '[', a trailing
// backslash) matches nothing. An error is a pattern of more than 4096 bytes.
func ParseGlobs(patterns []string) (*Globs, error) {
	g := &Globs{}
	for _, pattern := range patterns {
		if len(pattern) > maxGlob {
			return nil, fmt.Errorf("a glob of %d bytes is longer than %d", len(pattern), maxGlob)
		}
		if r, ok := parseRule(pattern); ok {
			g.rules = append(g.rules, r)
		}
	}
	return g, nil
}

// Empty reports whether there is no pattern, so that nothing ever matches.
func (g *Globs) Empty() bool { return len(g.rules) == 0 }

// Match reports whether the patterns select path, which is relative to the root
// that they are relative to, without "./" and double or trailing slashes. It is
// for a caller who has found that no directory above path is selected.
func (g *Globs) Match(path string, isDir bool) bool {
	whole := latin1(path)
	base := whole[strings.LastIndexByte(whole, '/')+1:]
	for i := len(g.rules) - 1; i >= 0; i-- {
		r := &g.rules[i]
		if r.dirOnly && !isDir {
			continue
		}
		text := whole
		if r.base {
			text = base
		}
		if r.re.MatchString(text) {
			return !r.negated
		}
	}
	return false
}

// latin1 makes a character of every byte, so that a regular expression sees
// bytes.
func latin1(s string) string {
	for i := range len(s) {
		if s[i] >= 0x80 {
			runes := make([]rune, len(s))
			for j := range len(s) {
				runes[j] = rune(s[j])
			}
			return string(runes)
		}
	}
	return s
}

func parseRule(pattern string) (rule, bool) {
	if strings.HasPrefix(pattern, "#") {
		return rule{}, false
	}
	var r rule
	pattern = trimSpaces(pattern)
	pattern, r.negated = strings.CutPrefix(pattern, "!")
	pattern, r.dirOnly = strings.CutSuffix(pattern, "/")
	if pattern == "" {
		return rule{}, false
	}
	r.base = !strings.Contains(pattern, "/")
	pattern = strings.TrimPrefix(pattern, "/")
	text, ok := translate(pattern, r.base)
	if !ok {
		return rule{}, false
	}
	re, err := regexp.Compile(text)
	if err != nil {
		return rule{}, false
	}
	r.re = re
	return r, true
}

// trimSpaces cuts trailing spaces but one after a backslash.
func trimSpaces(s string) string {
	keep := 0
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+1 < len(s) {
			i++
			keep = i + 1
			continue
		}
		if s[i] != ' ' {
			keep = i + 1
		}
	}
	return s[:keep]
}

// translate is the pattern as a regular expression over bytes-as-characters. In
// one matched against a base name "**" has no meaning of its own.
func translate(pattern string, base bool) (string, bool) {
	var b strings.Builder
	b.WriteString(`(?s)\A`)
	for i := 0; i < len(pattern); {
		rest := pattern[i:]
		switch c := rest[0]; {
		case !base && strings.HasPrefix(rest, "**"):
			i += stars(&b, pattern, i)
		case c == '*':
			b.WriteString(`[^/]*`)
			i++
		case c == '?':
			b.WriteString(`[^/]`)
			i++
		case c == '[':
			class, n := bracketClass(rest)
			if n == 0 {
				return "", false
			}
			b.WriteString(class)
			i += n
		case c == '\\':
			if len(rest) == 1 {
				return "", false
			}
			b.WriteString(regexp.QuoteMeta(string(rune(rest[1]))))
			i += 2
		default:
			b.WriteString(regexp.QuoteMeta(string(rune(c))))
			i++
		}
	}
	b.WriteString(`\z`)
	return b.String(), true
}

// stars writes the stars at pattern[i:], of which there are two or more, and
// returns how much of the pattern they are. Between slashes or ends, exactly two
// stand for any number of directories; otherwise they are like one.
func stars(b *strings.Builder, pattern string, i int) int {
	n := 0
	for i+n < len(pattern) && pattern[i+n] == '*' {
		n++
	}
	begins := i == 0 || pattern[i-1] == '/'
	rest := pattern[i+n:]
	switch {
	case !begins || rest != "" && rest[0] != '/':
		b.WriteString(`[^/]*`)
	case rest == "":
		b.WriteString(`.*`)
	default:
		b.WriteString(`(?:.*/)?`)
		n++
	}
	return n
}

// bracketClass translates a class and returns its length in the pattern, 0 when
// it is broken. A class never matches '/'.
func bracketClass(s string) (string, int) {
	i, negated := 1, false
	if i < len(s) && (s[i] == '!' || s[i] == '^') {
		negated = true
		i++
	}
	var members set
	for first := true; ; first = false {
		if i >= len(s) {
			return "", 0
		}
		if s[i] == ']' && !first {
			i++
			break
		}
		if name, ok := strings.CutPrefix(s[i:], "[:"); ok {
			if end := strings.Index(name, ":]"); end >= 0 {
				class, known := posix(name[:end])
				if !known {
					return "", 0
				}
				members = append(members, class...)
				i += len("[:") + end + len(":]")
				continue
			}
		}
		low, n := bracketByte(s[i:])
		if n == 0 {
			return "", 0
		}
		i += n
		high := low
		if i+1 < len(s) && s[i] == '-' && s[i+1] != ']' {
			if high, n = bracketByte(s[i+1:]); n == 0 {
				return "", 0
			}
			i += 1 + n
		}
		// As in git the first byte of a range counts also where it is the higher.
		members = append(members, span{rune(low), max(rune(low), rune(high))})
	}
	result := members.normal()
	if negated {
		result = result.negate()
	}
	return result.intersect(set{{'/', '/'}}.negate()).text(), i
}

func bracketByte(s string) (byte, int) {
	switch {
	case s == "":
		return 0, 0
	case s[0] != '\\':
		return s[0], 1
	case len(s) == 1:
		return 0, 0
	}
	return s[1], 2
}
