package agent

import (
	"bytes"
	"context"
	"strings"

	guestv1 "github.com/iii-hq/workers/sandbox-libkrun/api/guest/v1"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/agent/fsops"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
)

// batch collects results into messages of bounded size.
type batch[T any] struct {
	items []T
	size  int
	emit  func([]T) error
}

// add puts in an item of about size bytes, and emits what is there when it is
// enough.
func (b *batch[T]) add(item T, size int) error {
	b.items = append(b.items, item)
	if b.size += size; len(b.items) < batchItems && b.size < batchBytes {
		return nil
	}
	return b.flush()
}

func (b *batch[T]) flush() error {
	if len(b.items) == 0 {
		return nil
	}
	items := b.items
	b.items, b.size = nil, 0
	return b.emit(items)
}

// Grep implements the service.
func (f *Files) Grep(req *guestv1.GrepRequest, stream guestv1.FileService_GrepServer) error {
	opts := fsops.GrepOptions{
		Path: string(req.GetPath()), Pattern: req.GetPattern(), Recursive: req.GetRecursive(), IgnoreCase: req.GetIgnoreCase(),
		Include: texts(req.GetIncludeGlobs()), Exclude: texts(req.GetExcludeGlobs()),
		MaxMatches: req.GetMaxMatches(), MaxLineBytes: req.GetMaxLineBytes(),
	}
	return many(stream.Context(), f, f.onPath("grep", req.GetPath()), func(ctx context.Context, emit func(*guestv1.GrepResponse) error) error {
		out := batch[*guestv1.GrepMatch]{emit: func(matches []*guestv1.GrepMatch) error {
			return emit(&guestv1.GrepResponse{Matches: matches})
		}}
		truncated, err := fsops.Grep(ctx, opts, func(m fsops.Match) error {
			return out.add(&guestv1.GrepMatch{
				Path: []byte(m.Path), Line: m.Line, Content: bytes.Clone(m.Content), Continued: m.Continued,
			}, len(m.Path)+len(m.Content))
		})
		if err == nil {
			err = out.flush()
		}
		if err == nil {
			err = emit(&guestv1.GrepResponse{Done: &guestv1.GrepDone{Truncated: truncated}})
		}
		return err
	}, stream.Send)
}

// Sed implements the service.
func (f *Files) Sed(req *guestv1.SedRequest, stream guestv1.FileService_SedServer) error {
	opts := fsops.SedOptions{
		Files: texts(req.GetFiles()), Pattern: req.GetPattern(), Replacement: req.GetReplacement(), Literal: req.GetLiteral(),
		FirstOnly: req.GetFirstOnly(), IgnoreCase: req.GetIgnoreCase(), Recursive: req.GetRecursive(),
		Include: texts(req.GetIncludeGlobs()), Exclude: texts(req.GetExcludeGlobs()),
	}
	if req.Path != nil {
		path := string(req.GetPath())
		opts.Path = &path
	}
	return many(stream.Context(), f, f.onPath("sed", req.GetPath()), func(ctx context.Context, emit func(*guestv1.SedResponse) error) error {
		out := batch[*guestv1.SedResult]{emit: func(results []*guestv1.SedResult) error {
			return emit(&guestv1.SedResponse{Results: results})
		}}
		err := fsops.Sed(ctx, opts, func(r fsops.SedResult) error {
			result := &guestv1.SedResult{Path: []byte(r.Path), Replacements: r.Replacements}
			if r.Err != nil {
				result.Error = strings.ToValidUTF8(fault.Of(r.Err).Message, "\uFFFD")
			}
			return out.add(result, len(r.Path)+len(result.GetError()))
		})
		if err == nil {
			err = out.flush()
		}
		return err
	}, stream.Send)
}

func texts(b [][]byte) []string {
	out := make([]string, len(b))
	for i := range b {
		out[i] = string(b[i])
	}
	return out
}
