package guest

import (
	"context"
	"strings"
	"unicode/utf8"

	guestv1 "github.com/iii-hq/workers/sandbox-libkrun/api/guest/v1"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
)

// GrepOptions is a search in the guest's files.
type GrepOptions struct {
	// Path is a file or a directory, Pattern a regular expression in Rust's syntax.
	Path, Pattern string
	// Recursive walks a directory; without it one is refused.
	Recursive, IgnoreCase bool
	// Include and Exclude are gitignore patterns relative to Path.
	Include, Exclude []string
	// MaxMatches ends the search, 0 does not; MaxLineBytes cuts longer lines, 0
	// does not.
	MaxMatches, MaxLineBytes uint64
	// ReplyLimit is how much of paths and lines the caller can hold, in bytes. A
	// search that finds more ends there, as with MaxMatches.
	ReplyLimit int
}

// GrepMatch is a line that matches.
type GrepMatch struct {
	Path string
	// Line counts from 1.
	Line uint64
	// Content is the line without its end.
	Content string
}

// matchOverhead is what a match costs besides its path and content, about.
const matchOverhead = 64

// Grep searches and returns the matches in the order of their paths, and whether
// a limit ended it, so that there may be more.
func (c *Client) Grep(ctx context.Context, opts GrepOptions) (matches []GrepMatch, truncated bool, err error) {
	ctx, cancel := bounded(ctx)
	defer cancel()
	stream, err := c.files.Grep(ctx, &guestv1.GrepRequest{
		Path: []byte(opts.Path), Pattern: opts.Pattern, Recursive: opts.Recursive, IgnoreCase: opts.IgnoreCase,
		IncludeGlobs: blobs(opts.Include), ExcludeGlobs: blobs(opts.Exclude),
		MaxMatches: opts.MaxMatches, MaxLineBytes: opts.MaxLineBytes,
	})
	if err != nil {
		return nil, false, fileError(ctx, "grep", opts.Path, err)
	}
	out := gathering{left: opts.ReplyLimit}
	for {
		batch, err := stream.Recv()
		if isEOF(err) {
			err = errProtocol // its last message is the one with done
		}
		if err != nil {
			return nil, false, fileError(ctx, "grep", opts.Path, err)
		}
		for _, m := range batch.GetMatches() {
			if !out.add(m) {
				return out.matches, true, nil
			}
		}
		if done := batch.GetDone(); done != nil {
			return out.matches, done.GetTruncated(), nil
		}
	}
}

// gathering puts matches together within a limit.
type gathering struct {
	matches []GrepMatch
	left    int
	// open holds the pieces of a line that goes on.
	open strings.Builder
}

// add takes a match, or a piece of one, and reports whether there is room for
// more. What does not fit is left out, but for a first line, which is cut.
func (g *gathering) add(m *guestv1.GrepMatch) bool {
	size := len(m.GetContent())
	if g.open.Len() == 0 {
		size += len(m.GetPath()) + matchOverhead
	}
	fits := size <= g.left
	if !fits {
		if len(g.matches) > 0 {
			return false
		}
		cut := max(0, min(len(m.GetContent()), g.left))
		for cut > 0 && cut < len(m.GetContent()) && !utf8.RuneStart(m.GetContent()[cut]) {
			cut--
		}
		g.open.Write(m.GetContent()[:cut])
		g.open.WriteString("…")
	} else {
		g.left -= size
		g.open.Write(m.GetContent())
		if m.GetContinued() {
			return true
		}
	}
	g.matches = append(g.matches, GrepMatch{Path: string(m.GetPath()), Line: m.GetLine(), Content: g.open.String()})
	g.open.Reset()
	return fits
}

// SedOptions is a replacement in the guest's files.
type SedOptions struct {
	// Exactly one of the two: files to rewrite, or a file or directory to walk.
	Files []string
	Path  *string
	// Pattern and Replacement are in Rust's syntax, or plain text with Literal.
	Pattern, Replacement string
	Literal              bool
	// FirstOnly replaces only the first match of each line.
	FirstOnly, IgnoreCase bool
	// These count with Path alone.
	Recursive        bool
	Include, Exclude []string
	// ReplyLimit is how much of paths and errors the caller can hold, in bytes.
	ReplyLimit int
}

// SedResult is what became of one file.
type SedResult struct {
	Path         string
	Replacements uint64
	// Error is empty for a file that was done; else nothing in it was changed.
	Error string
}

// Sed replaces in files and returns a result for each, in their order, and the sum
// of the replacements. When the results do not fit ReplyLimit it is S216, and
// what was replaced stays so.
func (c *Client) Sed(ctx context.Context, opts SedOptions) (results []SedResult, total uint64, err error) {
	if (len(opts.Files) > 0) == (opts.Path != nil) {
		return nil, 0, fault.SedTargets()
	}
	ctx, cancel := bounded(ctx)
	defer cancel()
	req := &guestv1.SedRequest{
		Files: blobs(opts.Files), Pattern: opts.Pattern, Replacement: opts.Replacement, Literal: opts.Literal,
		FirstOnly: opts.FirstOnly, IgnoreCase: opts.IgnoreCase, Recursive: opts.Recursive,
		IncludeGlobs: blobs(opts.Include), ExcludeGlobs: blobs(opts.Exclude),
	}
	shown := ""
	if opts.Path != nil {
		req.Path, shown = []byte(*opts.Path), *opts.Path
	}
	stream, err := c.files.Sed(ctx, req)
	if err != nil {
		return nil, 0, fileError(ctx, "sed", shown, err)
	}
	left := opts.ReplyLimit
	for {
		batch, err := stream.Recv()
		if isEOF(err) {
			return results, total, nil
		}
		if err != nil {
			return nil, 0, fileError(ctx, "sed", shown, err)
		}
		for _, r := range batch.GetResults() {
			if left -= len(r.GetPath()) + len(r.GetError()) + matchOverhead; left < 0 {
				return nil, 0, fault.FileRefused(shown, "more files than one reply can hold: some are rewritten already; narrow it with include_glob", nil)
			}
			results = append(results, SedResult{Path: string(r.GetPath()), Replacements: r.GetReplacements(), Error: r.GetError()})
			total += r.GetReplacements()
		}
	}
}

func blobs(s []string) [][]byte {
	out := make([][]byte, len(s))
	for i := range s {
		out[i] = []byte(s[i])
	}
	return out
}
