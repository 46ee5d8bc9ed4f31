package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii/iiitest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const bound = time.Minute

// command runs one command line to its end.
func command(t *testing.T, env map[string]string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), bound)
	defer cancel()
	var out, errs bytes.Buffer
	p := program{stdout: &out, stderr: &errs, getenv: func(key string) string { return env[key] }}
	code = p.run(ctx, args)
	return code, out.String(), errs.String()
}

// engine starts an engine with functions for trigger and returns its port.
func engine(t *testing.T) string {
	t.Helper()
	e, err := iiitest.Start(iiitest.Options{Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	e.Handle("t::echo", func(_ context.Context, data json.RawMessage) (json.RawMessage, error) { return data, nil })
	e.Handle("t::null", func(context.Context, json.RawMessage) (json.RawMessage, error) { return nil, nil })
	e.Handle("t::fail", func(context.Context, json.RawMessage) (json.RawMessage, error) {
		return nil, &iii.Error{Code: "invocation_failed", Message: `{"code":"S002","message":"<x>"}`}
	})
	e.Handle("t::traced", func(context.Context, json.RawMessage) (json.RawMessage, error) {
		return nil, &iii.Error{Code: "c", Message: "m", Stacktrace: "at x"}
	})
	e.Handle("t::slow", func(ctx context.Context, _ json.RawMessage) (json.RawMessage, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	})
	_, port, err := net.SplitHostPort(e.Address())
	if err != nil {
		t.Fatal(err)
	}
	c, err := iii.Open(iii.Options{URL: e.URL(), Name: "teams", Namespace: "team", Log: slog.New(slog.DiscardHandler), Functions: []iii.Function{{
		ID: "t::mine", Description: "says mine", RequestFormat: json.RawMessage(`{"type":"object","required":["x"]}`),
		Handler: func(context.Context, iii.Invocation) (json.RawMessage, error) { return json.RawMessage(`"mine"`), nil },
	}}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close(context.Background()) })
	ctx, cancel := context.WithTimeout(t.Context(), bound)
	defer cancel()
	if err := e.Await(ctx, func() bool { return len(e.Functions()) == 1 }); err != nil {
		t.Fatal(err)
	}
	return port
}

func TestTrigger(t *testing.T) {
	t.Parallel()
	port := engine(t)
	for name, c := range map[string]struct {
		args           []string
		code           int
		stdout, stderr string
	}{
		"nothing":         {[]string{`t::echo`}, 0, "{}\n", ""},
		"pairs":           {[]string{`t::echo`, `a=1`, `b=x y`, `c="q"`, `d=null`, `e={"f":[true]}`, `g=`, `h=a=b`}, 0, `{"a":1,"b":"x y","c":"q","d":null,"e":{"f":[true]},"g":"","h":"a=b"}`, ""},
		"json":            {[]string{`t::echo`, `--json`, `[1,"<"]`}, 0, `[1,"<"]`, ""},
		"json and pairs":  {[]string{`t::echo`, `--json`, `{"a":{"b":1},"c":2}`, `a=3`}, 0, `{"a":3,"c":2}`, ""},
		"null":            {[]string{`t::null`}, 0, "", ""},
		"namespace":       {[]string{`t::mine`, `-n`, `team`}, 0, `"mine"`, ""},
		"function's":      {[]string{`t::fail`}, 1, "", `Error: {"code":"invocation_failed","message":"{\"code\":\"S002\",\"message\":\"<x>\"}","stacktrace":null}`},
		"with a trace":    {[]string{`t::traced`}, 1, "", `Error: {"code":"c","message":"m","stacktrace":"at x"}`},
		"time-out":        {[]string{`t::slow`, `--timeout-ms`, `50`}, 1, "", "Error: Timed out waiting for the engine"},
		"bad token":       {[]string{`t::echo`, `a`}, 1, "", `Error: "a" is not of the form KEY=VALUE`},
		"no key":          {[]string{`t::echo`, `=a`}, 1, "", "Error: \"=a\""},
		"bad json":        {[]string{`t::echo`, `--json`, `{`}, 1, "", "Error: --json is not JSON"},
		"empty json":      {[]string{`t::echo`, `--json`, ``}, 1, "", "Error: --json is not JSON"},
		"json no object":  {[]string{`t::echo`, `--json`, `1`, `a=1`}, 1, "", "Error: --json must be an object"},
		"json null":       {[]string{`t::echo`, `--json`, `null`, `a=1`}, 1, "", "Error: --json must be an object"},
		"no function":     {[]string{}, 1, "", "Error: name a function"},
		"describes":       {[]string{`t::mine`, `-n`, `team`, `--help`}, 0, "says mine", ""},
		"describes none":  {[]string{`t::none`, `--help`}, 1, "", `Error: {"code":"function_not_found"`},
		"describes it":    {[]string{`--help`}, 0, "Usage:", ""},
		"another address": {[]string{`t::echo`, `--address`, `127.0.0.1`}, 0, "{}\n", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			args := append([]string{"trigger", "--port", port}, c.args...)
			code, stdout, stderr := command(t, nil, args...)
			if code != c.code || !strings.Contains(squeeze(stdout), squeeze(c.stdout)) || !strings.Contains(squeeze(stderr), squeeze(c.stderr)) ||
				(c.stdout == "") != (stdout == "") || (c.stderr == "") != (stderr == "") {
				t.Errorf("%q: exit status %d, %q, %q", args, code, stdout, stderr)
			}
		})
	}
	if code, stdout, _ := command(t, map[string]string{"III_NAMESPACE": "team"}, "t", "t::mine", "--port", port); code != 0 || stdout != "\"mine\"\n" {
		t.Errorf("with III_NAMESPACE: exit status %d, %q", code, stdout)
	}
	if _, stdout, _ := command(t, nil, "trigger", "t::echo", "a=1", "--port", port); stdout != "{\n  \"a\": 1\n}\n" {
		t.Errorf("not indented: %q", stdout)
	}
}

// squeeze leaves blanks out.
func squeeze(text string) string { return strings.Join(strings.Fields(text), "") }

func TestUnreachableEngineIsATimeout(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_, port, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	_ = l.Close()
	code, stdout, stderr := command(t, nil, "trigger", "t::echo", "--address", "127.0.0.1", "--port", port, "--timeout-ms", "100")
	if code != 1 || stdout != "" || !strings.Contains(stderr, "Timed out waiting for the engine") {
		t.Errorf("exit status %d, %q, %q", code, stdout, stderr)
	}
}

func TestServe(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "c.json")
	if err := os.WriteFile(file, []byte(`{"max_concurrent_sandboxes":"${N:3}"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), bound)
	defer cancel()
	read, write := io.Pipe()
	p := program{stdout: write, stderr: io.Discard, getenv: func(string) string { return "" }}
	ended := make(chan int, 1)
	go func() { ended <- p.run(ctx, []string{"--port", "0", "--config", "mine=" + file}) }()
	line, err := bufio.NewReader(read).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	_, port, err := net.SplitHostPort(strings.TrimPrefix(strings.TrimSpace(line), "listening on ws://"))
	if err != nil {
		t.Fatalf("it says %q", line)
	}
	for id, want := range map[string]string{
		"mine":            `"max_concurrent_sandboxes": 3`,
		"sandbox-libkrun": `"image_allowlist": [ "python", "node" ]`,
	} {
		if code, stdout, stderr := command(t, nil, "trigger", "configuration::get", "id="+id, "--port", port); code != 0 || !strings.Contains(squeeze(stdout), squeeze(want)) {
			t.Errorf("exit status %d, %s, %s", code, stdout, stderr)
		}
	}
	cancel()
	if code := <-ended; code != 0 {
		t.Errorf("interrupted, it ends with %d", code)
	}
}

func TestServeRefusesWhatItCannotServe(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "bad.json")
	if err := os.WriteFile(file, []byte(`{`), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"--config", "x"},
		{"--config", "x=" + file},
		{"--config", "x=" + file + ".none"},
		{"--host", "256.0.0.1"},
		{"--nonsense"},
		{"nonsense"},
	} {
		if code, _, stderr := command(t, nil, args...); code != 1 || !strings.HasPrefix(stderr, "Error: ") {
			t.Errorf("%q: exit status %d, %q", args, code, stderr)
		}
	}
}
