// Package rexp matches what grep and sed are given: regular expressions in the
// syntax of Rust's regex crate (1.12), replacement templates in its syntax, and
// globs as gitignore has them.
//
// A pattern is parsed here and rewritten for Go's regexp, whose matching
// semantics (leftmost-first, linear time) are the same. Unicode classes, set
// operations, verbose mode, stacked and large repetitions, flags and names are
// translated exactly. Word boundaries are Unicode as in Rust: where a text is not
// plain ASCII and the pattern has one, an automaton of our own runs instead.
//
// Not translated, and refused with an explanation:
//   - \b{start}, \b{end}, their -half forms, \< and \>;
//   - multi-line anchors in CRLF mode, (?mR)^ and (?mR)$;
//   - Unicode and ASCII word boundaries in one pattern, \b(?-u:\b);
//   - properties without a table in Go: Script_Extensions, Age, Emoji and other
//     derived ones but Alphabetic, Lowercase and Uppercase; scripts by their
//     four-letter names.
//
// Two differences remain. A capture group inside a repetition above 1000 holds
// what the last round matched, and nothing if that round skipped it. Code points
// assigned after the Unicode version of Go's tables are unassigned.
package rexp

import (
	"fmt"
	"io"
	"regexp"
	"regexp/syntax"
)

// Limits of a pattern: what may be built from it, in automaton instructions, in
// bytes of rewritten text and in ranges of its classes (\w has 760), and how deep
// it may nest. They bound the memory to some 20 MiB for the time of compiling and
// to less afterwards. Rust refuses patterns of about the same size, and nesting
// beyond the same depth.
const (
	maxInstructions = 100_000
	maxRewritten    = 2 << 20
	maxRanges       = 300_000
	maxNesting      = 250
)

// Options change how a pattern is read.
type Options struct {
	// Literal takes the pattern as text to find, without any special character.
	Literal bool
	// IgnoreCase matches letters regardless of case (simple Unicode folding).
	IgnoreCase bool
	// Ended, where set, is asked now and then while a large pattern meets a long
	// text, which may take minutes; once it returns true the rest has no match.
	Ended func() bool
}

// longWork is from how much work on, in instructions times bytes, a match asks
// Ended: some seconds of an emulated CPU.
const longWork = 1 << 26

// Regexp is a compiled pattern. It may be used concurrently.
type Regexp struct {
	std   *regexp.Regexp
	prog  *syntax.Prog
	names map[string]int
	// unicodeBoundary: std's word boundary, which is ASCII, is the wrong one.
	unicodeBoundary bool
	ended           func() bool
}

// Error is a pattern that does not compile.
type Error struct {
	// Offset is where in the pattern, in bytes.
	Offset int
	// Reason says what is wrong there.
	Reason string
}

func (e *Error) Error() string { return fmt.Sprintf("at byte %d: %s", e.Offset, e.Reason) }

// Compile parses pattern. An error is an *Error. Memory and time are bounded for
// any pattern.
func Compile(pattern string, opts Options) (*Regexp, error) {
	p := parser{src: pattern, names: map[string]int{}}
	p.flags.fold = opts.IgnoreCase
	var (
		root *node
		err  error
	)
	if opts.Literal {
		root, err = p.literalText()
	} else {
		root, err = p.parse()
	}
	if err != nil {
		return nil, err
	}
	text, err := render(root)
	if err != nil {
		return nil, err
	}
	if p.unicodeBoundary && p.asciiBoundary {
		return nil, &Error{Reason: "Unicode and ASCII word boundaries in one pattern are not supported"}
	}
	r := &Regexp{names: p.names, unicodeBoundary: p.unicodeBoundary, ended: opts.Ended}
	if r.std, err = regexp.Compile(text); err != nil {
		return nil, &Error{Reason: err.Error()}
	}
	tree, err := syntax.Parse(text, syntax.Perl)
	if err != nil {
		return nil, &Error{Reason: err.Error()}
	}
	if r.prog, err = syntax.Compile(tree.Simplify()); err != nil {
		return nil, &Error{Reason: err.Error()}
	}
	return r, nil
}

// Match reports whether text, which is valid UTF-8, contains a match.
func (r *Regexp) Match(text []byte) bool {
	if r.needsMachine(text) {
		m := newMachine(r, 0)
		return m.run(&byteInput{text: text}, 0, endOfText)
	}
	return r.std.Match(text)
}

// MatchReader is Match for a text that is too long to hold. It reads no further
// than it has to and stops at the first error, which it takes for the end.
func (r *Regexp) MatchReader(text io.RuneReader) bool {
	if r.unicodeBoundary {
		m := newMachine(r, 0)
		return m.run(readerInput{text}, 0, endOfText)
	}
	return r.std.MatchReader(text)
}

// Groups is the number of capture groups, without the whole match.
func (r *Regexp) Groups() int { return r.std.NumSubexp() }

// needsMachine reports whether Go's own automaton is not for the text.
func (r *Regexp) needsMachine(text []byte) bool {
	return r.unicodeBoundary && !isASCII(text) || r.ended != nil && len(text) > longWork/len(r.prog.Inst)
}

func isASCII(text []byte) bool {
	for _, b := range text {
		if b >= 0x80 {
			return false
		}
	}
	return true
}
