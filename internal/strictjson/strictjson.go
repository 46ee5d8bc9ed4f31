// Package strictjson decodes JSON from outside into Go structs, without the
// leniency of encoding/json: names of fields are case-sensitive, a missing
// required field is an error, null is accepted by pointers alone, an integer is
// written as one and fits its type, and a string is valid Unicode. Errors name the
// field. Unknown fields are ignored; of a field given twice the last one counts.
//
// A struct's fields carry the tag `json:"name"`, and `required:"true"` where they
// must be there. Fields that are not given keep the value they had, which is how
// defaults are set.
package strictjson

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Error is a document that does not decode.
type Error struct {
	// Path is the field, as in "files[0].path"; empty for the document itself.
	Path string
	// Problem completes a sentence that begins with the field. It repeats nothing
	// of the document's strings.
	Problem string
}

func (e *Error) Error() string {
	if e.Path == "" {
		return e.Problem
	}
	return e.Path + ": " + e.Problem
}

// Decoder is a type that decodes itself. Errors should be of type *Error, with
// path in front.
type Decoder interface {
	DecodeStrict(raw json.RawMessage, path string) error
}

// Unmarshal decodes one document into v, a pointer to any of: bool, string,
// signed and unsigned integers, structs, slices, maps with string keys, pointers
// to these, and types that are Decoders. Errors are of type *Error unless a
// Decoder returned another. On error v is partly set.
//
// It takes hardly more memory than what it decodes: parts of the document are
// looked at where they are, and what v has no field for is passed over.
func Unmarshal(data []byte, v any) error {
	if !json.Valid(data) {
		var raw json.RawMessage
		return &Error{Problem: fmt.Sprintf("is not JSON: %v", json.Unmarshal(data, &raw))}
	}
	return Decode(data, "", v)
}

// Decode is Unmarshal for a part of a document that is known to be JSON; path is
// where it stands. For Decoders.
func Decode(raw json.RawMessage, path string, v any) error {
	return decode(raw, path, reflect.ValueOf(v).Elem())
}

// Kind is what raw holds: "null", "a boolean", "a number", "a string", "an array"
// or "an object".
func Kind(raw json.RawMessage) string {
	raw = bytes.TrimLeft(raw, " \t\r\n")
	if len(raw) == 0 {
		return "nothing"
	}
	switch raw[0] {
	case 'n':
		return "null"
	case 't', 'f':
		return "a boolean"
	case '"':
		return "a string"
	case '[':
		return "an array"
	case '{':
		return "an object"
	}
	return "a number"
}

// Expected is the error for a value of the wrong kind; want is as in "a string".
func Expected(want string, raw json.RawMessage, path string) error {
	return &Error{Path: path, Problem: fmt.Sprintf("must be %s, not %s", want, Kind(raw))}
}

func decode(raw json.RawMessage, path string, v reflect.Value) error {
	if d, ok := reflect.TypeAssert[Decoder](v.Addr()); ok {
		return d.DecodeStrict(raw, path)
	}
	switch v.Kind() {
	case reflect.Pointer:
		if Kind(raw) == "null" {
			v.SetZero()
			return nil
		}
		v.Set(reflect.New(v.Type().Elem()))
		return decode(raw, path, v.Elem())
	case reflect.Bool:
		if Kind(raw) != "a boolean" {
			return Expected("a boolean", raw, path)
		}
		return json.Unmarshal(raw, v.Addr().Interface())
	case reflect.String:
		return decodeString(raw, path, v)
	case reflect.Slice:
		return decodeSlice(raw, path, v)
	case reflect.Map:
		return decodeMap(raw, path, v)
	case reflect.Struct:
		return decodeStruct(raw, path, v)
	default:
		return decodeInteger(raw, path, v)
	}
}

func decodeString(raw json.RawMessage, path string, v reflect.Value) error {
	if Kind(raw) != "a string" {
		return Expected("a string", raw, path)
	}
	s := unquote(raw)
	// encoding/json puts U+FFFD where there is no character.
	if strings.ContainsRune(s, utf8.RuneError) && !validUnicode(raw) {
		return &Error{Path: path, Problem: "is not valid Unicode"}
	}
	v.SetString(s)
	return nil
}

// validUnicode reports whether a JSON string is UTF-8 and has no half of a
// surrogate pair among its escapes.
func validUnicode(raw json.RawMessage) bool {
	if !utf8.Valid(raw) {
		return false
	}
	const escapeLen = len(`\u0000`)
	for i := 0; i < len(raw); {
		if raw[i] != '\\' {
			i++
			continue
		}
		if raw[i+1] != 'u' {
			i += 2
			continue
		}
		unit := hexUnit(raw[i:])
		i += escapeLen
		switch {
		case unit >= 0xD800 && unit < 0xDC00:
			if low := hexUnit(raw[i:]); low < 0xDC00 || low > 0xDFFF {
				return false
			}
			i += escapeLen
		case unit >= 0xDC00 && unit <= 0xDFFF:
			return false
		}
	}
	return true
}

// hexUnit is the number of the \uXXXX at the start of raw, 0 where none is.
func hexUnit(raw []byte) uint64 {
	if len(raw) < 6 || raw[0] != '\\' || raw[1] != 'u' {
		return 0
	}
	unit, err := strconv.ParseUint(string(raw[2:6]), 16, 16)
	if err != nil {
		return 0
	}
	return unit
}

func decodeSlice(raw json.RawMessage, path string, v reflect.Value) error {
	if Kind(raw) != "an array" {
		return Expected("an array", raw, path)
	}
	length := 0
	for range elements(raw) {
		length++
	}
	out := reflect.MakeSlice(v.Type(), length, length)
	i := 0
	for item := range elements(raw) {
		if decode(item, path, out.Index(i)) != nil {
			// Once more, for its place: made for each, they would take more than the items.
			return decode(item, path+"["+strconv.Itoa(i)+"]", out.Index(i))
		}
		i++
	}
	v.Set(out)
	return nil
}

func decodeMap(raw json.RawMessage, path string, v reflect.Value) error {
	if Kind(raw) != "an object" {
		return Expected("an object", raw, path)
	}
	out := reflect.MakeMap(v.Type())
	for key, member := range members(raw) {
		value := reflect.New(v.Type().Elem()).Elem()
		if err := decode(member, path+"["+strconv.Quote(key)+"]", value); err != nil {
			return err
		}
		out.SetMapIndex(reflect.ValueOf(key), value)
	}
	v.Set(out)
	return nil
}

func decodeStruct(raw json.RawMessage, path string, v reflect.Value) error {
	if Kind(raw) != "an object" {
		return Expected("an object", raw, path)
	}
	fields := map[string]int{}
	for i := range v.NumField() {
		name, _, _ := strings.Cut(v.Type().Field(i).Tag.Get("json"), ",")
		fields[name] = i
	}
	given := make([]json.RawMessage, v.NumField())
	for key, member := range members(raw) {
		if i, known := fields[key]; known {
			given[i] = member
		}
	}
	for i, member := range given {
		field := v.Type().Field(i)
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		at := join(path, name)
		switch {
		case member != nil:
			if err := decode(member, at, v.Field(i)); err != nil {
				return err
			}
		case field.Tag.Get("required") == "true":
			return &Error{Path: at, Problem: "is missing: it is required"}
		}
	}
	return nil
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

func decodeInteger(raw json.RawMessage, path string, v reflect.Value) error {
	if Kind(raw) != "a number" {
		return Expected("an integer", raw, path)
	}
	text := string(bytes.TrimSpace(raw))
	wrong := func(low int64, high uint64) error {
		return &Error{Path: path, Problem: fmt.Sprintf("must be an integer from %d to %d", low, high)}
	}
	bits := v.Type().Bits()
	if v.CanUint() {
		n, err := strconv.ParseUint(text, 10, bits)
		if err != nil {
			return wrong(0, 1<<bits-1)
		}
		v.SetUint(n)
		return nil
	}
	n, err := strconv.ParseInt(text, 10, bits)
	if err != nil {
		return wrong(-1<<(bits-1), 1<<(bits-1)-1)
	}
	v.SetInt(n)
	return nil
}
