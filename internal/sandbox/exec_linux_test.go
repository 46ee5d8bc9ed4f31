package sandbox_test

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/uuid"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/sandbox"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/vmtest"
)

func TestExec(t *testing.T) {
	t.Parallel()
	h := newHost(t, &vmtest.Fake{}, func(c *sandbox.Config) { c.MaxExecs = 64 })
	id := create(t, h.Manager)
	t.Run("ends", func(t *testing.T) { testExecEnds(t, h, id) })
	t.Run("output", func(t *testing.T) { testExecOutput(t, h, id) })
	t.Run("stdin", func(t *testing.T) { testExecStdin(t, h, id) })
	t.Run("shapes", func(t *testing.T) { testExecShapes(t, h, id) })
	t.Run("background", func(t *testing.T) { testExecBackground(t, h, id) })
	if s := h.one(t); s.ExecInFlight != 0 || s.ExecSlotsFree != 64 {
		t.Errorf("slots are left: %+v", s)
	}
}

// Semantics 5.4: how a program ends (12 #5, #18, #21).
func testExecEnds(t *testing.T, h *host, id string) {
	plain := filepath.Join(h.files, "plain")
	if err := os.WriteFile(plain, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		req    sandbox.ExecRequest
		code   int32
		stderr string
	}{
		{shell(id, "exit 0"), 0, ""},
		{shell(id, "exit 3"), 3, ""},
		{shell(id, "kill -TERM $$"), 143, ""},
		{shell(id, "kill -KILL $$"), 137, ""},
		{sandbox.ExecRequest{SandboxID: id, Cmd: "no-such-program"}, 127, "exec: no-such-program: not found\n"},
		{sandbox.ExecRequest{SandboxID: id, Cmd: "/no/such/program"}, 127, "exec: /no/such/program: not found\n"},
		{sandbox.ExecRequest{SandboxID: id, Cmd: plain + "/x"}, 127, "exec: " + plain + "/x: not found\n"},
		{sandbox.ExecRequest{SandboxID: id, Cmd: "/etc/passwd"}, 126, "exec: /etc/passwd: permission denied\n"},
		{sandbox.ExecRequest{SandboxID: id, Cmd: "/etc"}, 126, "exec: /etc: permission denied\n"},
		{sandbox.ExecRequest{SandboxID: id, Cmd: "true", Workdir: new("/no/such/dir")}, 127, "exec: true: not found\n"},
		{sandbox.ExecRequest{SandboxID: id, Cmd: "true", Workdir: new("/etc/passwd")}, 127, "exec: true: not found\n"},
		{sandbox.ExecRequest{SandboxID: id, Cmd: "true", Env: sandbox.Env{List: []string{"PATH=/nowhere"}}}, 127, "exec: true: not found\n"},
		{sandbox.ExecRequest{SandboxID: id, Cmd: "sh -c 'exit 7'", Workdir: new("/")}, 7, ""},
	} {
		got, err := h.Exec(t.Context(), tt.req)
		want := sandbox.ExecReply{ExitCode: tt.code, Stderr: tt.stderr, Success: tt.code == 0, DurationMs: got.DurationMs}
		if err != nil || got != want {
			t.Errorf("%q in %v: %+v %v, want %+v", append(tt.req.Argv, tt.req.Cmd), tt.req.Workdir, got, err, want)
		}
	}
	got, err := h.Exec(t.Context(), sandbox.ExecRequest{SandboxID: id, Cmd: "pwd"})
	if err != nil || got.Stdout != "/\n" {
		t.Errorf("without workdir: %q, %v", got.Stdout, err)
	}
	for _, req := range []sandbox.ExecRequest{
		{SandboxID: id, Cmd: "a\x00b"},
		{SandboxID: id, Argv: []string{"echo", "\x00"}},
		{SandboxID: id, Cmd: "true", Env: sandbox.Env{List: []string{"A=\x00"}}},
		{SandboxID: id, Cmd: "true", Workdir: new("\x00")},
		{SandboxID: id, Argv: []string{"echo", strings.Repeat("x", 200<<10)}}, // E2BIG
		{SandboxID: id, Argv: []string{"echo", strings.Repeat("x", 2<<20)}},   // more than a message to the agent
	} {
		_, err := h.Exec(t.Context(), req)
		wantCode(t, err, fault.S300, "not started")
	}
}

// Semantics 12 #22.
func testExecOutput(t *testing.T, h *host, id string) {
	for _, tt := range []struct {
		size                 int
		fd                   string
		stdoutCut, stderrCut bool
	}{
		{sandbox.MaxCapture, "1", false, false},
		{sandbox.MaxCapture + 1, "1", true, false},
		{sandbox.MaxCapture, "2", false, false},
		{sandbox.MaxCapture + 1, "2", false, true},
		{20 << 20, "1", true, false}, // drained, not blocked
	} {
		got, err := h.Exec(t.Context(), shell(id, fmt.Sprintf("head -c %d /dev/zero | tr '\\0' x >&%s; echo -n end >&%s", tt.size, tt.fd, map[string]string{"1": "2", "2": "1"}[tt.fd])))
		if err != nil {
			t.Fatal(err)
		}
		big, small := got.Stdout, got.Stderr
		if tt.fd == "2" {
			big, small = small, big
		}
		if len(big) != min(tt.size, sandbox.MaxCapture) || small != "end" || !got.Success {
			t.Errorf("%d bytes on %s: %d bytes and %q", tt.size, tt.fd, len(big), small)
		}
		if got.StdoutTruncated != tt.stdoutCut || got.StderrTruncated != tt.stderrCut {
			t.Errorf("%d bytes on %s: flags %v, %v", tt.size, tt.fd, got.StdoutTruncated, got.StderrTruncated)
		}
	}
	// The cut is on bytes, before the repair: half a character becomes one U+FFFD.
	got, err := h.Exec(t.Context(), shell(id, fmt.Sprintf(`head -c %d /dev/zero | tr '\0' x; printf '\303\251'; printf '\377\376\0\033' >&2`, sandbox.MaxCapture-1)))
	if err != nil || !strings.HasSuffix(got.Stdout, "x\uFFFD") || len(got.Stdout) != sandbox.MaxCapture-1+3 || !got.StdoutTruncated {
		t.Errorf("a cut character: %d bytes, %v, %v", len(got.Stdout), got.StdoutTruncated, err)
	}
	if got.Stderr != "\uFFFD\uFFFD\x00\x1b" {
		t.Errorf("odd bytes: %q", got.Stderr)
	}
}

// Semantics 12 #13, #14.
func testExecStdin(t *testing.T, h *host, id string) {
	cat := func(b64 *string) sandbox.ExecRequest {
		req := shell(id, "cat; echo .")
		req.StdinB64 = b64
		return req
	}
	for in, want := range map[string]string{"": ".\n", "aGk=": "hi.\n", "AP8=": "\x00\uFFFD.\n"} {
		if got, err := h.Exec(t.Context(), cat(&in)); err != nil || got.Stdout != want {
			t.Errorf("stdin %q: %q, %v", in, got.Stdout, err)
		}
	}
	if got, err := h.Exec(t.Context(), cat(nil)); err != nil || got.Stdout != ".\n" {
		t.Errorf("no stdin: %q, %v", got.Stdout, err)
	}
	for _, in := range []string{"aGk", "aGk=\n", "aG\nk=", "a", "YR==", "-_-_", " aGk=", "aGk==", "=", "é"} {
		_, err := h.Exec(t.Context(), cat(&in))
		wantCode(t, err, fault.S001, "stdin", "base64")
	}
	// 11 #5, and a child that does not read.
	big := base64.StdEncoding.EncodeToString(make([]byte, 8<<20))
	req := shell(id, "wc -c")
	req.StdinB64 = &big
	if got, err := h.Exec(t.Context(), req); err != nil || strings.TrimSpace(got.Stdout) != "8388608" {
		t.Errorf("8 MiB of stdin: %q, %v", got.Stdout, err)
	}
	req.Argv[2] = "exit 5"
	if got, err := h.Exec(t.Context(), req); err != nil || got.ExitCode != 5 {
		t.Errorf("stdin that nobody reads: %+v, %v", got, err)
	}
}

func testExecShapes(t *testing.T, h *host, id string) {
	for _, tt := range []struct {
		req  sandbox.ExecRequest
		want string
	}{
		{sandbox.ExecRequest{Cmd: "printf '<%s>' a 'b c' \"d\" '' # no"}, "<a><b c><d><>"},
		{sandbox.ExecRequest{Cmd: "printf", Args: []string{"<%s>", "a b", "#"}}, "<a b><#>"},
		{sandbox.ExecRequest{Argv: []string{"printf", "<%s>", "$HOME;|", "*"}}, "<$HOME;|><*>"},
	} {
		tt.req.SandboxID = id
		if got, err := h.Exec(t.Context(), tt.req); err != nil || got.Stdout != tt.want {
			t.Errorf("%+v: %q, %v", tt.req, got.Stdout, err)
		}
	}
	for _, tt := range []struct {
		req  sandbox.ExecRequest
		word string
	}{
		{sandbox.ExecRequest{}, "empty"},
		{sandbox.ExecRequest{Args: []string{"x"}}, "empty"},
		{sandbox.ExecRequest{Argv: []string{""}}, "empty"},
		{sandbox.ExecRequest{Cmd: " \t\n"}, "empty"},
		{sandbox.ExecRequest{Cmd: "# only a comment"}, "empty"},
		{sandbox.ExecRequest{Cmd: "''  x"}, "empty"},
		{sandbox.ExecRequest{Cmd: "ls -l", Args: []string{"/tmp"}}, "ambiguous"},
		{sandbox.ExecRequest{Cmd: "ls ", Args: []string{"/tmp"}}, "ambiguous"}, // 12 #17
		{sandbox.ExecRequest{Cmd: "ls", Argv: []string{"ls"}}, "argv"},
		{sandbox.ExecRequest{Args: []string{"ls"}, Argv: []string{"ls"}}, "argv"},
		{sandbox.ExecRequest{Cmd: "echo 'x"}, "unbalanced"},
		{sandbox.ExecRequest{Cmd: `echo "x`}, "unbalanced"},
		{sandbox.ExecRequest{Cmd: `echo x\`}, "unbalanced"},
	} {
		tt.req.SandboxID = uuid.NewString() // the shape comes before the sandbox
		_, err := h.Exec(t.Context(), tt.req)
		wantCode(t, err, fault.S001, tt.word)
	}
}

// Semantics 12 #19.
func testExecBackground(t *testing.T, h *host, id string) {
	got, err := h.Exec(t.Context(), shell(id, "(sleep 0.3; echo late) & exit 4"))
	if err != nil || got.Stdout != "late\n" || got.ExitCode != 4 {
		t.Errorf("a child that holds stdout: %+v, %v", got, err)
	}
	got, err = h.Exec(t.Context(), shell(id, "sleep 1000 >/dev/null 2>&1 & echo $!"))
	if err != nil || !got.Success {
		t.Fatalf("%+v, %v", got, err)
	}
	if got, err := h.Exec(t.Context(), shell(id, "kill -9 "+got.Stdout)); err != nil || !got.Success {
		t.Errorf("the child was killed with its parent: %+v, %v", got, err)
	}
}

// Semantics 12 #4, #6, #20.
func TestExec_TimesOut(t *testing.T) {
	t.Parallel()
	h := newHost(t, &vmtest.Fake{}, func(c *sandbox.Config) { c.MaxExecTimeoutMs = 300 })
	id := create(t, h.Manager)
	for _, tt := range []struct {
		ms   *uint64
		word string
	}{
		{nil, " 300 ms"}, {new(^uint64(0)), " 300 ms"}, {new(uint64(100)), " 100 ms"}, {new(uint64(0)), " 0 ms"},
	} {
		file := filepath.Join(h.files, "pid")
		req := shell(id, "sleep 1000 & echo $! >"+file+"; echo partial; wait")
		req.TimeoutMs = tt.ms
		_, err := h.Exec(t.Context(), req)
		wantCode(t, err, fault.S200, tt.word)
		if s := h.one(t); s.ExecInFlight != 0 {
			t.Errorf("the slot is not free: %+v", s)
		}
		pid, err := os.ReadFile(file)
		if err != nil {
			continue // killed before it got that far
		}
		vmtest.Eventually(t, patience, "the end of the group", func() bool { return !runs(strings.TrimSpace(string(pid))) })
		if err := os.Remove(file); err != nil {
			t.Error(err)
		}
	}
}

// runs reports whether a process of this host runs, dead ones that nobody waits
// for left out.
func runs(pid string) bool {
	stat, err := os.ReadFile("/proc/" + pid + "/stat")
	_, state, _ := strings.Cut(string(stat), ") ")
	return err == nil && !strings.HasPrefix(state, "Z")
}

// hold runs a program until release, or until its sandbox ends, and returns once
// it is admitted.
func (h *host) hold(t testing.TB, id string) (release func() error) {
	t.Helper()
	file := filepath.Join(h.files, uuid.NewString())
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		_, err := h.Exec(ctx, shell(id, "echo >"+file+"; exec sleep 1000"))
		ended <- err
	}()
	vmtest.Eventually(t, patience, "the program's start", func() bool {
		_, err := os.Stat(file)
		return err == nil
	})
	return func() error {
		cancel()
		return <-ended
	}
}

func TestExec_SlotsAreBounded(t *testing.T) {
	t.Parallel()
	h := newHost(t, &vmtest.Fake{}, func(c *sandbox.Config) { c.MaxExecs = 2 })
	id := create(t, h.Manager)
	first, second := h.hold(t, id), h.hold(t, id)
	if s := h.one(t); s.ExecInFlight != 2 || s.ExecSlotsFree != 0 || !s.ExecInProgress {
		t.Errorf("%+v", s)
	}
	// The slot comes before stdin (12 #15), and needs no queue.
	req := shell(id, "true")
	req.StdinB64 = new("?")
	_, err := h.Exec(t.Context(), req)
	wantCode(t, err, fault.S003, "max_concurrent_exec_per_sandbox")
	if note := fault.Of(err).FixNote; !strings.Contains(note, "nohup") || !strings.Contains(note, "foreground") {
		t.Errorf("note %q", note)
	}
	// Files need no slot.
	if _, err := h.Stat(t.Context(), id, "/etc"); err != nil {
		t.Error(err)
	}
	if err := first(); err == nil {
		t.Error("a cancelled program succeeded")
	}
	// Free again, and freed by failures too.
	for range 5 {
		_, err := h.Exec(t.Context(), req)
		wantCode(t, err, fault.S001)
		_, err = h.Exec(t.Context(), sandbox.ExecRequest{SandboxID: id, Cmd: "a\x00"})
		wantCode(t, err, fault.S300)
	}
	if got, err := h.Exec(t.Context(), shell(id, "true")); err != nil || !got.Success {
		t.Errorf("%+v, %v", got, err)
	}
	_ = second()
	if s := h.one(t); s.ExecInFlight != 0 || s.ExecSlotsFree != 2 || s.ExecInProgress {
		t.Errorf("%+v", s)
	}
}

func TestExec_NoSlotsMeansOne(t *testing.T) {
	t.Parallel()
	h := newHost(t, &vmtest.Fake{}, func(c *sandbox.Config) { c.MaxExecs = 0 })
	id := create(t, h.Manager)
	if s := h.one(t); s.ExecSlotsFree != 1 {
		t.Errorf("%+v", s)
	}
	release := h.hold(t, id)
	_, err := h.Exec(t.Context(), shell(id, "true"))
	wantCode(t, err, fault.S003)
	_ = release()
}

// Which of several faults of one request is told (12 #15, #34, semantics 5).
func TestFaults_HaveAnOrder(t *testing.T) {
	t.Parallel()
	h := newHost(t, &vmtest.Fake{}, nil)
	unknown := uuid.NewString()
	calls := map[string]struct {
		code fault.Code
		call func() error
	}{
		"exec: id before command":      {fault.S001, func() error { _, err := h.Exec(t.Context(), sandbox.ExecRequest{SandboxID: "x"}); return err }},
		"exec: command before sandbox": {fault.S001, func() error { _, err := h.Exec(t.Context(), sandbox.ExecRequest{SandboxID: unknown}); return err }},
		"exec: sandbox before stdin": {fault.S002, func() error {
			_, err := h.Exec(t.Context(), sandbox.ExecRequest{SandboxID: unknown, Cmd: "x", StdinB64: new("?")})
			return err
		}},
		"exec: env before sandbox": {fault.S001, func() error {
			_, err := h.Exec(t.Context(), sandbox.ExecRequest{SandboxID: unknown, Cmd: "x", Env: sandbox.Env{Map: map[string]string{"-": ""}}})
			return err
		}},
		"write: body before id": {fault.S001, func() error { _, err := h.WriteFile(t.Context(), sandbox.WriteRequest{SandboxID: "x"}); return err }},
		"write: base64 before sandbox": {fault.S001, func() error {
			_, err := h.WriteFile(t.Context(), sandbox.WriteRequest{SandboxID: unknown, ContentB64: new("?")})
			return err
		}},
		"write: sandbox before mode": {fault.S002, func() error {
			_, err := h.WriteFile(t.Context(), sandbox.WriteRequest{SandboxID: unknown, Content: new(""), Mode: "?"})
			return err
		}},
		"mkdir: sandbox before mode": {fault.S002, func() error {
			_, err := h.MakeDir(t.Context(), sandbox.MakeDirRequest{SandboxID: unknown, Mode: "?"})
			return err
		}},
		"sed: id before form":      {fault.S001, func() error { _, err := h.Sed(t.Context(), sandbox.SedRequest{SandboxID: "x"}); return err }},
		"sed: form before sandbox": {fault.S210, func() error { _, err := h.Sed(t.Context(), sandbox.SedRequest{SandboxID: unknown}); return err }},
		"sed: sandbox": {fault.S002, func() error {
			_, err := h.Sed(t.Context(), sandbox.SedRequest{SandboxID: unknown, Path: new("")})
			return err
		}},
		"stop: id":                        {fault.S001, func() error { _, err := h.Stop(t.Context(), "x", false); return err }},
		"stop: sandbox":                   {fault.S002, func() error { _, err := h.Stop(t.Context(), unknown, true); return err }},
		"nil UUID":                        {fault.S002, func() error { _, err := h.Stat(t.Context(), uuid.Nil.String(), "/"); return err }},
		"surrounding space":               {fault.S001, func() error { _, err := h.Stat(t.Context(), " "+unknown, "/"); return err }},
		"a space in the place of a brace": {fault.S001, func() error { _, err := h.Stat(t.Context(), " "+unknown+" ", "/"); return err }},
		"read":                            {fault.S002, func() error { _, err := h.OpenFile(t.Context(), unknown, "/"); return err }},
		"ls":                              {fault.S002, func() error { _, err := h.ListDir(t.Context(), unknown, "/"); return err }},
		"rm":                              {fault.S002, func() error { return h.Remove(t.Context(), sandbox.RemoveRequest{SandboxID: unknown}) }},
		"mv":                              {fault.S002, func() error { return h.Move(t.Context(), sandbox.MoveRequest{SandboxID: unknown}) }},
		"chmod":                           {fault.S002, func() error { _, err := h.Chmod(t.Context(), sandbox.ChmodRequest{SandboxID: unknown}); return err }},
		"grep":                            {fault.S002, func() error { _, err := h.Grep(t.Context(), sandbox.GrepRequest{SandboxID: unknown}); return err }},
	}
	for name, tt := range calls {
		if err := tt.call(); !errors.Is(err, tt.code) {
			t.Errorf("%s: %v, want %s", name, err, tt.code)
		}
	}
}

// Semantics 12 #41.
func TestID_IsTakenInEveryFormOfAUUID(t *testing.T) {
	t.Parallel()
	h := newHost(t, &vmtest.Fake{}, nil)
	id := create(t, h.Manager)
	for _, form := range []string{id, strings.ToUpper(id), strings.ReplaceAll(id, "-", ""), "urn:uuid:" + id, "{" + id + "}"} {
		if _, err := h.Stat(t.Context(), form, "/"); err != nil {
			t.Errorf("%s: %v", form, err)
		}
	}
	if got, err := h.Stop(t.Context(), "{"+strings.ToUpper(id)+"}", true); err != nil || got != id {
		t.Errorf("stop: %s, %v", got, err)
	}
}

// 32 sandboxes with 4 programs each: every place is given out exactly once, and
// the listing answers while all of them block.
func TestAdmission_IsExactWhenEverythingBlocks(t *testing.T) {
	t.Parallel()
	const sandboxes, programs = 32, 4
	h := newHost(t, &vmtest.Fake{}, nil)
	var ids [sandboxes]string
	var creates sync.WaitGroup
	refused := make(chan error, 8)
	made := make(chan string, sandboxes)
	for range sandboxes + cap(refused) {
		creates.Go(func() {
			got, err := h.Create(context.Background(), sandbox.CreateRequest{Image: "python"})
			if err != nil {
				refused <- err
				return
			}
			made <- got.SandboxID
		})
	}
	creates.Wait()
	if len(refused) != cap(refused) || len(made) != sandboxes {
		t.Fatalf("%d made, %d refused", len(made), len(refused))
	}
	for range cap(refused) {
		wantCode(t, <-refused, fault.S400)
	}
	for i := range ids {
		ids[i] = <-made
	}
	var execs sync.WaitGroup
	outcomes := make(chan error, sandboxes*(programs+2))
	for _, id := range ids {
		for range programs + 2 {
			execs.Go(func() {
				_, err := h.Exec(context.Background(), sandbox.ExecRequest{SandboxID: id, Argv: []string{"sleep", "1000"}})
				outcomes <- err
			})
		}
	}
	for range sandboxes * 2 {
		wantCode(t, <-outcomes, fault.S003)
	}
	list := h.List()
	if len(list) != sandboxes {
		t.Fatalf("%d sandboxes", len(list))
	}
	for _, s := range list {
		if s.ExecInFlight != programs || s.ExecSlotsFree != 0 {
			t.Errorf("%+v", s)
		}
	}
	if err := h.Close(context.Background()); err != nil {
		t.Error(err)
	}
	execs.Wait()
	for range sandboxes * programs {
		wantCode(t, <-outcomes, fault.S300)
	}
}
