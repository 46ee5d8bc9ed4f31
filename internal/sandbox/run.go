package sandbox

import (
	"context"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/guest"
)

// The steps of a run, as its errors name them (contract: run).
const (
	stepCreate  = "create"
	stepSibling = "fs::write (sibling file)"
	stepCode    = "fs::write (code)"
	stepExec    = "exec"
)

// Run implements Functions. What is wrong with the program itself is told before
// anything is booted, as an error of the step exec.
func (m *Manager) Run(ctx context.Context, req RunRequest) (RunReply, error) {
	create := CreateRequest{Image: req.Image, Env: req.Env}
	admission, err := m.admit(create)
	if err != nil {
		return RunReply{}, fault.DuringRun(stepCreate, "", err)
	}
	interpreter, path := Interpreter(req.Lang)
	p, err := m.newProgram(ExecRequest{
		Cmd: interpreter, Args: []string{path}, Env: req.Env, StdinB64: req.StdinB64, TimeoutMs: req.TimeoutMs,
	})
	if err == nil {
		if _, bad := decodeBase64(p.stdinB64); bad != nil {
			err = fault.BadStdin(bad)
		}
	}
	if err != nil {
		m.freeSlot()
		return RunReply{}, fault.DuringRun(stepExec, "", err)
	}
	e, err := m.bootAdmitted(ctx, admission, create)
	if err != nil {
		return RunReply{}, fault.DuringRun(stepCreate, "", err)
	}
	if !req.KeepSandbox {
		defer m.discard(e)
	}
	reply, err := m.runIn(ctx, e, req, path, p)
	if err != nil {
		return RunReply{}, err
	}
	out := RunReply{ExecReply: reply}
	if req.KeepSandbox {
		out.SandboxID = &e.id
	}
	return out, nil
}

// runIn writes and runs the program. The sandbox counts as busy all along.
func (m *Manager) runIn(ctx context.Context, e *entry, req RunRequest, path string, p *program) (ExecReply, error) {
	v, err := m.use(e.id, forOp)
	if err != nil {
		return ExecReply{}, fault.DuringRun(stepCode, e.id, err)
	}
	defer v.done()
	for _, file := range req.Files {
		if err := m.writeText(ctx, e.id, file.Path, file.Content); err != nil {
			return ExecReply{}, fault.DuringRun(stepSibling, e.id, err)
		}
	}
	if err := m.writeText(ctx, e.id, path, req.Code); err != nil {
		return ExecReply{}, fault.DuringRun(stepCode, e.id, err)
	}
	reply, err := m.exec(ctx, e.id, p)
	if err != nil {
		return ExecReply{}, fault.DuringRun(stepExec, e.id, err)
	}
	return reply, nil
}

func (m *Manager) writeText(ctx context.Context, id, path, content string) error {
	_, err := m.WriteFile(ctx, WriteRequest{
		SandboxID: id, Path: path, Mode: guest.FormatMode(0o644), Parents: true, Content: &content,
	})
	return err
}

// discard ends a run's sandbox at once: there is nothing in it to be saved. It
// returns when the VM is gone; what does not work is only logged.
func (m *Manager) discard(e *entry) {
	m.mu.Lock()
	stop := m.claimLocked(e, machine.Kill)
	m.mu.Unlock()
	<-stop.done
}
