package sandbox_test

import (
	"bytes"
	"encoding/base64"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/sandbox"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/vmtest"
)

// logBuffer is a log for several goroutines.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// What is in requests and files is in no log, at any level, whether things go
// well or not.
func TestLog_HoldsNothingOfRequests(t *testing.T) {
	t.Parallel()
	const secret = "s3cr3t"
	var text logBuffer
	log := slog.New(slog.NewTextHandler(&text, &slog.HandlerOptions{Level: slog.LevelDebug - 4}))
	fake := &vmtest.Fake{}
	h := newHost(t, fake, func(c *sandbox.Config) {
		fake.Log, c.Log = log, log
		roots := vmtest.Roots(t)
		c.Launcher = vm.New(vm.Config{Driver: fake, Roots: roots, Log: log, Version: "test"})
	})
	env := sandbox.Env{Map: map[string]string{"KEY": secret}}
	for range 2 { // the second time with a sandbox that is gone
		made, err := h.Create(t.Context(), sandbox.CreateRequest{Image: "python", Name: new(secret), Env: env})
		if err != nil {
			t.Fatal(err)
		}
		id := made.SandboxID
		for range 2 {
			req := shell(id, "cat; echo "+secret+" >&2; exit 1")
			req.Env, req.StdinB64 = env, new(base64.StdEncoding.EncodeToString([]byte(secret)))
			_, _ = h.Exec(t.Context(), req)
			_, _ = h.Exec(t.Context(), sandbox.ExecRequest{SandboxID: id, Cmd: "/no/" + secret, Env: env})
			_, _ = h.WriteFile(t.Context(), sandbox.WriteRequest{SandboxID: id, Path: h.files + "/f", Mode: "600", Content: new(secret)})
			_, _ = h.WriteFile(t.Context(), sandbox.WriteRequest{SandboxID: id, Path: "/etc", Mode: secret, Content: new(secret)})
			_, _ = h.Grep(t.Context(), sandbox.GrepRequest{SandboxID: id, Path: h.files, Pattern: secret, Recursive: true})
			_, _ = h.Sed(t.Context(), sandbox.SedRequest{SandboxID: id, Path: &h.files, Pattern: secret, Replacement: secret})
			if f, err := h.OpenFile(t.Context(), id, h.files+"/f"); err == nil {
				_ = f.Close()
			}
			if _, err := h.Stop(t.Context(), id, true); err != nil {
				break
			}
		}
	}
	if !strings.Contains(text.String(), "sandbox created") {
		t.Fatal("the log was not looked at")
	}
	for line := range strings.Lines(text.String()) {
		if strings.Contains(line, secret) || strings.Contains(line, "KEY") {
			t.Errorf("logged: %s", line)
		}
	}
}
