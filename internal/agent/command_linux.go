package agent

import (
	"bytes"
	"errors"
	"math"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	guestv1 "github.com/iii-hq/workers/sandbox-libkrun/api/guest/v1"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/agent/procs"
)

// Exit codes of a program that was not started, as shells have them.
const (
	exitNotFound   = 127
	exitCannotExec = 126
)

// command checks a start and makes it a procs.Command. A limit of 0 is none.
func (s *Service) command(start *guestv1.ExecStart) (cmd procs.Command, limit time.Duration, err error) {
	bad := func(format string, args ...any) error { return status.Errorf(codes.InvalidArgument, format, args...) }
	if len(start.GetArgv()) == 0 {
		return cmd, 0, bad("argv is empty")
	}
	for i, arg := range start.GetArgv() {
		if bytes.IndexByte(arg, 0) >= 0 {
			return cmd, 0, bad("argv[%d] has a NUL byte", i)
		}
		cmd.Argv = append(cmd.Argv, string(arg))
	}
	cmd.Env = s.env
	if extra := start.GetEnv(); len(extra) > 0 {
		list := make([]string, len(extra))
		for i, kv := range extra {
			if bytes.IndexByte(kv, '=') < 1 || bytes.IndexByte(kv, 0) >= 0 {
				return cmd, 0, bad("env[%d] is not KEY=value without NUL bytes", i)
			}
			list[i] = string(kv)
		}
		cmd.Env = overlay(s.env, list)
	}
	cmd.Dir = string(start.GetWorkdir())
	if strings.IndexByte(cmd.Dir, 0) >= 0 {
		return cmd, 0, bad("workdir has a NUL byte")
	}
	if cmd.Dir != "" && cmd.Dir[0] != '/' {
		cmd.Dir = "/" + cmd.Dir
	}
	if tty := start.GetTty(); tty != nil {
		size, err := terminalSize(tty)
		if err != nil {
			return cmd, 0, err
		}
		cmd.TTY = &size
	}
	if ms := start.GetTimeoutMs(); ms <= math.MaxInt64/uint64(time.Millisecond) {
		limit = time.Duration(ms) * time.Millisecond
	}
	return cmd, limit, nil
}

// overlay returns base with extra laid over it, each key once, the last value
// of a key at the place of its first.
func overlay(base, extra []string) []string {
	out := make([]string, 0, len(base)+len(extra))
	place := make(map[string]int, len(base)+len(extra))
	for _, list := range [][]string{base, extra} {
		for _, kv := range list {
			key, _, _ := strings.Cut(kv, "=")
			if i, ok := place[key]; ok {
				out[i] = kv
				continue
			}
			place[key] = len(out)
			out = append(out, kv)
		}
	}
	return out
}

func terminalSize(r *guestv1.Resize) (procs.Size, error) {
	if r.GetRows() > math.MaxUint16 || r.GetCols() > math.MaxUint16 {
		return procs.Size{}, status.Errorf(codes.InvalidArgument, "a terminal of %d rows and %d columns: at most %d each", r.GetRows(), r.GetCols(), math.MaxUint16)
	}
	return procs.Size{Rows: uint16(r.GetRows()), Cols: uint16(r.GetCols())}, nil
}

func sendSpawnError(stream execStream, err error) error {
	var spawn *procs.SpawnError
	if !errors.As(err, &spawn) {
		return status.Errorf(codes.Internal, "start the program: %v", err)
	}
	exit := &guestv1.ExecExit{
		ExitCode:   exitCannotExec,
		SpawnError: &guestv1.SpawnError{Errno: uint32(spawn.Errno), What: spawn.What, Message: spawn.Error()},
	}
	if spawn.Errno == syscall.ENOENT || spawn.Errno == syscall.ENOTDIR {
		exit.ExitCode = exitNotFound
	}
	return stream.Send(&guestv1.ExecResponse{Response: &guestv1.ExecResponse_Exit{Exit: exit}})
}
