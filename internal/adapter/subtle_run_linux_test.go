package adapter_test

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/vmtest"
)

// The rows of TestSubtle that are about runs, the catalog and channels.

func subtle38(t *testing.T, h *host, _ string) {
	vmtest.LockRunFiles(t)
	// Programs of these names that tell what they were called with, and by whom.
	tell := "#!/bin/sh\nprintf '%s %s %s %s' \"${0##*/}\" \"$*\" \"$WHO\" \"$PWD\"\n"
	dir := h.dir(t, map[string]string{"node": tell, "python3": tell, "Python": tell, "cobol": tell, "bash": tell, "sh": tell})
	for _, name := range []string{"node", "python3", "Python", "cobol", "bash", "sh"} {
		if err := os.Chmod(dir+"/"+name, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for lang, want := range map[string]string{
		"node": "node /tmp/run.js", "js": "node /tmp/run.js", "javascript": "node /tmp/run.js",
		"python": "python3 /tmp/run.py", "py": "python3 /tmp/run.py",
		"Python": "Python /tmp/run.txt", "cobol": "cobol /tmp/run.txt", dir + "/cobol": "cobol /tmp/run.txt",
	} {
		out := h.ok(t, "run", obj{"image": "python", "code": "x", "lang": lang, "env": obj{"PATH": dir, "WHO": "me"}})
		if out["stdout"] != want+" me /" || out["success"] != true {
			t.Errorf("%s: %v", lang, out)
		}
		if _, has := out["sandbox_id"]; has {
			t.Errorf("%s: sandbox_id in %v", lang, out)
		}
	}
	for _, lang := range []string{"shell", "sh", "bash"} {
		out := h.ok(t, "run", obj{"image": "python", "code": `read line; echo "$0 $line"; exit 3`, "lang": lang, "stdin": "aGk="})
		// All three are /bin/sh, whatever else has that name.
		other := h.ok(t, "run", obj{"image": "python", "code": `echo "$0"`, "lang": lang, "env": obj{"PATH": dir}})
		if other["stdout"] != "/tmp/run.sh\n" {
			t.Errorf("%s: %v", lang, other)
		}
		if out["stdout"] != "/tmp/run.sh hi\n" || out["exit_code"] != 3.0 || out["success"] != false {
			t.Errorf("%s: %v", lang, out)
		}
	}
	if out := h.ok(t, "run", obj{"image": "python", "code": "", "lang": "no-such-lang"}); out["exit_code"] != 127.0 {
		t.Errorf("%v", out)
	}
}

func subtle39(t *testing.T, h *host, _ string) {
	vmtest.LockRunFiles(t)
	fix := func(step string, id any, inner string) obj {
		return obj{"context": "during sandbox::run step `" + step + "`", "sandbox_id": id, "inner_code": inner}
	}
	run := func(more obj) obj {
		req := obj{"image": "python", "code": "exit 0", "lang": "shell"}
		maps.Copy(req, more)
		return req
	}
	e := h.fails(t, "run", run(obj{"image": "nope"}), "S100", "create", "python")
	same(t, "create", e["fix"], fix("create", "", "S100"))
	if e["type"] != "config" || e["fix_note"] != nil {
		t.Errorf("%v", e)
	}
	if e := h.fails(t, "run", run(obj{"image": "refused"}), "S102", "create"); e["retryable"] != true {
		t.Errorf("%v", e)
	}
	for step, more := range map[string]obj{
		"fs::write (sibling file)": {"files": []obj{{"path": "/etc/passwd/x", "content": ""}}},
		"exec":                     {"code": "sleep 100", "timeout_ms": 100},
	} {
		e := h.fails(t, "run", run(more), map[string]string{"exec": "S200"}[step]+map[string]string{"fs::write (sibling file)": "S213"}[step], step)
		f, _ := e["fix"].(obj)
		id, _ := f["sandbox_id"].(string)
		same(t, step, f, fix(step, id, fmt.Sprint(e["code"])))
		h.fails(t, "stop", obj{"sandbox_id": id}, "S002") // torn down
	}
	h.fails(t, "run", run(obj{"lang": "python3 -u"}), "S001", "exec", "ambiguous")
	e = h.fails(t, "run", run(obj{"lang": ""}), "S001", "exec")
	if f, _ := e["fix"].(obj); f["inner_code"] != "S001" {
		t.Errorf("%v", e)
	}
	e = h.fails(t, "run", run(obj{"code": "sleep 100", "timeout_ms": 100, "keep_sandbox": true}), "S200")
	f, _ := e["fix"].(obj)
	h.ok(t, "stop", obj{"sandbox_id": f["sandbox_id"]}) // was left running

	out := h.ok(t, "run", run(obj{"keep_sandbox": true}))
	h.ok(t, "exec", obj{"sandbox_id": out["sandbox_id"], "cmd": "true"})
	h.ok(t, "stop", obj{"sandbox_id": out["sandbox_id"], "wait": true})
	// A file with the code's own path is overwritten by the code.
	if out := h.ok(t, "run", run(obj{"files": []obj{{"path": "/tmp/run.sh", "content": "exit 9"}}})); out["exit_code"] != 0.0 {
		t.Errorf("%v", out)
	}
}

func subtle40(t *testing.T, h *host, _ string) {
	same(t, "catalog::list", h.ok(t, "catalog::list", obj{"unknown": 1}), obj{"images": []obj{
		{"name": "python", "oci_ref": "docker.io/iiidev/python:latest", "kind": "preset"},
		{"name": "node", "oci_ref": "docker.io/iiidev/node:latest", "kind": "preset"},
		{"name": "app", "oci_ref": "127.0.0.1:1/app:1", "kind": "custom"},
		{"name": "hidden", "oci_ref": "127.0.0.1:1/hidden:1", "kind": "custom"},
		{"name": "refused", "oci_ref": "127.0.0.1:1/refused:1", "kind": "custom"},
	}})
	h.fails(t, "create", obj{"image": "hidden"}, "S100", "python, app, refused")
	h.fails(t, "create", obj{"image": "node"}, "S100")
	h.fails(t, "create", obj{"image": "127.0.0.1:1/app:1"}, "S100")
}

func subtle44(t *testing.T, h *host, id string) {
	dir := h.dir(t, map[string]string{"old": "old"})
	t.Run("a clean close commits what came", func(t *testing.T) {
		t.Parallel()
		reader, send := h.upload(t)
		go send(bytes.Repeat([]byte{0, 1, 2}, 100_000))
		same(t, "write", h.ok(t, "fs::write", at(id, dir+"/whole", obj{"content": reader})), obj{"bytes_written": 300_000, "path": dir + "/whole"})
		if got := content(t, dir+"/whole"); got != strings.Repeat("\x00\x01\x02", 100_000) {
			t.Error("other bytes arrived")
		}
	})
	t.Run("an end that was taken is empty", func(t *testing.T) {
		t.Parallel()
		reader, _ := h.upload(t)
		first, err := h.caller.OpenReader(h.ctx(), reader, iii.ChannelOptions{})
		if err != nil {
			t.Fatal(err)
		}
		same(t, "write", h.ok(t, "fs::write", at(id, dir+"/again", obj{"content": reader})), obj{"bytes_written": 0, "path": dir + "/again"})
		if err := first.Close(); err != nil {
			t.Error(err)
		}
	})
	t.Run("a channel that is not there is S218", func(t *testing.T) {
		t.Parallel()
		none := obj{"channel_id": nobody, "access_key": nobody, "direction": "read"}
		h.fails(t, "fs::write", at(id, dir+"/none", obj{"content": none}), "S218")
	})
	t.Run("a stall is S218", func(t *testing.T) {
		t.Parallel()
		reader, _ := h.upload(t)
		if e := h.fails(t, "fs::write", at(id, dir+"/old", obj{"content": reader}), "S218", "stalled"); e["type"] != "transient" || e["retryable"] != true {
			t.Errorf("%v", e)
		}
		if content(t, dir+"/old") != "old" {
			t.Error("the old file is gone")
		}
	})
	t.Cleanup(func() {
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Error(err)
		}
		for _, e := range entries {
			if name := e.Name(); name != "old" && name != "whole" && name != "again" {
				t.Errorf("left behind: %s", filepath.Join(dir, name))
			}
		}
	})
}
