package rexp

import (
	"io"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Template is a parsed replacement. It may be used concurrently.
type Template struct {
	parts []part
}

// part is a text, or a group by number when group is not negative.
type part struct {
	text  string
	group int
}

// LiteralTemplate replaces by text as it stands.
func LiteralTemplate(text string) *Template {
	return &Template{parts: []part{{text: text, group: -1}}}
}

// Template parses a replacement for r in Rust's syntax: $N, $name, ${N}, ${name}
// and $$. A name without braces is the longest run of [0-9A-Za-z_]. A group that
// does not exist or did not match is empty; a '$' that begins none of these is
// itself. There is no wrong template.
func (r *Regexp) Template(replacement string) *Template {
	t := &Template{}
	for replacement != "" {
		i := strings.IndexByte(replacement, '$')
		if i < 0 {
			break
		}
		t.text(replacement[:i])
		replacement = replacement[i:]
		name, size := reference(replacement)
		switch {
		case strings.HasPrefix(replacement, "$$"):
			t.text("$")
			size = 2
		case size == 0:
			t.text("$")
			size = 1
		default:
			if group, ok := r.group(name); ok {
				t.parts = append(t.parts, part{group: group})
			}
		}
		replacement = replacement[size:]
	}
	t.text(replacement)
	return t
}

func (t *Template) text(s string) {
	switch n := len(t.parts); {
	case s == "":
	case n > 0 && t.parts[n-1].group < 0:
		t.parts[n-1].text += s
	default:
		t.parts = append(t.parts, part{text: s, group: -1})
	}
}

// reference is the name in s, which begins with '$', and the length of the whole
// reference; 0 where there is none.
func reference(s string) (string, int) {
	if strings.HasPrefix(s, "${") {
		name, _, closed := strings.Cut(s[2:], "}")
		if !closed {
			return "", 0
		}
		return name, len("${}") + len(name)
	}
	end := 1
	for end < len(s) && (s[end] == '_' || isASCIIAlnum(rune(s[end]))) {
		end++
	}
	if end == 1 {
		return "", 0
	}
	return s[1:end], end
}

func (r *Regexp) group(name string) (int, bool) {
	digits := strings.TrimPrefix(name, "+")
	if n, err := strconv.ParseUint(digits, 10, 63); err == nil && !strings.HasPrefix(digits, "+") {
		return int(n), n <= uint64(r.Groups())
	}
	n, ok := r.names[name]
	return n, ok
}

// batchBytes is about how much memory the positions of matches may take at a
// time.
const batchBytes = 4 << 20

// Replace writes text, which is valid UTF-8, to w with its matches replaced: all
// of them, or the first alone. It returns how many there were, and w's error.
// Memory does not grow with the number of matches.
func (r *Regexp) Replace(w io.Writer, text []byte, t *Template, firstOnly bool) (int, error) {
	p := replacing{w: w, text: text, template: t}
	limit := batchBytes / (24 + 16*(r.Groups()+1))
	if firstOnly {
		limit = 1
	}
	if r.needsMachine(text) {
		p.scan(r, firstOnly)
		return p.end()
	}
	matches := r.std.FindAllSubmatchIndex(text, limit)
	for _, match := range matches {
		p.match(match)
	}
	if len(matches) == limit && !firstOnly {
		last := matches[limit-1]
		p.pos, p.prevEnd = last[1], last[1]
		if last[0] == last[1] {
			p.advance()
		}
		p.scan(r, false)
	}
	return p.end()
}

// replacing is one Replace.
type replacing struct {
	w        io.Writer
	text     []byte
	template *Template
	// written is how much of text is done, pos where to search next, prevEnd
	// where the last match ended.
	written, pos, prevEnd int
	count                 int
	err                   error
}

// scan finds the matches from p.pos on, one by one. An empty match right after
// another match is none.
func (p *replacing) scan(r *Regexp, firstOnly bool) {
	m := newMachine(r, 2*(r.Groups()+1))
	if p.pos == 0 {
		p.prevEnd = -1
	}
	for p.pos <= len(p.text) && p.err == nil {
		prev := endOfText
		if p.pos > 0 {
			prev, _ = utf8.DecodeLastRune(p.text[:p.pos])
		}
		if !m.run(&byteInput{text: p.text, pos: p.pos}, p.pos, prev) {
			return
		}
		begin, end := m.caps[0], m.caps[1]
		accept := begin != end || begin != p.prevEnd
		if end == p.pos {
			p.advance()
		} else {
			p.pos = end
		}
		p.prevEnd = end
		if accept {
			p.match(m.caps)
			if firstOnly {
				return
			}
		}
	}
}

// advance moves pos over one character, or past the end.
func (p *replacing) advance() {
	_, n := utf8.DecodeRune(p.text[p.pos:])
	p.pos += max(n, 1)
}

// match writes what is before the match, and its replacement.
func (p *replacing) match(at []int) {
	p.count++
	p.write(p.text[p.written:at[0]])
	p.written = at[1]
	for _, part := range p.template.parts {
		switch {
		case part.group < 0:
			if p.err == nil {
				_, p.err = io.WriteString(p.w, part.text)
			}
		case at[2*part.group] >= 0:
			p.write(p.text[at[2*part.group]:at[2*part.group+1]])
		}
	}
}

func (p *replacing) end() (int, error) {
	p.write(p.text[p.written:])
	return p.count, p.err
}

func (p *replacing) write(b []byte) {
	if p.err == nil && len(b) > 0 {
		_, p.err = p.w.Write(b)
	}
}
