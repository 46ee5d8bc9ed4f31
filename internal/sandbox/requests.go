package sandbox

import (
	"context"
	"io"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/egress"
)

// The requests and replies of Manager, in the units of the contract's fields. A
// nil pointer is a field that was left out or null. Which rules a field must
// keep, and in which order they are looked at, is Manager's business: callers
// decode, and pass on what they got.

// Env is an environment in one of the contract's two shapes; both nil is an
// empty one.
type Env struct {
	// List has KEY=value entries; those without '=' are left out, the last of a
	// key wins.
	List []string
	// Map's keys match [A-Za-z_][A-Za-z0-9_]*, else the request is S001.
	Map map[string]string
}

// CreateRequest asks for a sandbox.
type CreateRequest struct {
	// Image is a name of the catalog that is on the allow-list.
	Image string
	// CPUs (1 to 255) and MemoryMiB (64 to 1 TiB) are the VM's size; nil takes
	// the configuration's default.
	CPUs, MemoryMiB *uint32
	// Name is a free label of at most 4096 bytes; it need not be unique.
	Name *string
	// Network asks for a network interface: without it there is none but loopback.
	Network bool
	// Policy narrows what a network reaches; nil is all but what is always denied.
	// Its HostPorts are the operator's, whatever it says. Not without Network.
	Policy *egress.Policy
	// Publish are ports of the host that lead into the sandbox. Not without Network.
	Publish []PublishedPort
	// IdleTimeoutSecs ends the sandbox after that time without activity; nil
	// takes the configuration's default, 0 ends it as soon as it is idle.
	IdleTimeoutSecs *uint64
	// Env is laid over the image's environment.
	Env Env
}

// Created is the reply of Create.
type Created struct {
	// SandboxID is a UUID in its canonical form; Image is the request's.
	SandboxID, Image string
	// Published are the ports of the request, each with the host's port that was
	// taken.
	Published []PublishedPort
}

// ExecRequest asks for a program in a sandbox.
type ExecRequest struct {
	SandboxID string
	// Cmd, Args and Argv are the contract's three shapes of a command: Argv
	// alone, a line in Cmd alone, or a program in Cmd with Args.
	Cmd        string
	Args, Argv []string
	// StdinB64 is base64; nil and "" are an empty stdin.
	StdinB64 *string
	// Env is laid over the sandbox's environment for this program alone.
	Env Env
	// TimeoutMs is how long the program may run; nil is 300000. The
	// configuration's ceiling holds for both.
	TimeoutMs *uint64
	// Workdir is where it runs; nil is "/".
	Workdir *string
}

// ExecReply is how a program ended.
type ExecReply struct {
	// Stdout and Stderr are valid UTF-8, made from at most 1 MiB of each stream;
	// the flags tell that there was more.
	Stdout, Stderr                   string
	StdoutTruncated, StderrTruncated bool
	// ExitCode is the program's, 128 + the signal that ended it, or 127 and 126
	// for a program that is not there or may not be run.
	ExitCode int32
	// TimedOut is always false: a program that runs out of time is S200.
	TimedOut bool
	// DurationMs is the wall time of the call in the sandbox.
	DurationMs uint64
	// Success tells that ExitCode is 0.
	Success bool
}

// RunRequest asks for a sandbox, a program in it, and the sandbox's end.
type RunRequest struct {
	Image string
	// Code is run by the interpreter that Lang names, see Interpreter.
	Code, Lang string
	// Files are written before the code, in order.
	Files []RunFile
	// Env is both the sandbox's and the program's.
	Env       Env
	StdinB64  *string
	TimeoutMs *uint64
	// KeepSandbox leaves the sandbox running, also when a step fails.
	KeepSandbox bool
}

// RunFile is a text file beside the code of a run.
type RunFile struct{ Path, Content string }

// RunReply is the reply of Run.
type RunReply struct {
	ExecReply
	// SandboxID is set where the sandbox was kept, nil otherwise.
	SandboxID *string
}

// Summary is one sandbox in a listing.
type Summary struct {
	SandboxID string
	// Name is nil where Create got none.
	Name  *string
	Image string
	// AgeSecs is the time since its creation.
	AgeSecs uint64
	// ExecInProgress tells that ExecInFlight, the number of programs that run, is
	// not 0; ExecSlotsFree is how many more would be admitted.
	ExecInProgress              bool
	ExecInFlight, ExecSlotsFree uint32
	// Stopped tells that its end is under way.
	Stopped bool
}

// FileInfo describes a file, not following a link.
type FileInfo struct {
	// Name is valid UTF-8: a name that is not was changed and cannot be used as a
	// path.
	Name             string
	IsDir, IsSymlink bool
	// Size is in bytes, for a link the length of its target.
	Size uint64
	// Mode is octal with four digits or more, "0644".
	Mode string
	// Mtime is in seconds since 1970.
	Mtime int64
}

// MakeDirRequest asks for a directory. Mode is octal digits.
type MakeDirRequest struct {
	SandboxID, Path, Mode string
	// Parents makes missing directories above it, and takes one that is there.
	Parents bool
}

// RemoveRequest asks for a removal.
type RemoveRequest struct {
	SandboxID, Path string
	// Recursive removes a directory that has entries.
	Recursive bool
}

// ChmodRequest sets a mode, octal digits, and an owner where not nil.
type ChmodRequest struct {
	SandboxID, Path, Mode string
	UID, GID              *uint32
	// Recursive goes on to what is below, but not through links.
	Recursive bool
}

// MoveRequest renames Src to Dst.
type MoveRequest struct {
	SandboxID, Src, Dst string
	// Overwrite replaces what is at Dst.
	Overwrite bool
}

// GrepRequest searches files, see guest.GrepOptions.
type GrepRequest struct {
	SandboxID, Path, Pattern   string
	Recursive, IgnoreCase      bool
	IncludeGlobs, ExcludeGlobs []string
	MaxMatches, MaxLineBytes   uint64
}

// GrepReply is what a search found.
type GrepReply struct {
	// Matches are in the order of their paths.
	Matches []Match
	// Truncated tells that MaxMatches was reached, or that the reply was full.
	Truncated bool
}

// Match is a line that matches.
type Match struct {
	Path string
	// Line counts from 1.
	Line    uint64
	Content string
}

// SedRequest replaces in files, see guest.SedOptions. Exactly one of Files, not
// empty, and Path is given.
type SedRequest struct {
	SandboxID                    string
	Files                        []string
	Path                         *string
	Pattern, Replacement         string
	Regex, FirstOnly, IgnoreCase bool
	Recursive                    bool
	IncludeGlobs, ExcludeGlobs   []string
}

// SedReply is what became of each file.
type SedReply struct {
	Results           []SedResult
	TotalReplacements uint64
}

// SedResult is what became of one file.
type SedResult struct {
	Path         string
	Replacements uint64
	Success      bool
	// Error is nil where Success is set.
	Error *string
}

// WriteRequest makes or replaces a file. Exactly one of Content, ContentB64 and
// Stream is its body; else it is S001.
type WriteRequest struct {
	SandboxID, Path string
	// Mode is octal digits.
	Mode string
	// Parents makes missing directories above it.
	Parents bool
	// Content is the body as it is, ContentB64 as base64.
	Content, ContentB64 *string
	// Stream opens a body that is read to its io.EOF. It is called once, when
	// everything else about the request is right, or not at all; ctx outlives
	// the reading and ends when it stalls. WriteFile closes the body, which must
	// make a Read that is under way return.
	Stream func(ctx context.Context) (io.ReadCloser, error)
}

// Written is the reply of WriteFile.
type Written struct {
	BytesWritten uint64
	// Path is the request's.
	Path string
}
