package adapter_test

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/vmtest"
)

// The semantics' section 13, its checklist, as far as TestSubtle and the tests of
// the configuration (start_test.go, package config) do not have it. What time
// shows, the idle reaper, is in package sandbox with a fake clock.

// Envelope: every code, with its type and whether to retry. S219 is for agents of
// other builds, which there are none of here; package fault has its envelope.
func TestChecklist_EveryCode(t *testing.T) {
	t.Parallel()
	h := newHost(t, setup{config: `{"image_allowlist":["python","refused"],"max_concurrent_sandboxes":3,"max_concurrent_exec_per_sandbox":1,
		"custom_images":{"refused":"127.0.0.1:1/refused:1"}}`})
	frozen := newHost(t, setup{config: `{"image_allowlist":["node"],"auto_install":false}`})
	broken := newHost(t, setup{fake: vmtest.Fake{StepHook: func(context.Context, vmtest.Step) *bootspec.End {
		return &bootspec.End{Class: bootspec.EndCrashed, Message: "it broke", ExitCode: 1}
	}}})
	id, busy := h.create(t), h.create(t)
	h.hold(t, busy)
	dir := h.dir(t, map[string]string{"file": "x", "full/x": ""})
	stalled, _ := h.upload(t)
	for _, tt := range []struct {
		code, typ string
		retryable bool
		host      *host
		function  string
		payload   obj
	}{
		{"S001", "validation", false, h, "exec", obj{"sandbox_id": id}},
		{"S002", "validation", false, h, "exec", obj{"sandbox_id": nobody, "cmd": "true"}},
		{"S003", "validation", false, h, "exec", obj{"sandbox_id": busy, "cmd": "true"}},
		{"S100", "config", false, h, "create", obj{"image": "node"}},
		{"S101", "internal", false, frozen, "create", obj{"image": "node"}},
		{"S102", "transient", true, h, "create", obj{"image": "refused"}},
		{"S200", "execution", false, h, "exec", shell(id, "sleep 100", obj{"timeout_ms": 50})},
		{"S210", "filesystem", false, h, "fs::chmod", at(id, dir, obj{"mode": "x"})},
		{"S211", "filesystem", false, h, "fs::rm", at(id, dir+"/none")},
		{"S212", "filesystem", false, h, "fs::read", at(id, dir)},
		{"S213", "filesystem", false, h, "fs::mkdir", at(id, dir)},
		{"S214", "filesystem", false, h, "fs::rm", at(id, dir+"/full")},
		{"S215", "filesystem", false, h, "fs::rm", at(id, "/proc/version")},
		{"S216", "filesystem", false, h, "fs::stat", at(id, dir+"/file/x")},
		{"S217", "filesystem", false, h, "fs::grep", at(id, dir, obj{"pattern": "("})},
		{"S218", "transient", true, h, "fs::write", at(id, dir+"/new", obj{"content": stalled})},
		{"S300", "platform", false, broken, "create", obj{"image": "python"}},
		{"S300", "platform", false, h, "exec", obj{"sandbox_id": id, "argv": []string{"a\x00"}}},
		{"S400", "config", false, h, "create", obj{"image": "python", "cpus": 1}},
	} {
		if tt.code == "S400" {
			h.create(t) // the third of three
		}
		e := tt.host.fails(t, tt.function, tt.payload, tt.code)
		if len(e) != 7 || e["type"] != tt.typ || e["retryable"] != tt.retryable || e["docs_url"] != "https://iii.dev/docs/creating-workers/sandboxes#"+tt.code {
			t.Errorf("%s: %v", tt.code, e)
		}
	}
	if e := broken.fails(t, "create", obj{"image": "python"}, "S300", "it broke"); e["fix"] != nil {
		t.Errorf("%v", e)
	}
	if list, _ := broken.ok(t, "list", obj{})["sandboxes"].([]any); len(list) != 0 {
		t.Errorf("a failed boot left %v", list)
	}
	broken.env.CheckEmpty(t)
	testLogTellsWhy(t, broken)
}

// The operator learns why no sandbox came up, whichever function wanted it.
func testLogTellsWhy(t *testing.T, broken *host) {
	t.Helper()
	broken.fails(t, "run", obj{"image": "python", "lang": "shell", "code": "true"}, "S300", "it broke")
	if err := broken.end(); err != nil {
		t.Error(err)
	}
	for _, function := range []string{"create", "run"} {
		told := func(line string) bool {
			return strings.Contains(line, "level=WARN") && strings.Contains(line, "::"+function+" ") && strings.Contains(line, "it broke")
		}
		if !slices.ContainsFunc(strings.Split(broken.log.String(), "\n"), told) {
			t.Errorf("the log does not tell why %s failed", function)
		}
	}
}

// S004 is to be seen only while a sandbox ends, for a moment.
func TestChecklist_Stopping(t *testing.T) {
	t.Parallel()
	h := newHost(t, setup{})
	for range 20 { // a busy host may miss the moment
		seen := seenWhileStopping(t, h)
		delete(seen, "S216") // a call that the end of the VM cut off
		if seen["S004"] && len(seen) == 2 {
			return
		}
		if len(seen) > 1 {
			t.Fatalf("while it ended: %v", seen)
		}
	}
	t.Error("S004 was never seen")
}

// seenWhileStopping stops a sandbox and returns the codes of calls to it until it
// is gone.
func seenWhileStopping(t *testing.T, h *host) map[any]bool {
	t.Helper()
	id := h.create(t)
	up := h.dir(t, nil) + "/up"
	var running sync.WaitGroup
	defer running.Wait()
	running.Go(func() { _, _ = h.invoke("exec", shell(id, "trap '' TERM; touch "+up+"; sleep 1000")) })
	eventually(t, "start of the program", func() bool { return exists(up) })
	running.Go(func() { h.ok(t, "stop", obj{"sandbox_id": id}) })
	seen := map[any]bool{}
	for end := time.Now().Add(patience); !seen["S002"]; {
		if _, err := h.invoke("fs::stat", at(id, "/")); err != nil {
			seen[envelope(t, err)["code"]] = true
		}
		if time.Now().After(end) {
			t.Fatal("the sandbox does not end")
		}
	}
	return seen
}

func TestChecklist_Create(t *testing.T) {
	t.Parallel()
	h := newHost(t, setup{})
	for _, tt := range []obj{{"cpus": 0}, {"memory_mb": 63}, {"cpus": 256}, {"idle_timeout_secs": -1}, {"env": obj{"A": 1}}, {"env": nil}, {"network": "no"}} {
		tt["image"] = "python"
		h.fails(t, "create", tt, "S001")
	}
	h.ok(t, "stop", obj{"sandbox_id": h.create(t, obj{"network": true}), "wait": true})
	first := h.create(t, obj{"memory_mb": 64, "cpus": 1, "name": "é", "network": false, "idle_timeout_secs": 0, "env": obj{}})
	second := h.create(t, obj{"cpus": nil, "memory_mb": nil, "name": nil, "network": nil, "idle_timeout_secs": nil, "env": []string{}})
	list, _ := h.ok(t, "list", obj{})["sandboxes"].([]any)
	if len(list) != 2 {
		t.Fatalf("%v", list)
	}
	for i, want := range []obj{{"sandbox_id": first, "name": "é"}, {"sandbox_id": second, "name": nil}} {
		row, _ := list[i].(obj)
		delete(row, "age_secs")
		want["image"], want["exec_in_progress"], want["exec_in_flight"], want["exec_slots_free"], want["stopped"] = "python", false, 0, 4, false
		same(t, "list", row, want)
	}
	h.hold(t, second)
	list, _ = h.ok(t, "list", obj{})["sandboxes"].([]any)
	if row, _ := list[1].(obj); row["exec_in_progress"] != true || row["exec_in_flight"] != 1.0 || row["exec_slots_free"] != 3.0 {
		t.Errorf("%v", row)
	}
}

// Files: each operation on each kind of path. "ok" is a success.
func TestChecklist_FilesByKind(t *testing.T) {
	t.Parallel()
	h := newHost(t, setup{})
	id := h.create(t)
	kinds := []string{"file", "empty", "latin", "dir", "full", "to-file", "to-dir", "dangling", "none", "file/below"}
	table := map[string]string{
		//                 file empty latin dir  full to-file to-dir dangling none file/below
		"fs::ls":         "S212 S212 S212 ok   ok   S212 S212 S212 S211 S216",
		"fs::stat":       "ok   ok   ok   ok   ok   ok   ok   ok   S211 S216",
		"fs::rm":         "ok   ok   ok   ok   S214 ok   ok   ok   S211 S216",
		"fs::rm -r":      "ok   ok   ok   ok   ok   ok   ok   ok   S211 S216",
		"fs::chmod":      "ok   ok   ok   ok   ok   ok   ok   S211 S211 S211",
		"fs::chmod -R":   "ok   ok   ok   ok   ok   ok   ok   S211 S211 S211",
		"fs::mkdir":      "S213 S213 S213 S213 S213 S213 S213 S213 ok   S216",
		"fs::mkdir -p":   "S213 S213 S213 ok   ok   S213 ok   S213 ok   S216",
		"fs::mv from":    "ok   ok   ok   ok   ok   ok   ok   S211 S211 S211",
		"fs::mv onto":    "S213 S213 S213 S213 S213 S213 S213 ok   ok   S216",
		"fs::mv -f onto": "ok   ok   ok   S216 S216 ok   ok   ok   ok   S216",
		"fs::read":       "ok   ok   ok   S212 S212 ok   S212 S211 S211 S216",
		"fs::write":      "ok   ok   ok   S216 S216 ok   ok   ok   ok   S216",
		"fs::write -p":   "ok   ok   ok   S216 S216 ok   ok   ok   ok   S213",
		"fs::grep":       "ok   ok   ok   ok   ok   ok   ok   S211 S211 S216",
		"fs::sed files":  "ok   ok   ok   ok   ok   ok   ok   ok   ok   ok", // failures are in the results
		"fs::sed path":   "ok   ok   ok   ok   ok   ok   ok   S211 S211 S216",
	}
	for operation, row := range table {
		t.Run(operation, func(t *testing.T) {
			t.Parallel()
			codes := strings.Fields(row)
			if len(codes) != len(kinds) {
				t.Fatalf("%d codes", len(codes))
			}
			for i, kind := range kinds {
				dir := h.dir(t, map[string]string{"file": "foo\n", "empty": "", "latin": "\xe9\n", "full/x": "x", "source": "s"})
				if err := errors.Join(os.Mkdir(dir+"/dir", 0o755), os.Symlink("file", dir+"/to-file"), os.Symlink("full", dir+"/to-dir"), os.Symlink("nowhere", dir+"/dangling")); err != nil {
					t.Fatal(err)
				}
				function, req := fileCall(id, operation, dir+"/"+kind, dir)
				if codes[i] == "ok" {
					if _, err := h.invoke(function, req); err != nil {
						t.Errorf("%s on %s: %v", operation, kind, err)
					}
				} else {
					h.fails(t, function, req, codes[i])
				}
				for _, entry := range dirNames(t, dir) {
					if strings.Contains(entry, "tmp") || strings.HasPrefix(entry, ".") {
						t.Errorf("%s on %s left %s behind", operation, kind, entry)
					}
				}
			}
		})
	}
}

// fileCall is the call for an operation of the table.
func fileCall(id, operation, path, dir string) (function string, req obj) {
	function, how, _ := strings.Cut(operation, " ")
	req = at(id, path)
	switch operation {
	case "fs::rm -r":
		req["recursive"] = true
	case "fs::chmod", "fs::chmod -R":
		req["mode"], req["recursive"] = "0700", how == "-R"
	case "fs::mkdir -p":
		req["parents"] = true
	case "fs::mv from":
		req = obj{"sandbox_id": id, "src": path, "dst": dir + "/moved"}
	case "fs::mv onto", "fs::mv -f onto":
		req = obj{"sandbox_id": id, "src": dir + "/source", "dst": path, "overwrite": how == "-f onto"}
	case "fs::write", "fs::write -p":
		req["content"], req["parents"] = "new", how == "-p"
	case "fs::grep":
		req["pattern"] = "foo"
	case "fs::sed path":
		req["pattern"], req["replacement"] = "foo", "bar"
	case "fs::sed files":
		req = obj{"sandbox_id": id, "files": []string{path}, "pattern": "foo", "replacement": "bar"}
	}
	return function, req
}

func dirNames(t testing.TB, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func TestChecklist_Names(t *testing.T) {
	t.Parallel()
	h := newHost(t, setup{})
	id := h.create(t)
	dir := h.dir(t, map[string]string{"b": "", ".a": "22", "\xff": ""})
	if err := os.Chtimes(dir+"/b", time.Unix(-5, 0), time.Unix(-5, 5e8)); err != nil {
		t.Fatal(err)
	}
	list, _ := h.ok(t, "fs::ls", at(id, dir))["entries"].([]any)
	var names []string
	for _, e := range list {
		entry, _ := e.(obj)
		names = append(names, fmt.Sprint(entry["name"], entry["size"]))
	}
	same(t, "ls", names, []string{".a2", "b0", "\uFFFD0"})
	if out := h.ok(t, "fs::stat", at(id, dir+"/b")); out["mtime"] != -5.0 {
		t.Errorf("mtime %v", out["mtime"])
	}
	for path, name := range map[string]string{"/": "/", "/etc/": "etc", dir + "/b": "b", dir + "/..": dir + "/.."} {
		if out := h.ok(t, "fs::stat", at(id, path)); out["name"] != name {
			t.Errorf("name of %s: %v", path, out["name"])
		}
	}
	h.fails(t, "fs::stat", at(id, ""), "S211")
	h.fails(t, "fs::stat", at(id, "a\x00b"), "S216")
	h.fails(t, "fs::chmod", at(id, "a\x00b", obj{"mode": "0600"}), "S211")
	h.ok(t, "fs::stat", at(id, "etc")) // relative to /
	h.fails(t, "fs::stat", at(id, dir+"/"+strings.Repeat("x", 300)), "S216")
	same(t, "an empty directory", h.ok(t, "fs::ls", at(id, h.dir(t, nil))), obj{"entries": []obj{}})
}

// Writers at the same time: a reader sees one's content, whole, and nothing else
// is left.
func TestChecklist_ConcurrentWriters(t *testing.T) {
	t.Parallel()
	h := newHost(t, setup{})
	id := h.create(t)
	dir := h.dir(t, nil)
	var group sync.WaitGroup
	for i := range 8 {
		group.Go(func() {
			h.ok(t, "fs::write", at(id, dir+"/file", obj{"content": strings.Repeat(fmt.Sprint(i), 200_000)}))
		})
	}
	group.Wait()
	got := content(t, dir+"/file")
	if len(got) != 200_000 || strings.Count(got, got[:1]) != len(got) {
		t.Errorf("a torn file of %d bytes", len(got))
	}
	same(t, "directory", dirNames(t, dir), []string{"file"})
}

func TestChecklist_GrepLines(t *testing.T) {
	t.Parallel()
	h := newHost(t, setup{})
	id := h.create(t)
	path := h.file(t, "lines", "one\r\n\ntwo\rthree\n\xff\n"+strings.Repeat("é", 3000)+"\nlast")
	out := h.ok(t, "fs::grep", at(id, path, obj{"pattern": "", "max_line_bytes": 5}))
	same(t, "grep", out["matches"], []obj{
		{"path": path, "line": 1, "content": "one"},
		{"path": path, "line": 2, "content": ""},
		{"path": path, "line": 3, "content": "two\rt…"},
		{"path": path, "line": 5, "content": "éé…"},
		{"path": path, "line": 6, "content": "last"},
	})
	if list, _ := h.ok(t, "fs::grep", at(id, path, obj{"pattern": "LAST", "ignore_case": true}))["matches"].([]any); len(list) != 1 {
		t.Errorf("%v", list)
	}
}

// Channels: an early error of the guest does not wait for the body (section 11,
// 11: the writer is never connected here).
func TestChecklist_EarlyErrorOfAnUpload(t *testing.T) {
	t.Parallel()
	h := newHost(t, setup{})
	id := h.create(t)
	for code, more := range map[string]obj{"S210": {"mode": "x"}, "S211": {"path": "/no/such/dir/x"}, "S216": {"path": "/etc"}} {
		reader, _ := h.upload(t)
		req := at(id, h.files+"/x", obj{"content": reader}, more)
		h.fails(t, "fs::write", req, code)
	}
	reader, _ := h.upload(t)
	h.fails(t, "fs::write", at(nobody, "/x", obj{"content": reader}), "S002")
	h.fails(t, "fs::write", at(id, "/x", obj{"content": reader, "content_b64": ""}), "S001", "not both")
}

// A slow caller gets every byte of a large file, and a large upload arrives.
func TestChecklist_LargeTransfers(t *testing.T) {
	t.Parallel()
	h := newHost(t, setup{})
	id := h.create(t)
	data := []byte(strings.Repeat("0123456789abcdef", 1<<20) + "end") // 16 MiB
	want := sha256.Sum256(data)
	reader, send := h.upload(t)
	go send(data)
	path := h.files + "/large"
	same(t, "write", h.ok(t, "fs::write", at(id, path, obj{"content": reader})), obj{"bytes_written": len(data), "path": path})
	if sha256.Sum256([]byte(content(t, path))) != want {
		t.Error("the upload arrived changed")
	}
	// Three readers, of which none takes anything while the others' files are opened.
	var contents []any
	for range 3 {
		contents = append(contents, h.ok(t, "fs::read", at(id, path))["content"])
	}
	for _, c := range contents {
		got, texts := h.download(t, c)
		if sha256.Sum256(got) != want || len(texts) > 0 {
			t.Errorf("%d bytes came, texts %q", len(got), texts)
		}
	}
}

// A download whose sandbox ends is cut with a text frame; one that nobody takes
// holds nothing up.
func TestChecklist_BrokenDownload(t *testing.T) {
	t.Parallel()
	h := newHost(t, setup{})
	id := h.create(t)
	out := h.ok(t, "fs::read", at(id, h.file(t, "large", strings.Repeat("x", 16<<20))))
	h.ok(t, "stop", obj{"sandbox_id": id, "wait": true})
	data, texts := h.download(t, out["content"])
	if len(data) >= 16<<20 || len(texts) != 1 {
		t.Fatalf("%d bytes came, texts %q", len(data), texts)
	}
	var text struct {
		Error string `json:"error"`
	}
	if err := json.Unmarshal([]byte(texts[0]), &text); err != nil || text.Error == "" {
		t.Errorf("text frame %s", texts[0])
	}
	none := iii.ChannelRef{ChannelID: ref(t, out["content"]).ChannelID, AccessKey: nobody, Direction: "read"}
	if _, err := h.caller.OpenReader(h.ctx(), none, iii.ChannelOptions{}); !errors.Is(err, iii.ErrNoChannel) {
		t.Errorf("another key: %v", err)
	}
}
