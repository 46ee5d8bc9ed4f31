package adapter

import (
	"context"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/contract"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/sandbox"
)

func ls(ctx context.Context, core Core, req contract.LsRequest) (contract.LsResponse, error) {
	infos, err := core.ListDir(ctx, req.SandboxID, req.Path)
	reply := contract.LsResponse{Entries: make([]contract.FsEntry, len(infos))}
	for i, info := range infos {
		reply.Entries[i] = entry(info)
	}
	return reply, err
}

func entry(i sandbox.FileInfo) contract.FsEntry {
	return contract.FsEntry{Name: i.Name, IsDir: i.IsDir, Size: i.Size, Mode: i.Mode, Mtime: i.Mtime, IsSymlink: i.IsSymlink}
}

func stat(ctx context.Context, core Core, req contract.StatRequest) (contract.StatResponse, error) {
	info, err := core.Stat(ctx, req.SandboxID, req.Path)
	return contract.StatResponse(entry(info)), err
}

func mkdir(ctx context.Context, core Core, req contract.MkdirRequest) (contract.MkdirResponse, error) {
	created, err := core.MakeDir(ctx, sandbox.MakeDirRequest(req))
	return contract.MkdirResponse{Created: created}, err
}

func rm(ctx context.Context, core Core, req contract.RmRequest) (contract.RmResponse, error) {
	err := core.Remove(ctx, sandbox.RemoveRequest(req))
	return contract.RmResponse{Removed: true}, err
}

func chmod(ctx context.Context, core Core, req contract.ChmodRequest) (contract.ChmodResponse, error) {
	updated, err := core.Chmod(ctx, sandbox.ChmodRequest(req))
	return contract.ChmodResponse{Updated: updated}, err
}

func mv(ctx context.Context, core Core, req contract.MvRequest) (contract.MvResponse, error) {
	err := core.Move(ctx, sandbox.MoveRequest(req))
	return contract.MvResponse{Moved: true}, err
}

func grep(ctx context.Context, core Core, req contract.GrepRequest) (contract.GrepResponse, error) {
	found, err := core.Grep(ctx, sandbox.GrepRequest{
		SandboxID: req.SandboxID, Path: req.Path, Pattern: req.Pattern, Recursive: req.Recursive, IgnoreCase: req.IgnoreCase,
		IncludeGlobs: req.IncludeGlob, ExcludeGlobs: req.ExcludeGlob, MaxMatches: req.MaxMatches, MaxLineBytes: req.MaxLineBytes,
	})
	reply := contract.GrepResponse{Matches: make([]contract.FsMatch, len(found.Matches)), Truncated: found.Truncated}
	for i, match := range found.Matches {
		reply.Matches[i] = contract.FsMatch(match)
	}
	return reply, err
}

func sed(ctx context.Context, core Core, req contract.SedRequest) (contract.SedResponse, error) {
	done, err := core.Sed(ctx, sandbox.SedRequest{
		SandboxID: req.SandboxID, Files: req.Files, Path: req.Path, Pattern: req.Pattern, Replacement: req.Replacement,
		Regex: req.Regex, FirstOnly: req.FirstOnly, IgnoreCase: req.IgnoreCase, Recursive: req.Recursive,
		IncludeGlobs: req.IncludeGlob, ExcludeGlobs: req.ExcludeGlob,
	})
	reply := contract.SedResponse{Results: make([]contract.FsSedFileResult, len(done.Results)), TotalReplacements: done.TotalReplacements}
	for i, result := range done.Results {
		reply.Results[i] = contract.FsSedFileResult(result)
	}
	return reply, err
}
