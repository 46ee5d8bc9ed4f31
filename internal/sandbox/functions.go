package sandbox

import (
	"context"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/catalog"
)

// Functions are the contract's functions as Manager serves them, safe for
// concurrent use. All errors have a *fault.Error in their chain; fault.Of finds
// it. Every call is bounded. A call ends early when its context does: whoever
// wants a program to run on when its caller is gone passes a context that lives
// on.
type Functions interface {
	// Catalog lists the known images: presets in their order, then custom images
	// by name, allowed or not.
	Catalog() []catalog.Image
	// Create boots a sandbox and returns when its agent has answered. On error
	// nothing of it is left.
	Create(ctx context.Context, req CreateRequest) (Created, error)
	// Exec runs one program to its end.
	Exec(ctx context.Context, req ExecRequest) (ExecReply, error)
	// Run is Create, WriteFile, Exec and the sandbox's end in one; its errors are
	// made by fault.DuringRun.
	Run(ctx context.Context, req RunRequest) (RunReply, error)
	// Stop ends a sandbox and returns its id in canonical form. With wait it
	// returns when nothing of the sandbox is left; without, that may take a
	// moment longer.
	Stop(ctx context.Context, id string, wait bool) (string, error)
	// List lists the sandboxes by creation, oldest first. It never blocks.
	List() []Summary

	// ListDir describes what is in a directory, by name.
	ListDir(ctx context.Context, id, path string) ([]FileInfo, error)
	Stat(ctx context.Context, id, path string) (FileInfo, error)
	// MakeDir reports whether the directory was made: with Parents it may have
	// been there.
	MakeDir(ctx context.Context, req MakeDirRequest) (created bool, err error)
	Remove(ctx context.Context, req RemoveRequest) error
	// Chmod returns how many entries it set.
	Chmod(ctx context.Context, req ChmodRequest) (updated uint64, err error)
	Move(ctx context.Context, req MoveRequest) error
	Grep(ctx context.Context, req GrepRequest) (GrepReply, error)
	Sed(ctx context.Context, req SedRequest) (SedReply, error)
	// WriteFile makes or replaces a file in one step. A Stream that gives nothing
	// for 5 s, or fails, is S218.
	WriteFile(ctx context.Context, req WriteRequest) (Written, error)
	// OpenFile begins to read a file. ctx bounds this call alone; the caller
	// closes the File.
	OpenFile(ctx context.Context, id, path string) (*File, error)
}
