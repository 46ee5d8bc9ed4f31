// Package fault holds every error that a caller of the sandbox functions can
// see: the table of S-codes, one Error type, one constructor per situation, and
// the JSON object in which an error travels to the caller.
//
// Codes, types and texts follow the sandbox contract 1.1. S301 to S303 belong
// to the engine's router and are not made here.
package fault

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
)

// docsBase is the page that explains the codes; the code is its anchor.
const docsBase = "https://iii.dev/docs/creating-workers/sandboxes#"

// Code is an S-code of the contract. It is an error itself, so that
// errors.Is(err, fault.S211) tells whether err is of that class.
type Code string

// The S-codes. What each means stands at the constructors that use it.
const (
	S001 Code = "S001"
	S002 Code = "S002"
	S003 Code = "S003"
	S004 Code = "S004"
	S100 Code = "S100"
	S101 Code = "S101"
	S102 Code = "S102"
	S200 Code = "S200"
	S210 Code = "S210"
	S211 Code = "S211"
	S212 Code = "S212"
	S213 Code = "S213"
	S214 Code = "S214"
	S215 Code = "S215"
	S216 Code = "S216"
	S217 Code = "S217"
	S218 Code = "S218"
	S219 Code = "S219"
	S300 Code = "S300"
	S400 Code = "S400"
	S501 Code = "S501"
	S502 Code = "S502"
	S505 Code = "S505"
)

// class is what the contract fixes for a code.
type class struct {
	typ       string
	retryable bool
}

// table is the contract's table of codes, read-only.
var table = map[Code]class{
	S001: {typ: "validation"},
	S002: {typ: "validation"},
	S003: {typ: "validation"},
	S004: {typ: "validation"},
	S100: {typ: "config"},
	S101: {typ: "internal"},
	S102: {typ: "transient", retryable: true},
	S200: {typ: "execution"},
	S210: {typ: "filesystem"},
	S211: {typ: "filesystem"},
	S212: {typ: "filesystem"},
	S213: {typ: "filesystem"},
	S214: {typ: "filesystem"},
	S215: {typ: "filesystem"},
	S216: {typ: "filesystem"},
	S217: {typ: "filesystem"},
	S218: {typ: "transient", retryable: true},
	S219: {typ: "filesystem"},
	S300: {typ: "platform"},
	S400: {typ: "config"},
	S501: {typ: "validation"},
	S502: {typ: "validation"},
	S505: {typ: "validation"},
}

// Known reports whether c is in the table.
func (c Code) Known() bool {
	_, ok := table[c]
	return ok
}

// Error makes a Code usable with errors.Is.
func (c Code) Error() string { return string(c) }

// Error is an error with an S-code. Its fields are read, not changed, once it
// has been returned; it may then be shared between goroutines.
type Error struct {
	// Code is the class; Type and Retryable follow from it.
	Code Code
	// Message is for a person: what was wrong, and what to do about it.
	Message string
	// Fix, where not nil, is merged into the original request by the caller,
	// who then sends it again.
	Fix map[string]any
	// FixNote says in words what to do; empty means none.
	FixNote string
	// Path is the path in the guest that an error of a file operation is about,
	// byte for byte. It is not part of the envelope.
	Path string

	cause error
}

// Error returns the message with the code at the end of its first line: more
// lines are what others said.
func (e *Error) Error() string {
	line, more, several := strings.Cut(e.Message, "\n")
	line += " (" + string(e.Code) + ")"
	if several {
		line += "\n" + more
	}
	return line
}

// Unwrap returns the cause, nil where there is none.
func (e *Error) Unwrap() error { return e.cause }

// Is reports whether target is e's code.
func (e *Error) Is(target error) bool {
	code, ok := target.(Code)
	return ok && code == e.Code
}

// Type is the contract's category of the code, for example "filesystem".
func (e *Error) Type() string { return table[e.Code].typ }

// Retryable reports whether the same request may succeed later.
func (e *Error) Retryable() bool { return table[e.Code].retryable }

// DocsURL is where the code is explained.
func (e *Error) DocsURL() string { return docsBase + string(e.Code) }

// ParentMissing reports whether the fault is that the path's parent directory is
// missing and that the request would work with parents:true.
func (e *Error) ParentMissing() bool {
	parents, ok := e.Fix["parents"].(bool)
	return ok && parents && e.Code == S211
}

// Of returns the Error in err's chain. An error without one is a fault of the
// platform (S300) with err as its cause. Of(nil) is nil.
func Of(err error) *Error {
	if err == nil {
		return nil
	}
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	return &Error{Code: S300, Message: err.Error(), FixNote: notePlatform, cause: err}
}

// envelope is the error as the caller sees it. All seven keys are always there.
type envelope struct {
	Code      Code           `json:"code"`
	DocsURL   string         `json:"docs_url"`
	Fix       map[string]any `json:"fix"`
	FixNote   *string        `json:"fix_note"`
	Message   string         `json:"message"`
	Retryable bool           `json:"retryable"`
	Type      string         `json:"type"`
}

// MarshalJSON returns the envelope: an object with the keys code, docs_url, fix,
// fix_note, message, retryable and type, in that order.
func (e *Error) MarshalJSON() ([]byte, error) {
	text, err := e.encode(e.Fix)
	if err != nil { // a value in Fix that JSON does not have
		text, err = e.encode(nil)
	}
	return text, err
}

// Envelope is the text that MarshalJSON makes, with '<', '>' and '&' as they
// are: what a function's error message carries.
func (e *Error) Envelope() string {
	text, err := e.MarshalJSON()
	if err != nil { // strings and booleans always encode
		return string(e.Code)
	}
	return string(text)
}

func (e *Error) encode(fix map[string]any) ([]byte, error) {
	v := envelope{
		Code: e.Code, DocsURL: e.DocsURL(), Fix: fix, Message: e.Message,
		Retryable: e.Retryable(), Type: e.Type(),
	}
	if e.FixNote != "" {
		v.FixNote = &e.FixNote
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}
