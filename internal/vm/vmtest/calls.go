package vmtest

import (
	"bytes"
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/guest"
)

// Callers at once: more than a link has room for without waiting, and fewer than
// the agent allows.
const (
	callers        = 8
	programCallers = 4
)

// testCalls makes a lot of calls, and runs a lot of programs, on one link.
func testCalls(t *testing.T, e *Env) {
	r := &running{Env: e, machine: e.Launch(t, e.Launcher(t), e.Request())}
	load := e.load(t)
	before := r.openFiles(t)
	r.many(t, "calls", callers, load.Calls, func(ctx context.Context, i int) error {
		if i%2 == 0 {
			_, err := r.machine.Guest().Hello(ctx, "vmtest")
			return err
		}
		entry, err := r.machine.Guest().Stat(ctx, "/etc/passwd")
		if err == nil && entry.Size == 0 {
			err = fmt.Errorf("stat says %+v", entry)
		}
		return err
	})
	r.many(t, "programs", programCallers, load.Programs, func(ctx context.Context, i int) error {
		cmd := Shell(`echo "$1"; exit "$2"`)
		cmd.Argv = append(cmd.Argv, "sh", fmt.Sprint("program ", i), fmt.Sprint(i%100))
		var stdout bytes.Buffer
		result, err := r.machine.Guest().Exec(ctx, cmd, guest.IO{Stdout: &stdout})
		if err == nil && (result.ExitCode != i%100 || stdout.String() != fmt.Sprintf("program %d\n", i)) {
			err = fmt.Errorf("%+v, %q", result, &stdout)
		}
		return err
	})
	r.checkOpenFiles(t, before)
	if err := r.machine.Stop(e.Context(t), time.Second); err != nil {
		t.Errorf("stop: %v", err)
	}
	e.CheckEmpty(t)
}

// many makes n calls, some at once, until one fails.
func (r *running) many(t *testing.T, what string, atOnce, n int, call func(ctx context.Context, i int) error) {
	t.Helper()
	begin := time.Now()
	var next atomic.Int64
	var failed atomic.Bool
	var all sync.WaitGroup
	for range atOnce {
		all.Go(func() {
			for i := int(next.Add(1)); i <= n && !failed.Load(); i = int(next.Add(1)) {
				ctx, cancel := context.WithTimeout(context.Background(), r.Patience)
				if err := call(ctx, i); err != nil {
					failed.Store(true)
					t.Errorf("%s: number %d: %v", what, i, err)
				}
				cancel()
			}
		})
	}
	all.Wait()
	took := time.Since(begin)
	t.Logf("%d %s, %d at once, in %v: %v each", n, what, atOnce, took.Round(time.Millisecond), (took / time.Duration(n)).Round(time.Microsecond))
}
