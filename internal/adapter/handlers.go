package adapter

import (
	"context"
	"encoding/json"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/catalog"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/contract"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/sandbox"
)

// functions are what is registered, in the contract's order.
func (s *server) functions() []iii.Function {
	handlers := map[string]iii.Handler{
		"create":        handle(s, "create", create),
		"exec":          handle(s, "exec", exec),
		"stop":          handle(s, "stop", stop),
		"list":          handle(s, "list", list),
		"catalog::list": handle(s, "catalog::list", listImages),
		"run":           handle(s, "run", run),
		"fs::ls":        handle(s, "fs::ls", ls),
		"fs::stat":      handle(s, "fs::stat", stat),
		"fs::mkdir":     handle(s, "fs::mkdir", mkdir),
		"fs::rm":        handle(s, "fs::rm", rm),
		"fs::chmod":     handle(s, "fs::chmod", chmod),
		"fs::mv":        handle(s, "fs::mv", mv),
		"fs::grep":      handle(s, "fs::grep", grep),
		"fs::sed":       handle(s, "fs::sed", sed),
		"fs::write":     handle(s, "fs::write", s.write),
		"fs::read":      handle(s, "fs::read", s.read),
		"adapter::info": s.info,
	}
	var functions []iii.Function
	for _, f := range contract.Functions() {
		functions = append(functions, iii.Function{
			ID: contract.Prefix + f.Name, Description: f.Description,
			RequestFormat: f.Request, ResponseFormat: f.Response, Metadata: json.RawMessage("{}"),
			Handler: handlers[f.Name],
		})
	}
	return functions
}

// info needs no core and therefore never waits.
func (s *server) info(_ context.Context, call iii.Invocation) (json.RawMessage, error) {
	if _, err := contract.Decode[contract.AdapterInfoRequest](call.Data); err != nil {
		return nil, wireError(fault.Of(err))
	}
	return contract.Encode(contract.AdapterInfo{
		Adapter: contract.Adapter, AdapterVersion: s.cfg.Version,
		Contract: contract.ContractVersion{Major: contract.Major, Minor: contract.Minor},
	})
}

func create(ctx context.Context, core Core, req contract.CreateRequest) (contract.CreateResponse, error) {
	made, err := core.Create(ctx, sandbox.CreateRequest{
		Image: req.Image, CPUs: req.CPUs, MemoryMiB: req.MemoryMB, Name: req.Name,
		Network:         req.Network != nil && *req.Network,
		IdleTimeoutSecs: req.IdleTimeoutSecs, Env: sandbox.Env(req.Env),
	})
	return contract.CreateResponse(made), err
}

func exec(ctx context.Context, core Core, req contract.ExecRequest) (contract.ExecResponse, error) {
	reply, err := core.Exec(ctx, sandbox.ExecRequest{
		SandboxID: req.SandboxID, Cmd: req.Cmd, Args: req.Args, Argv: req.Argv, StdinB64: req.Stdin,
		Env: sandbox.Env(req.Env), TimeoutMs: req.TimeoutMs, Workdir: req.Workdir,
	})
	return execResponse(reply), err
}

func execResponse(r sandbox.ExecReply) contract.ExecResponse {
	return contract.ExecResponse{
		Stdout: r.Stdout, Stderr: r.Stderr, ExitCode: &r.ExitCode, TimedOut: r.TimedOut, DurationMs: r.DurationMs,
		Success: r.Success, StdoutTruncated: r.StdoutTruncated, StderrTruncated: r.StderrTruncated,
	}
}

func stop(ctx context.Context, core Core, req contract.StopRequest) (contract.StopResponse, error) {
	id, err := core.Stop(ctx, req.SandboxID, req.Wait)
	return contract.StopResponse{SandboxID: id, Stopped: true}, err
}

func list(_ context.Context, core Core, _ contract.ListRequest) (contract.ListResponse, error) {
	reply := contract.ListResponse{Sandboxes: []contract.SandboxSummary{}}
	for _, s := range core.List() {
		reply.Sandboxes = append(reply.Sandboxes, contract.SandboxSummary(s))
	}
	return reply, nil
}

func listImages(_ context.Context, core Core, _ contract.CatalogListRequest) (contract.CatalogListResponse, error) {
	reply := contract.CatalogListResponse{Images: []contract.CatalogEntry{}}
	for _, image := range core.Catalog() {
		kind := contract.PresetImage
		if image.Kind == catalog.Custom {
			kind = contract.CustomImage
		}
		reply.Images = append(reply.Images, contract.CatalogEntry{Name: image.Name, OCIRef: image.Ref, Kind: kind})
	}
	return reply, nil
}

func run(ctx context.Context, core Core, req contract.RunRequest) (contract.RunResponse, error) {
	in := sandbox.RunRequest{
		Image: req.Image, Code: req.Code, Lang: req.Lang, Env: sandbox.Env(req.Env),
		StdinB64: req.Stdin, TimeoutMs: req.TimeoutMs, KeepSandbox: req.KeepSandbox,
	}
	for _, file := range req.Files {
		in.Files = append(in.Files, sandbox.RunFile(file))
	}
	reply, err := core.Run(ctx, in)
	return contract.RunResponse{ExecResponse: execResponse(reply.ExecReply), SandboxID: reply.SandboxID}, err
}
