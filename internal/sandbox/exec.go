package sandbox

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/guest"
)

// defaultExecTimeoutMs is a program's time limit where the request has none
// (contract: exec).
const defaultExecTimeoutMs = 300_000

// errNUL is a program that no system could start.
var errNUL = errors.New("command, environment or workdir has a NUL byte")

// program is an exec whose request keeps the rules that need no sandbox.
type program struct {
	argv, env []string
	stdinB64  string
	timeout   time.Duration
	workdir   string
}

func (m *Manager) newProgram(req ExecRequest) (*program, error) {
	argv, err := commandLine(req.Cmd, req.Args, req.Argv)
	if err != nil {
		return nil, err
	}
	p := &program{argv: argv, timeout: m.execTimeout(req.TimeoutMs)}
	if p.env, err = req.Env.entries(); err != nil {
		return nil, err
	}
	if req.StdinB64 != nil {
		p.stdinB64 = *req.StdinB64
	}
	if req.Workdir != nil {
		p.workdir = *req.Workdir
	}
	return p, nil
}

// execTimeout is the limit in force: the default is below the ceiling too.
func (m *Manager) execTimeout(ms *uint64) time.Duration {
	limit := uint64(defaultExecTimeoutMs)
	if ms != nil {
		limit = *ms
	}
	return clamped(min(limit, m.cfg.MaxExecTimeoutMs), time.Millisecond)
}

// Exec implements Functions. The order of its checks is the id, the command, the
// environment (S001), the sandbox (S002, S004), the slot (S003), stdin (S001).
func (m *Manager) Exec(ctx context.Context, req ExecRequest) (ExecReply, error) {
	id, err := canonicalID(req.SandboxID)
	if err != nil {
		return ExecReply{}, err
	}
	p, err := m.newProgram(req)
	if err != nil {
		return ExecReply{}, err
	}
	return m.exec(ctx, id, p)
}

func (m *Manager) exec(ctx context.Context, id string, p *program) (ExecReply, error) {
	v, err := m.use(id, forExec)
	if err != nil {
		return ExecReply{}, err
	}
	defer v.done()
	stdin, err := decodeBase64(p.stdinB64)
	if err != nil {
		return ExecReply{}, fault.BadStdin(err)
	}
	if p.timeout == 0 {
		return ExecReply{}, fault.ExecTimedOut(0)
	}
	if hasNUL(p.argv) || hasNUL(p.env) || hasNUL([]string{p.workdir}) {
		return ExecReply{}, fault.StartFailed(errNUL)
	}
	var stdout, stderr Capture
	began := time.Now()
	result, err := execute(ctx, v.machine.Guest(),
		guest.Command{Argv: p.argv, Env: p.env, Workdir: p.workdir, Timeout: p.timeout},
		guest.IO{Stdin: bytes.NewReader(stdin), Stdout: &stdout, Stderr: &stderr})
	if m.stoppedUnder(v.entry, err) {
		return ExecReply{}, fault.StoppedMeanwhile(id)
	}
	if err != nil {
		return ExecReply{}, err
	}
	return ExecReply{
		Stdout: stdout.Text(), StdoutTruncated: stdout.Truncated(),
		Stderr: stderr.Text(), StderrTruncated: stderr.Truncated(),
		ExitCode: int32(result.ExitCode), Success: result.ExitCode == 0,
		DurationMs: uint64(time.Since(began) / time.Millisecond),
	}, nil
}

func hasNUL(list []string) bool {
	return slices.ContainsFunc(list, func(s string) bool { return strings.ContainsRune(s, 0) })
}
