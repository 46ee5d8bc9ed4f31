package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/guest"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
)

// How long a file operation may take: one on a single path, and one that may
// walk or copy a tree.
const (
	pathTimeout = time.Minute
	treeTimeout = 10 * time.Minute
)

// What one reply may hold. A message to the engine has at most 16 MiB, and text
// takes up to six bytes for one in JSON.
const (
	// maxFound bounds paths and lines of grep and sed, in bytes.
	maxFound = 2 << 20
	// maxListing bounds a listing in bytes of JSON, of which an entry takes
	// entryJSON beside its name.
	maxListing = 15 << 20
	entryJSON  = 128
)

// fileOp runs one file operation on the agent of a sandbox, within limit. path
// is what an error is about that does not say so itself.
func fileOp[T any](ctx context.Context, m *Manager, id, path string, limit time.Duration,
	do func(context.Context, *guest.Client) (T, error),
) (T, error) {
	var none T
	id, err := canonicalID(id)
	if err != nil {
		return none, err
	}
	v, err := m.use(id, forOp)
	if err != nil {
		return none, err
	}
	defer v.done()
	ctx, cut := v.within(ctx)
	defer cut(nil)
	ctx, cancel := context.WithTimeoutCause(ctx, limit,
		fault.FileRefused(path, fmt.Sprintf("the operation did not end within %v", limit), context.DeadlineExceeded))
	defer cancel()
	out, err := do(ctx, v.machine.Guest())
	if err != nil {
		return none, m.fileFault(ctx, v.entry, path, err)
	}
	return out, nil
}

// fileFault is err as the fault that it is or holds; S216 for anything else. What
// ended ctx, other than its caller, is told in place of err.
func (m *Manager) fileFault(ctx context.Context, e *entry, path string, err error) error {
	var known *fault.Error
	var ended *vm.EndError
	switch cause := context.Cause(ctx); {
	case errors.Is(cause, errStopped), m.stoppedUnder(e, err):
		return fault.FileRefused(path, errStopped.Error(), err)
	case errors.As(cause, &ended):
		return fault.FileRefused(path, ended.Error(), ended)
	case errors.As(cause, &known):
		return known
	}
	if errors.As(err, &known) {
		return known
	}
	return fault.FileRefused(path, err.Error(), err)
}

// nothing is the result of an operation that has none.
type nothing struct{}

// ListDir implements Functions. A directory that one reply cannot hold is S216.
func (m *Manager) ListDir(ctx context.Context, id, path string) ([]FileInfo, error) {
	return fileOp(ctx, m, id, path, pathTimeout, func(ctx context.Context, g *guest.Client) ([]FileInfo, error) {
		entries, err := g.ListDir(ctx, path, maxListing/entryJSON)
		if err != nil {
			return nil, err
		}
		infos := make([]FileInfo, len(entries))
		room := maxListing
		for i, entry := range entries {
			infos[i] = fileInfo(entry)
			if room -= entryJSON + jsonSize(infos[i].Name); room < 0 {
				return nil, fault.FileRefused(path, fmt.Sprintf("has %d entries, too many for one reply: run find or ls in the sandbox", len(entries)), nil)
			}
		}
		return infos, nil
	})
}

// jsonSize is how many bytes a text takes in JSON, at most.
func jsonSize(text string) int {
	quoted, err := json.Marshal(text)
	if err != nil { // a string always encodes
		return 6 * len(text)
	}
	return len(quoted)
}

// Stat implements Functions.
func (m *Manager) Stat(ctx context.Context, id, path string) (FileInfo, error) {
	return fileOp(ctx, m, id, path, pathTimeout, func(ctx context.Context, g *guest.Client) (FileInfo, error) {
		entry, err := g.Stat(ctx, path)
		return fileInfo(entry), err
	})
}

func fileInfo(e guest.Entry) FileInfo {
	return FileInfo{
		Name: lossyUTF8([]byte(e.Name)), IsDir: e.Type == guest.Directory, IsSymlink: e.Type == guest.Symlink,
		Size: e.Size, Mode: guest.FormatMode(e.Mode), Mtime: e.MtimeUnix,
	}
}

// MakeDir implements Functions.
func (m *Manager) MakeDir(ctx context.Context, req MakeDirRequest) (created bool, err error) {
	return fileOp(ctx, m, req.SandboxID, req.Path, pathTimeout, func(ctx context.Context, g *guest.Client) (bool, error) {
		mode, err := guest.ParseMode(req.Mode)
		if err != nil {
			return false, err
		}
		return g.MakeDir(ctx, req.Path, mode, req.Parents)
	})
}

// Remove implements Functions.
func (m *Manager) Remove(ctx context.Context, req RemoveRequest) error {
	_, err := fileOp(ctx, m, req.SandboxID, req.Path, treeTimeout, func(ctx context.Context, g *guest.Client) (nothing, error) {
		return nothing{}, g.Remove(ctx, req.Path, req.Recursive)
	})
	return err
}

// Chmod implements Functions.
func (m *Manager) Chmod(ctx context.Context, req ChmodRequest) (updated uint64, err error) {
	return fileOp(ctx, m, req.SandboxID, req.Path, treeTimeout, func(ctx context.Context, g *guest.Client) (uint64, error) {
		mode, err := guest.ParseMode(req.Mode)
		if err != nil {
			return 0, err
		}
		return g.Chmod(ctx, req.Path, guest.ChmodOptions{Mode: mode, UID: req.UID, GID: req.GID, Recursive: req.Recursive})
	})
}

// Move implements Functions.
func (m *Manager) Move(ctx context.Context, req MoveRequest) error {
	_, err := fileOp(ctx, m, req.SandboxID, req.Src, treeTimeout, func(ctx context.Context, g *guest.Client) (nothing, error) {
		return nothing{}, g.Move(ctx, req.Src, req.Dst, req.Overwrite)
	})
	return err
}

// Grep implements Functions. A reply that is full ends the search as MaxMatches
// does.
func (m *Manager) Grep(ctx context.Context, req GrepRequest) (GrepReply, error) {
	return fileOp(ctx, m, req.SandboxID, req.Path, treeTimeout, func(ctx context.Context, g *guest.Client) (GrepReply, error) {
		found, truncated, err := g.Grep(ctx, guest.GrepOptions{
			Path: req.Path, Pattern: req.Pattern, Recursive: req.Recursive, IgnoreCase: req.IgnoreCase,
			Include: req.IncludeGlobs, Exclude: req.ExcludeGlobs,
			MaxMatches: req.MaxMatches, MaxLineBytes: req.MaxLineBytes, ReplyLimit: maxFound,
		})
		if err != nil {
			return GrepReply{}, err
		}
		reply := GrepReply{Matches: make([]Match, len(found)), Truncated: truncated}
		for i, f := range found {
			reply.Matches[i] = Match{Path: lossyUTF8([]byte(f.Path)), Line: f.Line, Content: lossyUTF8([]byte(f.Content))}
		}
		return reply, nil
	})
}

// Sed implements Functions. Its form is looked at before the sandbox is (S210).
func (m *Manager) Sed(ctx context.Context, req SedRequest) (SedReply, error) {
	id, err := canonicalID(req.SandboxID)
	if err != nil {
		return SedReply{}, err
	}
	if (len(req.Files) > 0) == (req.Path != nil) {
		return SedReply{}, fault.SedTargets()
	}
	about := ""
	if req.Path != nil {
		about = *req.Path
	}
	return fileOp(ctx, m, id, about, treeTimeout, func(ctx context.Context, g *guest.Client) (SedReply, error) {
		results, total, err := g.Sed(ctx, guest.SedOptions{
			Files: req.Files, Path: req.Path, Pattern: req.Pattern, Replacement: req.Replacement,
			Literal: !req.Regex, FirstOnly: req.FirstOnly, IgnoreCase: req.IgnoreCase,
			Recursive: req.Recursive, Include: req.IncludeGlobs, Exclude: req.ExcludeGlobs, ReplyLimit: maxFound,
		})
		if err != nil {
			return SedReply{}, err
		}
		reply := SedReply{Results: make([]SedResult, len(results)), TotalReplacements: total}
		for i, r := range results {
			reply.Results[i] = SedResult{Path: lossyUTF8([]byte(r.Path)), Replacements: r.Replacements, Success: r.Error == ""}
			if r.Error != "" {
				text := lossyUTF8([]byte(r.Error))
				reply.Results[i].Error = &text
			}
		}
		return reply, nil
	})
}
