package rexp

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// wordText is the inside of a class that equals Rust's \w: Alphabetic, Mark,
// decimal digits, connectors and the two joiners. What Alphabetic adds to the
// general categories are circled and squared letters.
const wordText = `\p{L}\p{M}\p{Nd}\p{Nl}\p{Pc}\x{200C}\x{200D}\x{24B6}-\x{24E9}\x{1F130}-\x{1F149}\x{1F150}-\x{1F169}\x{1F170}-\x{1F189}`

func digits() set { return tables(unicode.Nd) }

func spaces() set { return tables(unicode.White_Space) }

func words() set {
	return tables(unicode.L, unicode.M, unicode.Nd, unicode.Nl, unicode.Pc, unicode.Other_Alphabetic, unicode.Join_Control)
}

// isWord reports whether r is in words().
func isWord(r rune) bool {
	if r < utf8.RuneSelf {
		return isASCIIWord(r)
	}
	return unicode.In(r, unicode.L, unicode.M, unicode.Nd, unicode.Nl, unicode.Pc, unicode.Other_Alphabetic, unicode.Join_Control)
}

func isASCIIWord(r rune) bool { return r == '_' || isASCIIAlnum(r) }

// tables is the union of the tables.
func tables(ts ...*unicode.RangeTable) set {
	var s set
	add := func(lo, hi, stride rune) {
		if stride == 1 {
			s = append(s, span{lo, hi})
			return
		}
		for r := lo; r <= hi; r += stride {
			s = append(s, span{r, r})
		}
	}
	for _, t := range ts {
		for _, r := range t.R16 {
			add(rune(r.Lo), rune(r.Hi), rune(r.Stride))
		}
		for _, r := range t.R32 {
			add(rune(r.Lo), rune(r.Hi), rune(r.Stride))
		}
	}
	return s.normal()
}

// posix is the ASCII class of that name.
func posix(name string) (set, bool) {
	s, ok := map[string]set{
		"alnum":  {{'0', '9'}, {'A', 'Z'}, {'a', 'z'}},
		"alpha":  {{'A', 'Z'}, {'a', 'z'}},
		"ascii":  {{0, 0x7F}},
		"blank":  {{'\t', '\t'}, {' ', ' '}},
		"cntrl":  {{0, 0x1F}, {0x7F, 0x7F}},
		"digit":  {{'0', '9'}},
		"graph":  {{'!', '~'}},
		"lower":  {{'a', 'z'}},
		"print":  {{' ', '~'}},
		"punct":  {{'!', '/'}, {':', '@'}, {'[', '`'}, {'{', '~'}},
		"space":  {{'\t', '\r'}, {' ', ' '}},
		"upper":  {{'A', 'Z'}},
		"word":   {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}},
		"xdigit": {{'0', '9'}, {'A', 'F'}, {'a', 'f'}},
	}[name]
	return s, ok
}

// property reads what follows \p or \P: one letter, {name}, {name=value},
// {name:value} or {name!=value}.
func (p *parser) property(at int, negated bool) (*charClass, error) {
	if p.flags.bytes {
		return nil, p.fail(at, "\\p without Unicode (?-u) is not allowed")
	}
	if p.eof() {
		return nil, p.fail(at, "incomplete property \\p")
	}
	var body string
	if r := p.bump(); r == '{' {
		end := strings.IndexByte(p.src[p.pos:], '}')
		if end < 0 {
			return nil, p.fail(at, "unclosed property \\p{")
		}
		body = p.src[p.pos : p.pos+end]
		p.pos += end + 1
	} else {
		body = string(r)
	}
	key, value := "", body
	if i := strings.IndexAny(body, "=:"); i >= 0 {
		key, value = body[:i], body[i+1:]
		if k, ok := strings.CutSuffix(key, "!"); ok && body[i] == '=' {
			key, negated = k, !negated
		}
		if key == "" {
			return nil, p.fail(at, "unknown Unicode property %q", body)
		}
	}
	s, ok := lookUp(loose(key), loose(value))
	if !ok {
		return nil, p.fail(at, "unknown or unsupported Unicode property %q", body)
	}
	if p.flags.fold {
		s = p.fold(s)
	}
	if negated {
		s = s.negate()
	}
	return &charClass{set: s}, p.charge(at, s)
}

// loose is a property's name without what Unicode says does not matter in one.
func loose(name string) string {
	name = strings.ToLower(strings.NewReplacer(" ", "", "_", "", "-", "").Replace(name))
	if cut, ok := strings.CutPrefix(name, "is"); ok && cut != "" && cut != "c" {
		return cut
	}
	return name
}

func lookUp(key, value string) (set, bool) {
	switch key {
	case "gc", "generalcategory":
		return category(value)
	case "sc", "script":
		return script(value)
	case "":
		if s, ok := derived(value); ok {
			return s, true
		}
		if s, ok := category(value); ok {
			return s, true
		}
		if s, ok := script(value); ok {
			return s, true
		}
		return find(unicode.Properties, value)
	}
	return nil, false
}

func derived(name string) (set, bool) {
	switch name {
	case "any":
		return set{{0, unicode.MaxRune}}, true
	case "ascii":
		return set{{0, unicode.MaxASCII}}, true
	case "assigned":
		return unassigned().negate(), true
	case "alphabetic", "alpha":
		return tables(unicode.L, unicode.Nl, unicode.Other_Alphabetic), true
	case "lowercase", "lower":
		return tables(unicode.Ll, unicode.Other_Lowercase), true
	case "uppercase", "upper":
		return tables(unicode.Lu, unicode.Other_Uppercase), true
	case "whitespace", "space", "wspace":
		return spaces(), true
	}
	return nil, false
}

func unassigned() set {
	return tables(unicode.C, unicode.L, unicode.M, unicode.N, unicode.P, unicode.S, unicode.Z).negate()
}

func category(name string) (set, bool) {
	switch name {
	case "any", "ascii", "assigned":
		return derived(name)
	case "cn", "unassigned":
		return unassigned(), true
	case "c", "other":
		return append(tables(unicode.C), unassigned()...).normal(), true
	case "lc", "casedletter":
		return tables(unicode.Lu, unicode.Ll, unicode.Lt), true
	}
	for alias, short := range unicode.CategoryAliases {
		if loose(alias) == name {
			name = loose(short)
			break
		}
	}
	return find(unicode.Categories, name)
}

func script(name string) (set, bool) { return find(unicode.Scripts, name) }

func find(from map[string]*unicode.RangeTable, name string) (set, bool) {
	for full, table := range from {
		if loose(full) == name {
			return tables(table), true
		}
	}
	return nil, false
}
