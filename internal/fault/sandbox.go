package fault

import (
	"fmt"
	"strings"
	"time"
)

// Notes that more than one constructor gives.
const (
	noteGone     = "the sandbox is gone: create one with create and use its sandbox_id"
	notePlatform = "this is a fault of the host or of the VM, a changed request does not help: look at the message and at the adapter's log"
	noteRetry    = "this may pass: send the same request again after a few seconds"
)

func invalid(format string, args ...any) *Error {
	return &Error{Code: S001, Message: "invalid request: " + fmt.Sprintf(format, args...)}
}

// InvalidRequest is S001: a request that breaks a rule. The text names the field
// and shows what would be right.
func InvalidRequest(format string, args ...any) *Error { return invalid(format, args...) }

// BadSandboxID is S001: id is not a UUID.
func BadSandboxID(id string) *Error {
	return invalid("sandbox_id %q is not a valid UUID", clip(id))
}

// AmbiguousCommand is S001: cmd holds several words and args is given as well.
func AmbiguousCommand(cmd string, args []string) *Error {
	return invalid("cmd %q with args %q is ambiguous: put the whole line into cmd, or the program alone into cmd, or everything into argv",
		clip(cmd), clip(strings.Join(args, " ")))
}

// UnbalancedQuotes is S001: cmd is a line with an open quote or a trailing
// backslash.
func UnbalancedQuotes(cmd string) *Error {
	return invalid("cmd %q has unbalanced quotes or ends with a backslash: pass the words as argv, where nothing is quoted", clip(cmd))
}

// BadEnvKeys is S001: keys of an env object that cannot be variable names. It
// names all of them, as far as a message has room.
func BadEnvKeys(keys []string) *Error {
	var list strings.Builder
	for i, key := range keys {
		if list.Len() > maxMessage {
			fmt.Fprintf(&list, " and %d more", len(keys)-i)
			break
		}
		fmt.Fprintf(&list, " %q", clip(key))
	}
	return invalid("env has keys that are no variable names:%s; a key matches [A-Za-z_][A-Za-z0-9_]*", &list)
}

// BadStdin is S001: stdin is not base64.
func BadStdin(cause error) *Error {
	e := invalid("stdin is not valid base64 (standard alphabet, padded, no line breaks): %v", cause)
	e.cause = cause
	return e
}

// NoFileBody is S001: fs::write without content and content_b64.
func NoFileBody() *Error {
	return invalid("missing file body: pass content or content_b64")
}

// TwoFileBodies is S001: fs::write with content and content_b64.
func TwoFileBodies() *Error {
	return invalid("pass content or content_b64, not both")
}

// BadFileBody is S001: content_b64 is not base64.
func BadFileBody(cause error) *Error {
	e := invalid("content_b64 is not valid base64 (standard alphabet, padded, no line breaks): %v", cause)
	e.cause = cause
	return e
}

// SandboxNotFound is S002: nothing of that id, or name, is there.
func SandboxNotFound(id string) *Error {
	return &Error{Code: S002, Message: fmt.Sprintf("no sandbox %s", clip(id)), FixNote: noteGone}
}

// SandboxLost is S002: the sandbox was there until its VM ended by itself. cause
// tells why and ends with what the VM printed last.
func SandboxLost(id string, cause error) *Error {
	return &Error{
		Code: S002, Message: fmt.Sprintf("no sandbox %s any more: %v", clip(id), cause),
		FixNote: noteGone, cause: cause,
	}
}

// ExecSlotsFull is S003: the sandbox runs as many programs as it may.
func ExecSlotsFull(id string, limit int) *Error {
	return &Error{
		Code: S003,
		Message: fmt.Sprintf("sandbox %s already runs %d programs, its limit (max_concurrent_exec_per_sandbox)",
			id, limit),
		FixNote: "waiting does not free a slot that a foreground process holds. Start a server detached " +
			"(nohup server >/tmp/server.log 2>&1 &) and read its log with fs::read, or end the sandbox with " +
			"sandbox::stop and create a new one",
	}
}

// SandboxStopped is S004: the sandbox is being torn down.
func SandboxStopped(id string) *Error {
	return &Error{Code: S004, Message: fmt.Sprintf("sandbox %s is stopped", id), FixNote: noteGone}
}

// UnknownImage is S100: no image of that name, or one that is not allowed.
// allowed is the set that would be accepted; it may be empty.
func UnknownImage(name string, allowed []string) *Error {
	set := "no image is (image_allowlist is empty or names none that exists; name the ones to allow there, python for example)"
	if len(allowed) > 0 {
		set = "allowed are " + clipTo(strings.Join(allowed, ", "), maxMessage)
	}
	return &Error{
		Code:    S100,
		Message: fmt.Sprintf("image %q is not known or not allowed: %s", clip(name), set),
		FixNote: "take one of the listed images, or add it to custom_images and image_allowlist in the adapter's configuration",
	}
}

// ImageNotPulled is S101: the image is not on the host and may not be pulled.
func ImageNotPulled(name string) *Error {
	return &Error{
		Code:    S101,
		Message: fmt.Sprintf("image %q is not on this host and auto_install is off", clip(name)),
		FixNote: "the operator pulls it on the host (adapter image pull), or turns auto_install on",
	}
}

// PullFailed is S102: fetching or unpacking the image did not work.
func PullFailed(name string, cause error) *Error {
	return &Error{
		Code:    S102,
		Message: fmt.Sprintf("image %q could not be installed: %v", clip(name), cause),
		FixNote: noteRetry,
		cause:   cause,
	}
}

// ExecTimedOut is S200: the program ran for limit, the time-out in force after
// clamping, and was killed.
func ExecTimedOut(limit time.Duration) *Error {
	return &Error{
		Code:    S200,
		Message: fmt.Sprintf("the program was killed after its time limit of %d ms", limit.Milliseconds()),
		FixNote: "raise timeout_ms (the configuration's max_exec_timeout_ms is the ceiling) or split the work",
	}
}

// BootFailed is S300: no VM came up. cause tells why and ends with what the
// guest's console and the VMM said last.
func BootFailed(cause error) *Error {
	return &Error{Code: S300, Message: fmt.Sprintf("the sandbox did not boot: %v", cause), FixNote: notePlatform, cause: cause}
}

// GuestFailed is S300: a call to the agent of a running VM failed.
func GuestFailed(cause error) *Error {
	return &Error{Code: S300, Message: fmt.Sprintf("the sandbox's VM failed: %v", cause), FixNote: notePlatform, cause: cause}
}

// StoppedMeanwhile is S300: the sandbox was stopped while a program ran in it.
func StoppedMeanwhile(id string) *Error {
	return &Error{
		Code: S300, Message: fmt.Sprintf("sandbox %s was stopped, or ended for being idle, while the program ran", clip(id)),
		FixNote: noteGone,
	}
}

// StartFailed is S300: the guest could not start a program that is there
// and allowed. cause says why.
func StartFailed(cause error) *Error {
	return &Error{
		Code: S300, Message: fmt.Sprintf("the program was not started: %v", cause),
		FixNote: "the sandbox is well: change the command, its environment or its workdir as the message says",
		cause:   cause,
	}
}

// ShuttingDown is S300: the adapter ends and takes no calls any more.
func ShuttingDown() *Error {
	return &Error{Code: S300, Message: "the adapter is shutting down", FixNote: "send the request again when the adapter is back"}
}

// SandboxLimit is S400: as many sandboxes as allowed are there.
func SandboxLimit(limit int) *Error {
	return &Error{
		Code:    S400,
		Message: fmt.Sprintf("the limit of %d sandboxes (max_concurrent_sandboxes) is reached: stop one first, with wait:true to be sure that it is gone", limit),
		FixNote: notePlatform,
	}
}

// ImageCap is S400: field ("cpus" or "memory_mb") is above the image's ceiling.
func ImageCap(image, field string, asked, ceiling int) *Error {
	return &Error{
		Code:    S400,
		Message: fmt.Sprintf("%s is %d, but image %q may have %d at most (per_image_caps)", field, asked, clip(image), ceiling),
		FixNote: notePlatform,
	}
}

// DuringRun wraps err for the caller of run: step of the run failed. Code, type
// and retryable stay; fix tells where it happened. id is the sandbox's, "" where
// none was made.
func DuringRun(step, id string, err error) *Error {
	inner := Of(err)
	context := "during sandbox::run step `" + step + "`"
	return &Error{
		Code:    inner.Code,
		Message: fmt.Sprintf("%s (sandbox_id=%s): %s", context, id, inner.Message),
		Fix:     map[string]any{"context": context, "sandbox_id": id, "inner_code": string(inner.Code)},
		Path:    inner.Path,
		cause:   err,
	}
}

// NotReady is S300: the adapter cannot serve yet, or not at all. cause says why.
func NotReady(cause error) *Error {
	return &Error{Code: S300, Message: fmt.Sprintf("the adapter is not ready: %v", cause), FixNote: noteRetry, cause: cause}
}

// TooManyCalls is S400: the adapter is answering as many calls as it can hold.
func TooManyCalls() *Error {
	return &Error{Code: S400, Message: "the adapter is answering too many calls at once", FixNote: noteRetry}
}

// TooManyDownloads is S400: limit files of fs::read are on their way already, most
// of them read by nobody.
func TooManyDownloads(limit int) *Error {
	return &Error{
		Code: S400, Message: fmt.Sprintf("the adapter already carries %d downloads: read the channels of fs::read to their end", limit),
		FixNote: noteRetry,
	}
}

// ReplyTooLarge is S400: the function did its work, but its reply is larger than
// the engine carries. cause tells sizes.
func ReplyTooLarge(cause error) *Error {
	return &Error{
		Code: S400, Message: fmt.Sprintf("the reply cannot be sent: %v", cause),
		FixNote: "ask for less at a time", cause: cause,
	}
}

// Internal is S300: the adapter itself has a defect, which its log tells more of.
func Internal(cause error) *Error {
	return &Error{Code: S300, Message: cause.Error(), FixNote: notePlatform, cause: cause}
}
