package strictjson

import (
	"bytes"
	"encoding/json"
	"iter"
	"unicode/utf8"
)

// blanks may stand between the parts of a document.
const blanks = " \t\r\n"

// elements gives the elements of an array, members those of an object with their
// keys, in their order. The document is known to be JSON; what they give are parts
// of it.
func elements(array json.RawMessage) iter.Seq[json.RawMessage] {
	return func(yield func(json.RawMessage) bool) {
		rest := inside(array)
		for len(rest) > 0 {
			var element []byte
			element, rest = value(rest)
			if !yield(element) {
				return
			}
			rest = after(rest, ',')
		}
	}
}

func members(object json.RawMessage) iter.Seq2[string, json.RawMessage] {
	return func(yield func(string, json.RawMessage) bool) {
		rest := inside(object)
		for len(rest) > 0 {
			var key, member []byte
			key, rest = value(rest)
			member, rest = value(after(rest, ':'))
			if !yield(unquote(key), member) {
				return
			}
			rest = after(rest, ',')
		}
	}
}

// inside is what is between the brackets of an array or object.
func inside(raw []byte) []byte {
	raw = bytes.Trim(raw, blanks)
	return bytes.Trim(raw[1:len(raw)-1], blanks)
}

// after is what comes after blanks, a separator where there is one, and blanks.
func after(rest []byte, separator byte) []byte {
	rest = bytes.TrimLeft(rest, blanks)
	if len(rest) > 0 && rest[0] == separator {
		rest = rest[1:]
	}
	return bytes.TrimLeft(rest, blanks)
}

// value cuts off the value that raw begins with.
func value(raw []byte) (value, rest []byte) {
	end := 0
	switch raw[0] {
	case '"':
		end = stringEnd(raw)
	case '{', '[':
		for depth := 1; depth > 0; {
			end++
			switch raw[end] {
			case '"':
				end += stringEnd(raw[end:]) - 1
			case '{', '[':
				depth++
			case '}', ']':
				depth--
			}
		}
		end++
	default:
		if end = bytes.IndexAny(raw, blanks+",]}"); end < 0 {
			end = len(raw)
		}
	}
	return raw[:end], raw[end:]
}

// stringEnd is the length of the string that raw begins with, quotes included.
func stringEnd(raw []byte) int {
	for i := 1; ; i++ {
		switch raw[i] {
		case '\\':
			i++
		case '"':
			return i + 1
		}
	}
}

// unquote is what a string says, with U+FFFD where it is not Unicode.
func unquote(raw []byte) string {
	raw = bytes.Trim(raw, blanks)
	if bytes.IndexByte(raw, '\\') < 0 && utf8.Valid(raw) {
		return string(raw[1 : len(raw)-1])
	}
	var text string
	_ = json.Unmarshal(raw, &text) // a string, as is known
	return text
}
