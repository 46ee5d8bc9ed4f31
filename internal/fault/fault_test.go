package fault_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
)

// every returns one error of each constructor.
func every() map[string]*fault.Error {
	cause := errors.New("the cause")
	return map[string]*fault.Error{
		"InvalidRequest":   fault.InvalidRequest("cpus is %d", 0),
		"BadSandboxID":     fault.BadSandboxID("nope"),
		"AmbiguousCommand": fault.AmbiguousCommand("ls -l", []string{"x"}),
		"UnbalancedQuotes": fault.UnbalancedQuotes("'x"),
		"BadEnvKeys":       fault.BadEnvKeys([]string{"a-b", "1"}),
		"BadStdin":         fault.BadStdin(cause),
		"NoFileBody":       fault.NoFileBody(),
		"TwoFileBodies":    fault.TwoFileBodies(),
		"BadFileBody":      fault.BadFileBody(cause),
		"SandboxNotFound":  fault.SandboxNotFound("id"),
		"SandboxLost":      fault.SandboxLost("id", cause),
		"ExecSlotsFull":    fault.ExecSlotsFull("id", 4),
		"SandboxStopped":   fault.SandboxStopped("id"),
		"UnknownImage":     fault.UnknownImage("x", []string{"python", "node"}),
		"ImageNotPulled":   fault.ImageNotPulled("x"),
		"PullFailed":       fault.PullFailed("x", cause),
		"ExecTimedOut":     fault.ExecTimedOut(1500 * time.Millisecond),
		"BootFailed":       fault.BootFailed(cause),
		"GuestFailed":      fault.GuestFailed(cause),
		"StoppedMeanwhile": fault.StoppedMeanwhile("id"),
		"StartFailed":      fault.StartFailed(cause),
		"ShuttingDown":     fault.ShuttingDown(),
		"SandboxLimit":     fault.SandboxLimit(32),
		"ImageCap":         fault.ImageCap("python", "cpus", 8, 4),
		"HostPathRefused":  fault.HostPathRefused("/p", "/a", "/b"),
		"WorkerBusy":       fault.WorkerBusy("k", "running"),
		"BadWorkerToken":   fault.BadWorkerToken(),
		"NoWorkerToken":    fault.NoWorkerToken(),
		"BadMode":          fault.BadMode("0o7"),
		"BadFileRequest":   fault.BadFileRequest("x"),
		"NeedsRecursive":   fault.NeedsRecursive("/d"),
		"SedTargets":       fault.SedTargets(),
		"EmptyPattern":     fault.EmptyPattern(),
		"NotFound":         fault.NotFound("/x", cause),
		"ParentMissing":    fault.ParentMissing("/a/b", "/a", cause),
		"WrongType":        fault.WrongType("/x", "is a directory"),
		"Exists":           fault.Exists("/x", "exists already", cause),
		"NotEmpty":         fault.NotEmpty("/x", cause),
		"PermissionDenied": fault.PermissionDenied("/x", cause),
		"FileIO":           fault.FileIO("/x", cause),
		"FileRefused":      fault.FileRefused("/x", "is a mount point", nil),
		"BadPattern":       fault.BadPattern("(", cause),
		"UploadAborted":    fault.UploadAborted("/x", "stalled", cause),
		"AgentTooOld":      fault.AgentTooOld("sed", cause),
		"DuringRun":        fault.DuringRun("create", "", cause),
		"FromGuest":        fault.FromGuest("S211", "/x", "m", false, cause),
		"FileErrno":        fault.FileErrno("/x", cause),
		"Of":               fault.Of(cause),
		"NotReady":         fault.NotReady(cause),
		"TooManyCalls":     fault.TooManyCalls(),
		"TooManyDownloads": fault.TooManyDownloads(8),
		"ReplyTooLarge":    fault.ReplyTooLarge(cause),
		"Internal":         fault.Internal(cause),
	}
}

// every has them all: a new one is checked like the others.
func TestEvery_HasEachConstructor(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	have := every()
	for _, name := range files {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, decl := range file.Decls {
			f, ok := decl.(*ast.FuncDecl)
			if !ok || f.Recv != nil || !f.Name.IsExported() || f.Type.Results == nil || len(f.Type.Results.List) != 1 {
				continue
			}
			star, ok := f.Type.Results.List[0].Type.(*ast.StarExpr)
			if !ok {
				continue
			}
			if result, ok := star.X.(*ast.Ident); ok && result.Name == "Error" && have[f.Name.Name] == nil {
				t.Errorf("%s is not among them", f.Name.Name)
			}
		}
	}
}

func TestEnvelope_HasSevenKeysForEveryError(t *testing.T) {
	t.Parallel()
	for name, e := range every() {
		var object map[string]any
		if err := json.Unmarshal([]byte(e.Envelope()), &object); err != nil {
			t.Fatalf("%s: %v in %s", name, err, e.Envelope())
		}
		for _, key := range []string{"type", "code", "message", "docs_url", "retryable", "fix", "fix_note"} {
			if _, ok := object[key]; !ok {
				t.Errorf("%s: key %s is missing in %s", name, key, e.Envelope())
			}
		}
		if len(object) != 7 {
			t.Errorf("%s: %d keys in %s", name, len(object), e.Envelope())
		}
		if want := "https://iii.dev/docs/creating-workers/sandboxes#" + string(e.Code); object["docs_url"] != want {
			t.Errorf("%s: docs_url %v, want %s", name, object["docs_url"], want)
		}
		if !e.Code.Known() || object["type"] == "" {
			t.Errorf("%s: code %s has no type", name, e.Code)
		}
	}
}

func TestTable_TypesAndRetryable(t *testing.T) {
	t.Parallel()
	want := map[fault.Code]string{
		"S001": "validation", "S002": "validation", "S003": "validation", "S004": "validation",
		"S100": "config", "S101": "internal", "S102": "transient", "S200": "execution",
		"S210": "filesystem", "S211": "filesystem", "S212": "filesystem", "S213": "filesystem", "S214": "filesystem",
		"S215": "filesystem", "S216": "filesystem", "S217": "filesystem", "S218": "transient", "S219": "filesystem",
		"S300": "platform", "S400": "config", "S501": "validation", "S502": "validation", "S505": "validation",
	}
	seen := map[fault.Code]bool{}
	for name, e := range every() {
		seen[e.Code] = true
		if e.Type() != want[e.Code] {
			t.Errorf("%s: type of %s is %q, want %q", name, e.Code, e.Type(), want[e.Code])
		}
		if retry := e.Code == "S102" || e.Code == "S218"; e.Retryable() != retry {
			t.Errorf("%s: retryable of %s is %v", name, e.Code, e.Retryable())
		}
	}
	for _, code := range fault.Codes() {
		if !seen[code] {
			t.Errorf("no constructor makes %s", code)
		}
		if text, by := code.Meaning(); text == "" || by == "" || want[code] == "" {
			t.Errorf("%s has no meaning: %q, raised by %q", code, text, by)
		}
	}
	if len(fault.Codes()) != len(want) {
		t.Errorf("codes %v", fault.Codes())
	}
}

func TestMessages_HoldWhatClientsLookFor(t *testing.T) {
	t.Parallel()
	for name, words := range map[string][]string{
		"AmbiguousCommand": {"invalid request:", "ambiguous", "ls -l", "x"},
		"UnbalancedQuotes": {"unbalanced", "argv"},
		"NoFileBody":       {"missing file body"},
		"TwoFileBodies":    {"not both"},
		"BadFileBody":      {"not valid base64"},
		"BadEnvKeys":       {"a-b", "1", "[A-Za-z_][A-Za-z0-9_]*"},
		"BadSandboxID":     {"nope", "valid UUID"},
		"UnknownImage":     {"python", "node"},
		"ExecSlotsFull":    {"max_concurrent_exec_per_sandbox"},
		"ExecTimedOut":     {"1500 ms"},
		"HostPathRefused":  {"/p", "/a", "/b"},
		"AgentTooOld":      {"supervisor"},
		"SandboxLost":      {"the cause"},
		"ParentMissing":    {"parent not found", "/a"},
	} {
		message := every()[name].Message
		for _, word := range words {
			if !strings.Contains(message, word) {
				t.Errorf("%s: %q does not hold %q", name, message, word)
			}
		}
	}
	note := fault.ExecSlotsFull("id", 4).FixNote
	if !strings.Contains(note, "nohup") || !strings.Contains(note, "foreground") {
		t.Errorf("S003 note: %s", note)
	}
	if !strings.Contains(fault.UnknownImage("x", nil).Message, "python") {
		t.Error("S100 with an empty allow-list names no example")
	}
}

func TestParentMissing_CarriesTheFix(t *testing.T) {
	t.Parallel()
	e := fault.ParentMissing("/a/b", "/a", syscall.ENOENT)
	if !e.ParentMissing() || !strings.Contains(e.Envelope(), `"fix":{"parents":true}`) {
		t.Errorf("envelope %s", e.Envelope())
	}
	if !strings.Contains(e.FixNote, "parents: true") || !strings.Contains(e.FixNote, "merge") {
		t.Errorf("note %q", e.FixNote)
	}
	if fault.NotFound("/a", nil).ParentMissing() {
		t.Error("a missing path claims a missing parent")
	}
	back := fault.FromGuest("S211", "/a/b", "m", true, nil)
	if !back.ParentMissing() || back.FixNote != e.FixNote || back.Path != "/a/b" {
		t.Errorf("from the guest: %+v", back)
	}
}

func TestFromGuest_KeepsAnUnknownCodeInTheMessage(t *testing.T) {
	t.Parallel()
	e := fault.FromGuest("S299", "/x", "odd", false, nil)
	if e.Code != fault.S216 || !strings.Contains(e.Message, "S299") {
		t.Errorf("%s: %s", e.Code, e.Message)
	}
}

func TestFileErrno(t *testing.T) {
	t.Parallel()
	for errno, code := range map[syscall.Errno]fault.Code{
		syscall.ENOENT: fault.S211, syscall.EEXIST: fault.S213, syscall.EACCES: fault.S215, syscall.EPERM: fault.S215,
		syscall.ENOTDIR: fault.S216, syscall.EISDIR: fault.S216, syscall.ENOTEMPTY: fault.S216, syscall.ELOOP: fault.S216,
		syscall.ENAMETOOLONG: fault.S216, syscall.EINVAL: fault.S216, syscall.EBUSY: fault.S216, syscall.EROFS: fault.S216,
		syscall.ENOSPC: fault.S216, syscall.EXDEV: fault.S216, syscall.EMLINK: fault.S216,
	} {
		e := fault.FileErrno("/p", fmt.Errorf("open: %w", errno))
		if e.Code != code || e.Path != "/p" || !strings.Contains(e.Message, "/p") {
			t.Errorf("%v: %s %q", errno, e.Code, e.Message)
		}
		if !errors.Is(e, errno) || !errors.Is(e, code) {
			t.Errorf("%v: errors.Is does not find cause and code", errno)
		}
	}
	if fault.FileErrno("/p", nil) != nil {
		t.Error("no error became one")
	}
	if inner := fault.NotEmpty("/q", nil); fault.FileErrno("/p", fmt.Errorf("x: %w", inner)) != inner {
		t.Error("an error with a code was classed again")
	}
}

func TestOf(t *testing.T) {
	t.Parallel()
	inner := fault.SandboxNotFound("id")
	if got := fault.Of(fmt.Errorf("exec: %w", inner)); got != inner {
		t.Errorf("Of = %v", got)
	}
	got := fault.Of(io.ErrUnexpectedEOF)
	if got.Code != fault.S300 || !errors.Is(got, io.ErrUnexpectedEOF) {
		t.Errorf("Of(plain) = %v", got)
	}
	if fault.Of(nil) != nil {
		t.Error("Of(nil) is not nil")
	}
}

func TestDuringRun_KeepsTheInnerCode(t *testing.T) {
	t.Parallel()
	e := fault.DuringRun("fs::write (code)", "some-id", fault.ParentMissing("/a/b", "/a", nil))
	if e.Code != fault.S211 || e.Type() != "filesystem" {
		t.Errorf("code %s type %s", e.Code, e.Type())
	}
	if e.Fix["context"] != "during sandbox::run step `fs::write (code)`" || e.Fix["sandbox_id"] != "some-id" || e.Fix["inner_code"] != "S211" {
		t.Errorf("fix %v", e.Fix)
	}
	if _, inherited := e.Fix["parents"]; inherited || e.FixNote != "" {
		t.Error("the inner fix leaked out")
	}
	if fault.DuringRun("create", "", fault.PullFailed("x", io.EOF)).Retryable() != true {
		t.Error("retryable was lost")
	}
}

func TestEnvelope_DoesNotEscapeHTML(t *testing.T) {
	t.Parallel()
	e := fault.InvalidRequest("a < b && c > d")
	if !strings.Contains(e.Envelope(), "a < b && c > d") {
		t.Error(e.Envelope())
	}
	e.Fix = map[string]any{"bad": func() {}}
	if !strings.Contains(e.Envelope(), `"fix":null`) {
		t.Error(e.Envelope())
	}
}

func TestError_HasTheCodeOnItsFirstLine(t *testing.T) {
	t.Parallel()
	for message, want := range map[string]string{"a": "a (S300)", "a\nb\nc": "a (S300)\nb\nc"} {
		if got := fault.Of(errors.New(message)).Error(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func TestMessages_AreBoundedAndPrintable(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 1<<20)
	for _, e := range []*fault.Error{fault.NotFound(long, nil), fault.BadSandboxID(long), fault.BadPattern(long, io.EOF), fault.SandboxNotFound(long)} {
		if len(e.Message) > 4096 {
			t.Errorf("%s: message of %d bytes", e.Code, len(e.Message))
		}
	}
	keys := make([]string, 100_000)
	for i := range keys {
		keys[i] = fmt.Sprint("a-", i)
	}
	for _, e := range []*fault.Error{
		fault.AmbiguousCommand(long, []string{long}), fault.BadEnvKeys(keys), fault.BadEnvKeys([]string{long}),
		fault.UnknownImage(long, keys), fault.GuestFailed(errors.New(long)), fault.StartFailed(errors.New(long)),
	} {
		if text := e.Envelope(); len(text) > 40<<10 {
			t.Errorf("%s: envelope of %d bytes", e.Code, len(text))
		}
	}
	if m := fault.BadEnvKeys(keys).Message; !strings.Contains(m, "more; a key") {
		t.Errorf("the message does not tell that keys are left out: …%s", m[len(m)-80:])
	}
	if m := fault.NotFound("/a\xff\nb", nil).Message; strings.Contains(m, "\n") || strings.Contains(m, "\xff") {
		t.Errorf("%q", m)
	}
}
