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
	"maps"
	"slices"
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

// class is what is fixed for a code.
type class struct {
	typ       string
	retryable bool
	// means is when it is raised, by the functions (as ids without their prefix).
	means, by string
}

// Callers, for the table.
const (
	byBoot   = "create, run"
	byInside = "exec, stop, fs::*"
	bySearch = "fs::grep, fs::sed"
	byFiles  = "fs::*"
	byWorker = "worker::*"
)

// table is the contract's table of codes, read-only.
var table = map[Code]class{
	S001: {typ: "validation", by: "every function", means: "The request breaks a rule: a field is missing or of the wrong type, an id is no UUID, a command, an environment, base64 or a size is not valid. The message names the field."},
	S002: {typ: "validation", by: byInside, means: "There is no sandbox of that id: it never existed, was stopped, or was idle for too long."},
	S003: {typ: "validation", by: "exec", means: "The sandbox already runs as many programs as max_concurrent_exec_per_sandbox allows. Waiting does not free a slot that a foreground program holds."},
	S004: {typ: "validation", by: "exec, fs::*", means: "The sandbox is being stopped at this moment."},
	S100: {typ: "config", by: byBoot, means: "The image is not in the catalog, or not on image_allowlist. The message lists those that are allowed."},
	S101: {typ: "internal", by: byBoot, means: "The image is not on the host and auto_install is off. The operator pulls it: adapter image pull."},
	S102: {typ: "transient", retryable: true, by: byBoot, means: "The image could not be pulled or unpacked, or has nothing for this architecture."},
	S200: {typ: "execution", by: "exec, run", means: "The program was killed at its time limit, the smaller one of timeout_ms and max_exec_timeout_ms. Its output is lost."},
	S210: {typ: "filesystem", by: "fs::mkdir, fs::chmod, fs::write, " + bySearch, means: "The request is not possible: a mode is not octal, a directory is searched without recursive, fs::sed has both or none of files and path, its literal pattern is empty."},
	S211: {typ: "filesystem", by: byFiles, means: "Nothing is at the path. Where only its parent is missing, fix holds parents: true."},
	S212: {typ: "filesystem", by: "fs::ls, fs::read", means: "The path is of another kind: not a directory, or not a regular file."},
	S213: {typ: "filesystem", by: "fs::mkdir, fs::mv, fs::write", means: "Something is at the path already."},
	S214: {typ: "filesystem", by: "fs::rm", means: "The directory is not empty and recursive is false."},
	S215: {typ: "filesystem", by: byFiles, means: "The guest's system does not permit it."},
	S216: {typ: "filesystem", by: byFiles, means: "Any other failure of the guest's file system, of the way to it, or of the channel that carries the bytes."},
	S217: {typ: "filesystem", by: bySearch, means: "The pattern is no regular expression in the syntax of Rust's regex crate."},
	S218: {typ: "transient", retryable: true, by: "fs::write", means: "The channel with the file's content stalled for 5 seconds, or broke. Nothing was written."},
	S219: {typ: "filesystem", by: byFiles, means: "The agent in the sandbox is too old for the operation."},
	S300: {typ: "platform", by: "create, exec, run; every function", means: "The VM did not boot, or failed afterwards: the message ends with the last lines of its log. From every function: the adapter is starting, ending, or has a defect."},
	S400: {typ: "config", by: byBoot + "; every function", means: "A limit is reached: max_concurrent_sandboxes, or the image's entry in per_image_caps. From every function: the adapter is answering too many calls, carries too many downloads, or the reply is too large."},
	S501: {typ: "validation", by: byWorker, means: "host_path is outside the directories that workers may come from. The message names them."},
	S502: {typ: "validation", by: byWorker, means: "The worker's VM is being prepared or runs already."},
	S505: {typ: "validation", by: byWorker, means: "auth is not the token in III_SANDBOX_WORKER_TOKEN, or there is none."},
}

// Codes returns every code, sorted.
func Codes() []Code { return slices.Sorted(maps.Keys(table)) }

// Type is the contract's category of the code, for example "filesystem".
func (c Code) Type() string { return table[c].typ }

// Retryable reports whether the same request may succeed later.
func (c Code) Retryable() bool { return table[c].retryable }

// Meaning says when the code is raised, for people, and by which functions: their
// ids without the prefix, comma-separated.
func (c Code) Meaning() (text, by string) { return table[c].means, table[c].by }

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
func (e *Error) Type() string { return e.Code.Type() }

// Retryable reports whether the same request may succeed later.
func (e *Error) Retryable() bool { return e.Code.Retryable() }

// DocsURL is where the code is explained.
func (c Code) DocsURL() string { return docsBase + string(c) }

// DocsURL is where the code is explained.
func (e *Error) DocsURL() string { return e.Code.DocsURL() }

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

// maxEnvelope bounds a message on its way to the caller, in bytes: parts of it may
// come from the guest. The ends of a VM's logs fit in.
const maxEnvelope = 32 << 10

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
		Code: e.Code, DocsURL: e.DocsURL(), Fix: fix, Message: clipTo(e.Message, maxEnvelope),
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
