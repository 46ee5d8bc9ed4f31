package fault

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"syscall"
	"unicode"
	"unicode/utf8"
)

// maxShown is how many bytes of a name from outside a message repeats, maxMessage
// how long a message of a guest may be.
const (
	maxShown   = 1024
	maxMessage = 8 << 10
)

// noteParents goes with the fix of a missing parent directory.
const noteParents = "merge this fix into the original request (parents: true creates the missing directories) and send it again"

// file makes an error of a file operation; text follows the path.
func file(code Code, path, text string, cause error) *Error {
	return &Error{Code: code, Message: show(path) + ": " + text, Path: path, cause: cause}
}

// BadMode is S210: mode is not a string of octal digits that fits 32 bits.
func BadMode(mode string) *Error {
	return &Error{Code: S210, Message: fmt.Sprintf("mode %q is not an octal number such as \"0644\"", clip(mode))}
}

// BadFileRequest is S210: a file operation's request breaks a rule.
func BadFileRequest(format string, args ...any) *Error {
	return &Error{Code: S210, Message: fmt.Sprintf(format, args...)}
}

// NeedsRecursive is S210: path is a directory and recursive is false.
func NeedsRecursive(path string) *Error {
	return file(S210, path, "is a directory: pass recursive:true to search it", nil)
}

// SedTargets is S210: fs::sed without exactly one of files and path.
func SedTargets() *Error {
	return &Error{Code: S210, Message: "pass exactly one of files (not empty) and path"}
}

// EmptyPattern is S210: fs::sed in literal mode has nothing to look for.
func EmptyPattern() *Error {
	return &Error{Code: S210, Message: "pattern is empty: with regex:false it must be the text to replace"}
}

// NotFound is S211: nothing is at path.
func NotFound(path string, cause error) *Error { return file(S211, path, "not found", cause) }

// ParentMissing is S211 with a fix: the directory that should hold path is not
// there.
func ParentMissing(path, parent string, cause error) *Error {
	e := file(S211, path, "parent not found: "+show(parent), cause)
	e.Fix = map[string]any{"parents": true}
	e.FixNote = noteParents
	return e
}

// WrongType is S212: path is not of the kind that the operation needs. is says
// what it is, for example "is not a directory".
func WrongType(path, is string) *Error { return file(S212, path, is, nil) }

// Exists is S213: something is at path already. is adds what, and what to do.
func Exists(path, is string, cause error) *Error { return file(S213, path, is, cause) }

// NotEmpty is S214: the directory has entries and recursive is false.
func NotEmpty(path string, cause error) *Error {
	return file(S214, path, "directory is not empty: pass recursive:true to remove its contents too", cause)
}

// PermissionDenied is S215.
func PermissionDenied(path string, cause error) *Error {
	return file(S215, path, reason(cause, "permission denied"), cause)
}

// FileIO is S216: any other failure of a file operation on path.
func FileIO(path string, cause error) *Error {
	return file(S216, path, reason(cause, "input/output error"), cause)
}

// FileRefused is S216 for what is not an error of the system: text says what is
// wrong with path.
func FileRefused(path, text string, cause error) *Error { return file(S216, path, text, cause) }

// BadPattern is S217: the regular expression does not compile.
func BadPattern(pattern string, cause error) *Error {
	return &Error{Code: S217, Message: fmt.Sprintf("pattern %q: %s", clip(pattern), clip(cause.Error())), cause: cause}
}

// UploadAborted is S218: the body of a write stopped before its end. Nothing was
// written. text says how: stalled, aborted, closed early.
func UploadAborted(path, text string, cause error) *Error { return file(S218, path, text, cause) }

// AgentTooOld is S219: the guest's supervisor does not know the operation.
func AgentTooOld(op string, cause error) *Error {
	return &Error{
		Code:    S219,
		Message: fmt.Sprintf("the supervisor in this sandbox is too old for %s: create a new sandbox", op),
		cause:   cause,
	}
}

// FileErrno classes an error of a system call on path: ENOENT is S211, EEXIST
// S213, EACCES and EPERM S215, everything else S216. An err that has an Error in
// its chain already is returned as that.
func FileErrno(path string, err error) *Error {
	var e *Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &e):
		return e
	case errors.Is(err, syscall.ENOENT):
		return NotFound(path, err)
	case isErrno(err, syscall.EEXIST):
		return Exists(path, "exists already", err)
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		return PermissionDenied(path, err)
	}
	return FileIO(path, err)
}

// FromGuest rebuilds an error that crossed the guest link. A code that is not in
// the table becomes S216 and stays visible in the message. parentMissing gives
// it the fix of [ParentMissing].
func FromGuest(code, path, message string, parentMissing bool, cause error) *Error {
	message = clipTo(message, maxMessage)
	e := &Error{Code: Code(code), Message: message, Path: path, cause: cause}
	if !e.Code.Known() {
		e.Code, e.Message = S216, clip(code)+": "+message
	}
	if parentMissing && e.Code == S211 {
		e.Fix = map[string]any{"parents": true}
		e.FixNote = noteParents
	}
	return e
}

// isErrno compares exactly: errors.Is takes ENOTEMPTY for "exists" as well.
func isErrno(err error, want syscall.Errno) bool {
	var errno syscall.Errno
	return errors.As(err, &errno) && errno == want
}

// reason is the innermost cause's text: the path around it is said already.
func reason(cause error, fallback string) string {
	if cause == nil {
		return fallback
	}
	var errno syscall.Errno
	if errors.As(cause, &errno) {
		return errno.Error()
	}
	return cause.Error()
}

// show is a path for a message: as it is where every character can be printed,
// quoted otherwise; never longer than a few KiB.
func show(path string) string {
	path = clip(path)
	if path == "" || !utf8.ValidString(path) || strings.ContainsFunc(path, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return strconv.Quote(path)
	}
	return path
}

// clip bounds what a message repeats of a text from outside.
func clip(s string) string { return clipTo(s, maxShown) }

func clipTo(s string, limit int) string {
	if len(s) <= limit {
		return s
	}
	return strings.ToValidUTF8(s[:limit], "") + "…"
}
