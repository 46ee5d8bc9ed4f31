package sandbox

import (
	"encoding/base64"
	"errors"
	"maps"
	"slices"
	"strings"
	"unicode"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
)

// commandLine makes the program and its arguments of the contract's three shapes
// (contract: exec).
func commandLine(cmd string, args, argv []string) ([]string, error) {
	switch {
	case len(argv) > 0:
		if cmd != "" || len(args) > 0 {
			return nil, fault.InvalidRequest("argv together with cmd or args is ambiguous: put everything into argv")
		}
	case strings.ContainsFunc(cmd, unicode.IsSpace):
		if len(args) > 0 {
			return nil, fault.AmbiguousCommand(cmd, args)
		}
		var ok bool
		if argv, ok = splitWords(cmd); !ok {
			return nil, fault.UnbalancedQuotes(cmd)
		}
	default:
		argv = append([]string{cmd}, args...)
	}
	if len(argv) == 0 || argv[0] == "" {
		return nil, fault.InvalidRequest("the command is empty: pass cmd, for example \"node -v\", or argv")
	}
	return argv, nil
}

// splitWords splits a line as a POSIX shell would, without expanding anything:
// single and double quotes, backslashes, and comments from a '#' that begins a
// word to the end of the line. Words are separated by space, tab and newline
// alone. It reports false for an open quote and a backslash at the end.
func splitWords(line string) (words []string, ok bool) {
	s := splitter{rest: line}
	for {
		s.rest = strings.TrimLeft(s.rest, " \t\n")
		if s.rest == "" {
			return words, true
		}
		if s.rest[0] == '#' {
			_, s.rest, _ = strings.Cut(s.rest, "\n")
			continue
		}
		word, ok := s.word()
		if !ok {
			return nil, false
		}
		words = append(words, word)
	}
}

type splitter struct{ rest string }

// word takes one word, up to a separator or the end.
func (s *splitter) word() (string, bool) {
	var word strings.Builder
	for s.rest != "" {
		c := s.rest[0]
		if strings.IndexByte(" \t\n", c) >= 0 {
			break
		}
		s.rest = s.rest[1:]
		ok := true
		switch c {
		case '\'':
			var text string
			text, s.rest, ok = strings.Cut(s.rest, "'")
			word.WriteString(text)
		case '"':
			ok = s.quoted(&word)
		case '\\':
			ok = s.escaped(&word)
		default:
			word.WriteByte(c)
		}
		if !ok {
			return "", false
		}
	}
	return word.String(), true
}

// escaped takes what follows a backslash outside quotes: a newline vanishes with
// it.
func (s *splitter) escaped(word *strings.Builder) bool {
	if s.rest == "" {
		return false
	}
	if s.rest[0] != '\n' {
		word.WriteByte(s.rest[0])
	}
	s.rest = s.rest[1:]
	return true
}

// quoted takes the rest of a double-quoted part, in which a backslash is one
// unless it stands before $, `, ", \ or a newline.
func (s *splitter) quoted(word *strings.Builder) bool {
	for s.rest != "" {
		c := s.rest[0]
		s.rest = s.rest[1:]
		switch {
		case c == '"':
			return true
		case c != '\\':
			word.WriteByte(c)
		case s.rest == "":
			return false
		case strings.IndexByte("$`\"\\\n", s.rest[0]) >= 0:
			s.escaped(word)
		default:
			word.WriteByte('\\')
		}
	}
	return false
}

// entries are the environment as KEY=value, of a map sorted by key.
func (e Env) entries() ([]string, error) {
	var out, bad []string
	for _, kv := range e.List {
		if strings.IndexByte(kv, '=') > 0 {
			out = append(out, kv)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(e.Map)) {
		if !isVariable(key) {
			bad = append(bad, key)
		}
		out = append(out, key+"="+e.Map[key])
	}
	if len(bad) > 0 {
		return nil, fault.BadEnvKeys(bad)
	}
	return out, nil
}

// isVariable reports whether key matches [A-Za-z_][A-Za-z0-9_]*.
func isVariable(key string) bool {
	for i, c := range []byte(key) {
		letter := c == '_' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
		if !letter && (i == 0 || c < '0' || c > '9') {
			return false
		}
	}
	return key != ""
}

var errLineBreak = errors.New("it has a line break")

// decodeBase64 takes the standard alphabet with its padding and nothing else;
// encoding/base64 alone would pass over line breaks.
func decodeBase64(text string) ([]byte, error) {
	if strings.ContainsAny(text, "\r\n") {
		return nil, errLineBreak
	}
	return base64.StdEncoding.Strict().DecodeString(text)
}
