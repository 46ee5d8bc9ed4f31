package adapter_test

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
)

const nobody = "00000000-0000-0000-0000-000000000000"

// The rows of the semantics' section 12, "points that a naive implementation gets
// wrong", by their numbers, from a caller to the guest and back. What only time
// shows (23 and 24, and the idle reaper's part of others) is in package sandbox,
// with a fake clock.
func TestSubtle(t *testing.T) {
	t.Parallel()
	h := newHost(t, setup{config: `{"image_allowlist":["python","app","refused"],"max_concurrent_sandboxes":64,
		"custom_images":{"app":"127.0.0.1:1/app:1","refused":"127.0.0.1:1/refused:1","hidden":"127.0.0.1:1/hidden:1"},
		"per_image_caps":{"python":{"max_memory_mb":1024}}}`})
	for name, test := range map[string]func(*testing.T, *host, string){
		"01_the code is in the message":         subtle01,
		"02_seven keys":                         subtle02,
		"03_types are categories":               subtle03,
		"04_a time-out is an error":             subtle04,
		"05_a missing program is a reply":       subtle05,
		"06_time-outs are clamped":              subtle06,
		"07_the meaning of 0":                   subtle07,
		"08_half a cap":                         subtle08,
		"09_caps hold for defaults":             subtle09,
		"10_order of create's checks":           subtle10,
		"11_environments":                       subtle11,
		"12_null":                               subtle12,
		"13_base64":                             subtle13,
		"14_no stdin is an empty one":           subtle14,
		"15_stdin after the slot, body first":   subtle15,
		"16_comments and quotes":                subtle16,
		"17_trailing space with args":           subtle17,
		"18_PATH of the program":                subtle18,
		"19_open pipes hold the call":           subtle19,
		"20_the group dies, a session does not": subtle20,
		"21_128 plus the signal":                subtle21,
		"22_truncation":                         subtle22,
		"23_stop twice":                         subtle23,
		"25_links":                              subtle25,
		"26_mkdir's mode":                       subtle26,
		"27_mode strings":                       subtle27,
		"28_write sets the mode":                subtle28,
		"29_ENOTDIR and ENOTEMPTY":              subtle29,
		"30_rm -r of nothing":                   subtle30,
		"31_the parents fix":                    subtle31,
		"32_line ends in grep and sed":          subtle32,
		"33_binary files":                       subtle33,
		"34_sed's form":                         subtle34,
		"35_globs are gitignore's":              subtle35,
		"36_templates":                          subtle36,
		"37_the body of read":                   subtle37,
		"38_languages of run":                   subtle38,
		"39_failures of run":                    subtle39,
		"40_the catalog shows all":              subtle40,
		"41_forms of ids":                       subtle41,
		"42_mv onto a directory":                subtle42,
		"43_chmod and chown":                    subtle43,
		"44_ends of channels":                   subtle44,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, h, h.create(t))
		})
	}
}

func subtle01(t *testing.T, h *host, _ string) {
	_, err := h.invoke("exec", obj{"sandbox_id": nobody, "cmd": "true"})
	var remote *iii.Error
	if e := envelope(t, err); e["code"] != "S002" {
		t.Errorf("%v", e)
	}
	if !errors.As(err, &remote) || remote.Code != "invocation_failed" || !strings.HasPrefix(remote.Message, "{") || remote.Stacktrace != "" {
		t.Errorf("on the wire: %+v", remote)
	}
}

func subtle02(t *testing.T, h *host, id string) {
	for _, e := range []obj{
		h.fails(t, "exec", obj{"sandbox_id": "x", "cmd": "true"}, "S001"),
		h.fails(t, "fs::write", at(id, "/no/such/file", obj{"content": ""}), "S211"),
	} {
		if len(e) != 7 {
			t.Errorf("keys of %v", e)
		}
		for _, key := range []string{"type", "code", "message", "docs_url", "retryable", "fix", "fix_note"} {
			if _, ok := e[key]; !ok {
				t.Errorf("%s is missing in %v", key, e)
			}
		}
	}
	if e := h.fails(t, "exec", obj{"sandbox_id": "x"}, "S001"); e["fix"] != nil || e["docs_url"] != "https://iii.dev/docs/creating-workers/sandboxes#S001" {
		t.Errorf("%v", e)
	}
}

func subtle03(t *testing.T, h *host, _ string) {
	for _, tt := range []struct {
		e     obj
		typ   string
		retry bool
	}{
		{h.fails(t, "create", obj{"image": "nope"}, "S100"), "config", false},
		{h.fails(t, "create", obj{"image": "python", "memory_mb": 1025}, "S400"), "config", false},
		{h.fails(t, "create", obj{"image": "refused"}, "S102"), "transient", true},
	} {
		if tt.e["type"] != tt.typ || tt.e["retryable"] != tt.retry {
			t.Errorf("%v, want %s, %v", tt.e, tt.typ, tt.retry)
		}
	}
	frozen := newHost(t, setup{config: `{"image_allowlist":["node"],"auto_install":false}`})
	if e := frozen.fails(t, "create", obj{"image": "node"}, "S101"); e["type"] != "internal" || e["retryable"] != false {
		t.Errorf("%v", e)
	}
}

func subtle04(t *testing.T, h *host, id string) {
	e := h.fails(t, "exec", shell(id, "echo partial; sleep 100", obj{"timeout_ms": 200}), "S200", "200 ms")
	if strings.Contains(fmt.Sprint(e), "partial") {
		t.Errorf("output in %v", e)
	}
	if out := h.sh(t, id, "true"); out["timed_out"] != false {
		t.Errorf("%v", out)
	}
}

func subtle05(t *testing.T, h *host, id string) {
	for _, tt := range []struct {
		req    obj
		code   float64
		stderr string
	}{
		{obj{"cmd": "no-such-program"}, 127, "exec: no-such-program: not found\n"},
		{obj{"cmd": "/etc/passwd/x"}, 127, "exec: /etc/passwd/x: not found\n"},
		{obj{"cmd": "/etc"}, 126, "exec: /etc: permission denied\n"},
		{obj{"cmd": "true", "workdir": "/no/such"}, 127, "exec: true: not found\n"},
		{obj{"cmd": "true", "workdir": "/etc/passwd"}, 127, "exec: true: not found\n"},
	} {
		tt.req["sandbox_id"] = id
		out := h.ok(t, "exec", tt.req)
		delete(out, "duration_ms")
		same(t, fmt.Sprint(tt.req), out, obj{
			"stdout": "", "stderr": tt.stderr, "exit_code": tt.code, "timed_out": false, "success": false, "stdout_truncated": false, "stderr_truncated": false,
		})
	}
}

func subtle06(t *testing.T, h *host, id string) {
	h.fails(t, "exec", shell(id, "true", obj{"timeout_ms": 0}), "S200", "0 ms")
	low := newHost(t, setup{config: `{"image_allowlist":["python"],"max_exec_timeout_ms":150}`})
	box := low.create(t)
	low.fails(t, "exec", shell(box, "sleep 100"), "S200", "150 ms") // the default is clamped as well
	low.fails(t, "exec", shell(box, "sleep 100", obj{"timeout_ms": 1 << 60}), "S200", "150 ms")
	zero := newHost(t, setup{config: `{"image_allowlist":["python"],"max_exec_timeout_ms":0}`})
	zero.fails(t, "exec", shell(zero.create(t), "sleep 100"), "S200", "1 ms")
}

func subtle07(t *testing.T, h *host, id string) {
	one := newHost(t, setup{config: `{"image_allowlist":["python"],"max_concurrent_exec_per_sandbox":0}`})
	one.create(t)
	list, _ := one.ok(t, "list", obj{})["sandboxes"].([]any)
	if row, _ := list[0].(obj); row["exec_slots_free"] != 1.0 {
		t.Errorf("%v", list)
	}
	none := newHost(t, setup{config: `{"image_allowlist":["python"],"max_concurrent_sandboxes":0}`})
	none.fails(t, "create", obj{"image": "python"}, "S400", "max_concurrent_sandboxes")

	path := h.file(t, "zero/lines", strings.Repeat(strings.Repeat("x", 5000)+"\n", 10_001))
	out := h.ok(t, "fs::grep", at(id, path, obj{"pattern": "x", "max_matches": 0, "max_line_bytes": 1}))
	if matches, _ := out["matches"].([]any); len(matches) != 10_001 || out["truncated"] != false {
		t.Errorf("max_matches 0: %d matches, truncated %v", len(matches), out["truncated"])
	}
	out = h.ok(t, "fs::grep", at(id, path, obj{"pattern": "x", "max_matches": 1, "max_line_bytes": 0}))
	matches, _ := out["matches"].([]any)
	if first, _ := matches[0].(obj); first["content"] != strings.Repeat("x", 5000) {
		t.Error("max_line_bytes 0 cut a line")
	}
}

// DESIGN: a field that is left out leaves its dimension uncapped.
func subtle08(t *testing.T, h *host, _ string) {
	h.create(t, obj{"cpus": 64, "memory_mb": 1024})
	h.fails(t, "create", obj{"image": "python", "cpus": 64, "memory_mb": 1025}, "S400", "memory_mb", "1024")
}

func subtle09(t *testing.T, _ *host, _ string) {
	h := newHost(t, setup{config: `{"image_allowlist":["python"],"default_cpus":2,"default_memory_mb":2048,
		"per_image_caps":{"python":{"max_cpus":1,"max_memory_mb":1024}}}`})
	h.fails(t, "create", obj{"image": "python"}, "S400", "cpus is 2")
	h.fails(t, "create", obj{"image": "python", "cpus": 1}, "S400", "memory_mb is 2048")
	h.create(t, obj{"cpus": 1, "memory_mb": 1024})
}

func subtle10(t *testing.T, _ *host, _ string) {
	h := newHost(t, setup{config: `{"image_allowlist":["python","node"],"max_concurrent_sandboxes":1,"auto_install":false,
		"per_image_caps":{"node":{"max_cpus":1}}}`})
	h.fails(t, "create", obj{"image": "nope", "cpus": 2}, "S100")
	h.fails(t, "create", obj{"image": "node", "cpus": 2}, "S400", "cpus")
	h.fails(t, "create", obj{"image": "node"}, "S101")
	h.create(t)
	h.fails(t, "create", obj{"image": "nope", "cpus": 2}, "S400", "max_concurrent_sandboxes")
	h.fails(t, "create", obj{"image": "nope", "cpus": 0}, "S001", "cpus") // a request's shape comes first (DESIGN)
}

func subtle11(t *testing.T, h *host, id string) {
	e := h.fails(t, "exec", shell(id, "env", obj{"env": obj{"a-b": "1", "OK": "2", "1x": "3", "": "4"}}), "S001", "a-b", "1x", "[A-Za-z_][A-Za-z0-9_]*")
	if strings.Contains(fmt.Sprint(e["message"]), "OK") {
		t.Errorf("a good key is named in %v", e)
	}
	h.fails(t, "create", obj{"image": "python", "env": obj{"a b": "1"}}, "S001", "a b")
	out := h.ok(t, "exec", obj{"sandbox_id": id, "cmd": "env", "env": []string{"a-b=1", "dropped", "lower=x", "lower=y=z"}})
	env := strings.Split(fmt.Sprint(out["stdout"]), "\n")
	for line, want := range map[string]bool{"a-b=1": true, "dropped": false, "dropped=": false, "lower=y=z": true, "lower=x": false} {
		if slices.Contains(env, line) != want {
			t.Errorf("%q in the environment: %v, want %v", line, !want, want)
		}
	}
	if out := h.sh(t, id, `echo "$lower_case"`, obj{"env": obj{"lower_case": "yes"}}); out["stdout"] != "yes\n" {
		t.Errorf("%v", out)
	}
}

func subtle12(t *testing.T, h *host, id string) {
	for _, field := range []string{"args", "argv", "env", "cmd"} {
		h.fails(t, "exec", obj{"sandbox_id": id, "cmd": "true", field: nil}, "S001", field)
	}
	out := h.ok(t, "exec", obj{"sandbox_id": id, "cmd": "true", "stdin": nil, "timeout_ms": nil, "workdir": nil})
	if out["success"] != true {
		t.Errorf("%v", out)
	}
	h.fails(t, "fs::mkdir", at(id, "/x", obj{"mode": nil}), "S001", "mode")
	h.fails(t, "create", json.RawMessage(`null`), "S001")
}

func subtle13(t *testing.T, h *host, id string) {
	for stdin, ok := range map[string]bool{
		"YQ==": true, "YWI=": true, "YWJj": true, "": true,
		"YQ==\n": false, "YW\nI=": false, "YW\rI=": false, "YR==": false, "YQ": false, "YQ=": false, " YQ==": false, "-_8=": false, "!": false, "YQ==YQ==": false,
	} {
		req := obj{"sandbox_id": id, "cmd": "cat", "stdin": stdin}
		if !ok {
			h.fails(t, "exec", req, "S001", "stdin")
			h.fails(t, "fs::write", at(id, h.files+"/b64", obj{"content_b64": stdin}), "S001", "not valid base64")
			continue
		}
		want, _ := base64.StdEncoding.DecodeString(stdin)
		if out := h.ok(t, "exec", req); out["stdout"] != string(want) {
			t.Errorf("%q: %v", stdin, out)
		}
	}
}

func subtle14(t *testing.T, h *host, id string) {
	for _, more := range []obj{{}, {"stdin": nil}, {"stdin": ""}} {
		if out := h.sh(t, id, "cat; echo end", more); out["stdout"] != "end\n" {
			t.Errorf("%v: %v", more, out)
		}
	}
}

func subtle15(t *testing.T, h *host, id string) {
	h.fails(t, "exec", obj{"sandbox_id": nobody, "cmd": "true", "stdin": "!"}, "S002")
	h.fails(t, "fs::write", at(nobody, "/x", obj{"content_b64": "!"}), "S001", "content_b64")
	h.fails(t, "fs::write", at(nobody, "/x"), "S001", "missing file body")
	h.fails(t, "fs::write", at("no uuid", "/x", obj{"content": "a", "content_b64": "YQ=="}), "S001", "not both")
	// All slots taken: that is told before stdin is looked at.
	full := h.create(t)
	for range 4 {
		h.hold(t, full)
	}
	h.fails(t, "exec", obj{"sandbox_id": full, "cmd": "true", "stdin": "!"}, "S003")
	h.fails(t, "exec", obj{"sandbox_id": full, "cmd": "a b", "args": []string{"c"}, "stdin": "!"}, "S001", "ambiguous")
	h.ok(t, "fs::stat", at(full, "/")) // needs no slot
	h.ok(t, "exec", obj{"sandbox_id": id, "cmd": "true"})
}

// hold starts a program that runs until its sandbox or the test ends, and returns
// when it runs.
func (h *host) hold(t *testing.T, id string) {
	t.Helper()
	flag := filepath.Join(h.dir(t, nil), "up")
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = h.invoke("exec", shell(id, "touch "+flag+"; sleep 1000"))
	}()
	t.Cleanup(func() {
		_, _ = h.invoke("stop", obj{"sandbox_id": id})
		<-done
	})
	eventually(t, "start of the program", func() bool { return exists(flag) })
}

func subtle16(t *testing.T, h *host, id string) {
	for cmd, want := range map[string]string{
		"printf %s|%s| a #b c":          "a||",
		"printf %s| a#b":                "a#b|",
		`printf %s| 'a b' "c d" e\ f`:   "a b|c d|e f|",
		`printf %s| ''`:                 "|",
		`printf %s| x='1 2'`:            "x=1 2|",
		"printf %s| $HOME * ~ ; && > x": "$HOME|*|~|;|&&|>|x|",
		"printf\t%s|\na":                "a|",
	} {
		if out := h.ok(t, "exec", obj{"sandbox_id": id, "cmd": cmd}); out["stdout"] != want {
			t.Errorf("%q: %q, want %q", cmd, out["stdout"], want)
		}
	}
	if out := h.ok(t, "exec", obj{"sandbox_id": id, "cmd": "'echo'"}); out["exit_code"] != 127.0 {
		t.Errorf("quotes without a space: %v", out)
	}
	for _, cmd := range []string{"echo 'x", `echo "x`, `echo x\`} {
		h.fails(t, "exec", obj{"sandbox_id": id, "cmd": cmd}, "S001", "unbalanced", "argv")
	}
	for _, cmd := range []string{"", " ", "# only a comment", "'' x"} {
		h.fails(t, "exec", obj{"sandbox_id": id, "cmd": cmd}, "S001")
	}
	h.fails(t, "exec", obj{"sandbox_id": id, "argv": []string{""}}, "S001")
	h.fails(t, "exec", obj{"sandbox_id": id, "argv": []string{"true"}, "cmd": "true"}, "S001")
	h.fails(t, "exec", obj{"sandbox_id": id, "argv": []string{"true"}, "args": []string{"x"}}, "S001")
}

func subtle17(t *testing.T, h *host, id string) {
	h.fails(t, "exec", obj{"sandbox_id": id, "cmd": "echo ", "args": []string{"x"}}, "S001", "ambiguous", "echo ", "x")
	if out := h.ok(t, "exec", obj{"sandbox_id": id, "cmd": "echo", "args": []string{"a b"}}); out["stdout"] != "a b\n" {
		t.Errorf("%v", out)
	}
}

func subtle18(t *testing.T, h *host, id string) {
	dir := h.dir(t, map[string]string{"hello": "#!/bin/sh\necho found\n"})
	if err := os.Chmod(dir+"/hello", 0o755); err != nil {
		t.Fatal(err)
	}
	if out := h.ok(t, "exec", obj{"sandbox_id": id, "cmd": "hello", "env": obj{"PATH": dir}}); out["stdout"] != "found\n" {
		t.Errorf("%v", out)
	}
	if out := h.ok(t, "exec", obj{"sandbox_id": id, "cmd": "hello"}); out["exit_code"] != 127.0 {
		t.Errorf("%v", out)
	}
	if out := h.ok(t, "exec", obj{"sandbox_id": id, "cmd": "./hello", "workdir": dir}); out["stdout"] != "found\n" {
		t.Errorf("relative to workdir: %v", out)
	}
}

func subtle19(t *testing.T, h *host, id string) {
	if out := h.sh(t, id, "(sleep 0.3; echo late) & echo early"); out["stdout"] != "early\nlate\n" {
		t.Errorf("%v", out)
	}
	flag := filepath.Join(h.dir(t, nil), "flag")
	h.sh(t, id, "(while [ ! -e "+flag+" ]; do sleep 0.05; done; echo done >"+flag+") >/dev/null 2>&1 &")
	if err := os.WriteFile(flag, nil, 0o644); err != nil { // it runs on
		t.Fatal(err)
	}
	eventually(t, "work of the background child", func() bool { return content(t, flag) == "done\n" })
}

func subtle20(t *testing.T, h *host, id string) {
	var dir string
	for _, limit := range []int{1000, 10_000, 60_000} { // a busy host needs more
		dir = h.dir(t, nil)
		h.fails(t, "exec", shell(id, "cd "+dir+`
			setsid sh -c 'touch session-up; while [ ! -e go ]; do sleep 0.05; done; touch session' >/dev/null 2>&1 &
			sh -c 'touch group-up; while [ ! -e go ]; do sleep 0.05; done; touch group' >/dev/null 2>&1 &
			while [ ! -e session-up ] || [ ! -e group-up ]; do sleep 0.05; done; touch both; sleep 1000`, obj{"timeout_ms": limit}), "S200")
		h.file(t, strings.TrimPrefix(dir, h.files)+"/go", "")
		if exists(dir + "/both") {
			break
		}
	}
	eventually(t, "work of the session", func() bool { return exists(dir + "/session") })
	if exists(dir + "/group") {
		t.Error("a member of the process group survived")
	}
}

func subtle21(t *testing.T, h *host, id string) {
	for signal, code := range map[string]float64{"KILL": 137, "TERM": 143, "SEGV": 139} {
		if out := h.sh(t, id, "kill -"+signal+" $$"); out["exit_code"] != code || out["success"] != false {
			t.Errorf("%s: %v", signal, out)
		}
	}
	if out := h.sh(t, id, "exit 3"); out["exit_code"] != 3.0 || out["success"] != false {
		t.Errorf("%v", out)
	}
}

func subtle22(t *testing.T, h *host, id string) {
	const limit = 1 << 20
	for _, tt := range []struct {
		script    string
		size      int
		truncated bool
	}{
		{"head -c 1048575 /dev/zero | tr '\\0' x", limit - 1, false},
		{"head -c 1048576 /dev/zero | tr '\\0' x", limit, false},
		{"head -c 1048577 /dev/zero | tr '\\0' x", limit, true},
		{"head -c 9000000 /dev/zero | tr '\\0' x", limit, true},
	} {
		out := h.sh(t, id, tt.script)
		if text, _ := out["stdout"].(string); len(text) != tt.size || out["stdout_truncated"] != tt.truncated || out["stderr_truncated"] != false {
			t.Errorf("%s: %d bytes, %v", tt.script, len(text), out["stdout_truncated"])
		}
		out = h.sh(t, id, "("+tt.script+") >&2")
		if text, _ := out["stderr"].(string); len(text) != tt.size || out["stderr_truncated"] != tt.truncated || out["stdout_truncated"] != false {
			t.Errorf("%s on stderr: %d bytes, %v", tt.script, len(text), out["stderr_truncated"])
		}
	}
	// Cut amid a character, before what is not UTF-8 is replaced.
	out := h.sh(t, id, `head -c 1048574 /dev/zero | tr '\0' x; printf '\342\202\254'; echo end >&2`)
	text, _ := out["stdout"].(string)
	if !strings.HasSuffix(text, "x\uFFFD") || strings.Count(text, "\uFFFD") != 1 || out["stderr"] != "end\n" {
		t.Errorf("the cut: %q", text[len(text)-10:])
	}
	for script, want := range map[string]string{
		`printf 'ab\342\202'`: "ab\uFFFD", `printf '\377\376'`: "\uFFFD\uFFFD", `printf '\355\240\200'`: "\uFFFD\uFFFD\uFFFD",
		`printf '\360\237\222'`: "\uFFFD", `printf '\0\033[0m\n'`: "\x00\x1b[0m\n",
	} {
		if out := h.sh(t, id, script); out["stdout"] != want {
			t.Errorf("%s: %q, want %q", script, out["stdout"], want)
		}
	}
}

func subtle23(t *testing.T, h *host, id string) {
	same(t, "stop", h.ok(t, "stop", obj{"sandbox_id": strings.ToUpper(id), "wait": true}), obj{"sandbox_id": id, "stopped": true})
	h.fails(t, "stop", obj{"sandbox_id": id}, "S002")
	for function, req := range map[string]obj{"exec": {"cmd": "true"}, "fs::ls": {"path": "/"}, "fs::read": {"path": "/etc/passwd"}} {
		req["sandbox_id"] = id
		h.fails(t, function, req, "S002", id)
	}
}
