package adapter

import (
	"context"
	"encoding/json"
	"math"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/catalog"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/contract"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/egress"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/sandbox"
)

// functions are what is registered, in the contract's order.
func (s *server) functions() []iii.Function {
	handlers := map[string]iii.Handler{
		"create":        handle(s, "create", s.create),
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
	described := contract.Functions()
	if s.cfg.Extensions {
		described = contract.Extended()
	}
	for _, f := range described {
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

func (s *server) create(ctx context.Context, core Core, req contract.CreateRequest) (contract.CreateResponse, error) {
	publish, err := s.publish(req.Publish)
	if err != nil {
		return contract.CreateResponse{}, err
	}
	made, err := core.Create(ctx, sandbox.CreateRequest{
		Image: req.Image, CPUs: req.CPUs, MemoryMiB: req.MemoryMB, Name: req.Name,
		Network: req.Network != nil && *req.Network, Policy: policy(req.NetworkPolicy), Publish: publish,
		IdleTimeoutSecs: req.IdleTimeoutSecs, Env: sandbox.Env(req.Env),
	})
	resp := contract.CreateResponse{SandboxID: made.SandboxID, Image: made.Image}
	for _, p := range made.Published {
		resp.Published = append(resp.Published, contract.PublishedPort{HostPort: uint32(p.Host), GuestPort: uint32(p.Guest)})
	}
	return resp, err
}

// policy is the extension network_policy. A policy that asks for less must not be
// overlooked, so it counts whether or not the extensions are in the schemas.
func policy(p *contract.NetworkPolicy) *egress.Policy {
	if p == nil {
		return nil
	}
	out := &egress.Policy{Mode: egress.Mode(p.Mode)}
	for _, rule := range p.Allow {
		r := egress.Rule{Ports: rule.Ports}
		if rule.CIDR != nil {
			r.CIDR = *rule.CIDR
		}
		if rule.Name != nil {
			r.Name = *rule.Name
		}
		if rule.Protocol != nil {
			r.Protocol = egress.Protocol(*rule.Protocol)
		}
		out.Allow = append(out.Allow, r)
	}
	return out
}

// publish is the extension of that name, which gives callers something of the
// host: that is the operator's to allow.
func (s *server) publish(ports []contract.PublishedPort) ([]sandbox.PublishedPort, error) {
	if len(ports) > 0 && !s.cfg.Extensions {
		return nil, fault.InvalidRequest("publish is an extension that this adapter's operator has not switched on (III_SANDBOX_EXTENSIONS=1)")
	}
	var out []sandbox.PublishedPort
	for i, p := range ports {
		if p.HostPort > math.MaxUint16 || p.GuestPort > math.MaxUint16 {
			return nil, fault.InvalidRequest("publish[%d] has a port above %d", i, math.MaxUint16)
		}
		out = append(out, sandbox.PublishedPort{Host: uint16(p.HostPort), Guest: uint16(p.GuestPort)})
	}
	return out, nil
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
