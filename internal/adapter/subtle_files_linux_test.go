package adapter_test

import (
	"fmt"
	"maps"
	"os"
	"strings"
	"testing"
)

// The rows of TestSubtle that are about files.

func mode(t testing.TB, path string) string {
	t.Helper()
	info, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	bits := info.Mode().Perm()
	for special, bit := range map[os.FileMode]os.FileMode{os.ModeSetuid: 0o4000, os.ModeSetgid: 0o2000, os.ModeSticky: 0o1000} {
		if info.Mode()&special != 0 {
			bits |= bit
		}
	}
	return fmt.Sprintf("%04o", uint32(bits))
}

func isLink(path string) bool {
	info, err := os.Lstat(path)
	return err == nil && info.Mode()&os.ModeSymlink != 0
}

func subtle25(t *testing.T, h *host, id string) {
	dir := h.dir(t, map[string]string{"d/x": "x", "f": "foo\n", "g": "foo\n"})
	toDir, toFile := link(t, dir+"/d", dir+"/to-dir"), link(t, dir+"/f", dir+"/to-file")
	h.fails(t, "fs::ls", at(id, toDir), "S212")
	if list, _ := h.ok(t, "fs::ls", at(id, toDir+"/"))["entries"].([]any); len(list) != 1 {
		t.Errorf("with a slash: %v", list)
	}
	if out := h.ok(t, "fs::stat", at(id, toFile)); out["is_symlink"] != true || out["is_dir"] != false || out["size"] != float64(len(dir+"/f")) {
		t.Errorf("stat: %v", out)
	}
	if out := h.ok(t, "fs::read", at(id, toFile)); out["body"] != "foo\n" || out["size"] != 4.0 {
		t.Errorf("read: %v", out)
	}
	h.ok(t, "fs::chmod", at(id, toFile, obj{"mode": "0600"}))
	if got := mode(t, dir+"/f"); got != "0600" {
		t.Errorf("chmod through the link: %s", got)
	}
	if err := os.Symlink("nowhere", dir+"/dangling"); err != nil {
		t.Fatal(err)
	}
	h.fails(t, "fs::read", at(id, dir+"/dangling"), "S211")
	h.fails(t, "fs::chmod", at(id, dir+"/dangling", obj{"mode": "0600"}), "S211")
	h.fails(t, "fs::mkdir", at(id, dir+"/dangling"), "S213")
	h.ok(t, "fs::stat", at(id, dir+"/dangling"))

	moved := dir + "/moved"
	h.ok(t, "fs::mv", obj{"sandbox_id": id, "src": toFile, "dst": moved})
	if !isLink(moved) || isLink(toFile) || content(t, dir+"/f") != "foo\n" {
		t.Error("mv did not move the link itself")
	}
	h.ok(t, "fs::write", at(id, moved, obj{"content": "new"}))
	if isLink(moved) || content(t, moved) != "new" || content(t, dir+"/f") != "foo\n" {
		t.Error("write did not replace the link")
	}
	toG := link(t, dir+"/g", dir+"/to-g")
	h.ok(t, "fs::sed", obj{"sandbox_id": id, "files": []string{toG}, "pattern": "foo", "replacement": "bar"})
	if isLink(toG) || content(t, toG) != "bar\n" || content(t, dir+"/g") != "foo\n" {
		t.Error("sed did not replace the link")
	}
	h.ok(t, "fs::rm", at(id, toDir))
	if content(t, dir+"/d/x") != "x" || isLink(toDir) {
		t.Error("rm did not unlink the link alone")
	}
}

func subtle26(t *testing.T, h *host, id string) {
	dir := h.dir(t, nil)
	same(t, "mkdir", h.ok(t, "fs::mkdir", at(id, dir+"/a/b/c", obj{"parents": true, "mode": "0700"})), obj{"created": true})
	for path, want := range map[string]string{"/a": "0755", "/a/b": "0755", "/a/b/c": "0700"} {
		if got := mode(t, dir+path); got != want {
			t.Errorf("%s has mode %s, want %s", path, got, want)
		}
	}
	h.ok(t, "fs::mkdir", at(id, dir+"/sticky", obj{"mode": "1777"}))
	if got := mode(t, dir+"/sticky"); got != "1777" {
		t.Errorf("mode %s", got)
	}
	same(t, "an existing one", h.ok(t, "fs::mkdir", at(id, dir+"/a/b/c", obj{"parents": true, "mode": "0777"})), obj{"created": false})
	if got := mode(t, dir+"/a/b/c"); got != "0700" {
		t.Errorf("its mode became %s", got)
	}
	h.fails(t, "fs::mkdir", at(id, dir+"/a"), "S213")
	h.file(t, strings.TrimPrefix(dir, h.files)+"/file", "")
	h.fails(t, "fs::mkdir", at(id, dir+"/file", obj{"parents": true}), "S213") // DESIGN
	h.fails(t, "fs::mkdir", at(id, dir+"/file/x", obj{"parents": true}), "S216")
}

func subtle27(t *testing.T, h *host, id string) {
	path := h.file(t, "mode/file", "")
	for text, want := range map[string]string{"": "0000", "0": "0000", "000": "0000", "755": "0755", "+755": "0755", "0000755": "0755", "4755": "4755"} {
		h.ok(t, "fs::chmod", at(id, path, obj{"mode": text}))
		if got := mode(t, path); got != want {
			t.Errorf("%q: mode %s, want %s", text, got, want)
		}
		if out := h.ok(t, "fs::stat", at(id, path)); out["mode"] != want {
			t.Errorf("%q: stat says %v", text, out["mode"])
		}
	}
	for _, text := range []string{"0o755", "8", "-1", " 755", "rwx", "40000000000"} {
		h.fails(t, "fs::chmod", at(id, path, obj{"mode": text}), "S210")
		h.fails(t, "fs::chmod", at(id, "/no/such", obj{"mode": text}), "S210")
		h.fails(t, "fs::mkdir", at(id, "/no/such/dir", obj{"mode": text}), "S210")
		h.fails(t, "fs::write", at(id, "/no/such/file", obj{"mode": text, "content": ""}), "S210")
	}
}

func subtle28(t *testing.T, h *host, id string) {
	path := h.file(t, "reset/script", "")
	if err := os.Chmod(path, 0o755); err != nil {
		t.Fatal(err)
	}
	same(t, "write", h.ok(t, "fs::write", at(id, path, obj{"content": "é"})), obj{"bytes_written": 2, "path": path})
	if got := mode(t, path); got != "0644" {
		t.Errorf("mode %s", got)
	}
	h.ok(t, "fs::write", at(id, path, obj{"content": "", "mode": "0755"}))
	if got := mode(t, path); got != "0755" || content(t, path) != "" {
		t.Errorf("mode %s", got)
	}
}

func subtle29(t *testing.T, h *host, id string) {
	dir := h.dir(t, map[string]string{"file": "", "full/x": "", "other/y": ""})
	for function, req := range map[string]obj{
		"fs::stat": at(id, dir+"/file/x"), "fs::ls": at(id, dir+"/file/x"), "fs::rm": at(id, dir+"/file/x"), "fs::read": at(id, dir+"/file/x"),
		"fs::mkdir": at(id, dir+"/file/x"), "fs::grep": at(id, dir+"/file/x", obj{"pattern": "x"}),
	} {
		h.fails(t, function, req, "S216")
	}
	// What only asks whether something is there takes any error for "no".
	h.fails(t, "fs::chmod", at(id, dir+"/file/x", obj{"mode": "0644"}), "S211")
	h.fails(t, "fs::mv", obj{"sandbox_id": id, "src": dir + "/file/x", "dst": dir + "/z"}, "S211")

	h.fails(t, "fs::mv", obj{"sandbox_id": id, "src": dir + "/full", "dst": dir + "/other", "overwrite": true}, "S216")
	h.fails(t, "fs::rm", at(id, dir+"/full"), "S214")
	if content(t, dir+"/full/x") != "" {
		t.Error("rm removed something")
	}
	h.ok(t, "fs::rm", at(id, dir+"/full", obj{"recursive": true}))
}

func subtle30(t *testing.T, h *host, id string) {
	e := h.fails(t, "fs::rm", at(id, "/no/such/path", obj{"recursive": true}), "S211", "/no/such/path")
	if e["fix"] != nil || e["fix_note"] != nil {
		t.Errorf("%v", e)
	}
}

func subtle31(t *testing.T, h *host, id string) {
	dir := h.dir(t, map[string]string{"file": ""})
	for function, more := range map[string]obj{"fs::write": {"content": "x"}, "fs::mkdir": {}} {
		e := h.fails(t, function, at(id, dir+"/a/b/"+function, more), "S211", "parent not found", dir+"/a/b")
		same(t, function, e["fix"], obj{"parents": true})
		if note := fmt.Sprint(e["fix_note"]); !strings.Contains(note, "parents: true") || !strings.Contains(note, "merge") {
			t.Errorf("fix_note %q", note)
		}
		req := at(id, dir+"/a/b/"+function, more)
		req["parents"] = true // as the fix says
		h.ok(t, function, req)
		if err := os.RemoveAll(dir + "/a"); err != nil {
			t.Fatal(err)
		}
	}
	for function, more := range map[string]obj{"fs::read": {}, "fs::rm": {}, "fs::ls": {}, "fs::stat": {}, "fs::chmod": {"mode": "0644"}} {
		if e := h.fails(t, function, at(id, dir+"/missing/x", more), "S211"); e["fix"] != nil {
			t.Errorf("%s: %v", function, e)
		}
	}
	if e := h.fails(t, "fs::mv", obj{"sandbox_id": id, "src": dir + "/file", "dst": dir + "/missing/x"}, "S211"); e["fix"] != nil {
		t.Errorf("mv: %v", e)
	}
	h.fails(t, "fs::write", at(id, dir+"/file/x", obj{"content": ""}), "S216")
	h.fails(t, "fs::write", at(id, dir+"/file/x", obj{"content": "", "parents": true}), "S213")
	h.fails(t, "fs::write", at(id, dir+"/file/x/y", obj{"content": "", "parents": true}), "S216")
	h.fails(t, "fs::write", at(id, dir, obj{"content": ""}), "S216")
}

func subtle32(t *testing.T, h *host, id string) {
	dir := h.dir(t, map[string]string{"a": "fox\n(fox\r\nx fox,fox\nfox"})
	path := dir + "/a"
	out := h.ok(t, "fs::grep", at(id, path, obj{"pattern": "fox$"}))
	same(t, "grep", out["matches"], []obj{
		{"path": path, "line": 1, "content": "fox"},
		{"path": path, "line": 2, "content": "(fox"},
		{"path": path, "line": 3, "content": "x fox,fox"},
		{"path": path, "line": 4, "content": "fox"},
	})
	sed := func(more obj) obj {
		more["sandbox_id"], more["files"], more["replacement"] = id, []string{path}, "bar"
		return h.ok(t, "fs::sed", more)
	}
	if out := sed(obj{"pattern": "fox$"}); out["total_replacements"] != 1.0 || content(t, path) != "fox\n(fox\r\nx fox,fox\nbar" {
		t.Errorf("sed: %v, %q", out, content(t, path))
	}
	if out := sed(obj{"pattern": "fox", "first_only": true}); out["total_replacements"] != 3.0 || content(t, path) != "bar\n(bar\r\nx bar,fox\nbar" {
		t.Errorf("first_only: %v, %q", out, content(t, path))
	}
	for most, truncated := range map[int]bool{3: true, 4: true, 5: false} {
		out := h.ok(t, "fs::grep", at(id, path, obj{"pattern": "bar", "max_matches": most}))
		if list, _ := out["matches"].([]any); len(list) != min(most, 4) || out["truncated"] != truncated {
			t.Errorf("max_matches %d: %v", most, out)
		}
	}
}

func subtle33(t *testing.T, h *host, id string) {
	dir := h.dir(t, map[string]string{"binary": "foo\x00foo", "latin": "foo \xe9 foo\n", "none": "other\n", "text": "foo\n"})
	before, err := os.Stat(dir + "/none")
	if err != nil {
		t.Fatal(err)
	}
	out := h.ok(t, "fs::grep", at(id, dir, obj{"pattern": "foo"}))
	same(t, "grep", out["matches"], []obj{{"path": dir + "/text", "line": 1, "content": "foo"}})
	same(t, "an explicit binary", h.ok(t, "fs::grep", at(id, dir+"/binary", obj{"pattern": "foo"})), obj{"matches": []obj{}, "truncated": false})

	out = h.ok(t, "fs::sed", at(id, dir, obj{"pattern": "foo", "replacement": "bar"}))
	results, _ := out["results"].([]any)
	if len(results) != 4 || out["total_replacements"] != 3.0 {
		t.Fatalf("%v", out)
	}
	for i, want := range []obj{
		{"path": dir + "/binary", "replacements": 2, "success": true},
		nil,
		{"path": dir + "/none", "replacements": 0, "success": true},
		{"path": dir + "/text", "replacements": 1, "success": true},
	} {
		if want != nil {
			same(t, "sed", results[i], want)
		}
	}
	if latin, _ := results[1].(obj); latin["success"] != false || latin["replacements"] != 0.0 || latin["error"] == nil || latin["error"] == "" {
		t.Errorf("not UTF-8: %v", latin)
	}
	if content(t, dir+"/binary") != "bar\x00bar" || content(t, dir+"/latin") != "foo \xe9 foo\n" {
		t.Error("contents after sed")
	}
	if after, err := os.Stat(dir + "/none"); err != nil || !os.SameFile(before, after) {
		t.Error("a file without a match was rewritten")
	}
}

func subtle34(t *testing.T, h *host, id string) {
	both := obj{"files": []string{"/x"}, "path": "/x"}
	for _, form := range []obj{both, {}, {"files": []string{}}, {"path": nil}} {
		form["sandbox_id"], form["pattern"], form["replacement"] = nobody, "(", ""
		h.fails(t, "fs::sed", form, "S210")
		form["sandbox_id"] = "no uuid"
		h.fails(t, "fs::sed", form, "S001")
	}
	h.fails(t, "fs::sed", obj{"sandbox_id": nobody, "path": "", "pattern": "x", "replacement": ""}, "S002")
	sed := func(more obj) obj {
		more["sandbox_id"], more["replacement"] = id, ""
		return more
	}
	dir := h.dir(t, map[string]string{"f": "x"})
	h.fails(t, "fs::sed", sed(obj{"path": "", "pattern": "x"}), "S211")
	h.fails(t, "fs::sed", sed(obj{"path": dir + "/none", "pattern": "("}), "S211")
	h.fails(t, "fs::sed", sed(obj{"path": dir, "pattern": "(", "recursive": false}), "S210", "recursive")
	h.fails(t, "fs::sed", sed(obj{"path": dir, "pattern": "("}), "S217")
	h.fails(t, "fs::sed", sed(obj{"path": dir, "pattern": "", "regex": false}), "S210", "pattern")
	h.ok(t, "fs::sed", sed(obj{"path": dir + "/f", "pattern": "x", "recursive": false}))
	h.fails(t, "fs::grep", at(id, dir, obj{"pattern": "x", "recursive": false}), "S210", "recursive")
	h.fails(t, "fs::grep", at(id, dir, obj{"pattern": "(", "recursive": false}), "S217")
	h.fails(t, "fs::grep", at(id, dir+"/none", obj{"pattern": "("}), "S211")
}

// DESIGN: globs are gitignore's, also where earlier adapters had a rule of their
// own.
func subtle35(t *testing.T, h *host, id string) {
	dir := h.dir(t, map[string]string{
		"main.py": "x", "src/a.py": "x", "src/sub/b.py": "x", "node_modules/p/c.js": "x", "é.txt": "x",
	})
	for _, tt := range []struct {
		include, exclude []string
		want             string
	}{
		{nil, nil, "main.py node_modules/p/c.js src/a.py src/sub/b.py é.txt"},
		{[]string{"*.py"}, nil, "main.py src/a.py src/sub/b.py"},
		{[]string{"src/*.py"}, nil, "src/a.py"},
		{[]string{"**/*.py"}, nil, "main.py src/a.py src/sub/b.py"},
		{[]string{"src/**"}, nil, "src/a.py src/sub/b.py"},
		{nil, []string{"node_modules"}, "main.py src/a.py src/sub/b.py é.txt"},
		{nil, []string{"node_modules/"}, "main.py src/a.py src/sub/b.py é.txt"},
		{nil, []string{"*.py", "?.txt"}, "node_modules/p/c.js é.txt"}, // ? is a byte, as in git
		{nil, []string{"*.py", "??.txt"}, "node_modules/p/c.js"},
		{[]string{"*.{py,js}"}, nil, ""},
		{[]string{"[ms]*.py"}, nil, "main.py"},
	} {
		out := h.ok(t, "fs::grep", at(id, dir, obj{"pattern": "x", "include_glob": orEmpty(tt.include), "exclude_glob": orEmpty(tt.exclude)}))
		var found []string
		list, _ := out["matches"].([]any)
		for _, m := range list {
			match, _ := m.(obj)
			found = append(found, strings.TrimPrefix(fmt.Sprint(match["path"]), dir+"/"))
		}
		if got := strings.Join(found, " "); got != tt.want {
			t.Errorf("include %q exclude %q: %s, want %s", tt.include, tt.exclude, got, tt.want)
		}
	}
}

func orEmpty(list []string) []string { return append([]string{}, list...) }

func subtle36(t *testing.T, h *host, id string) {
	path := h.file(t, "templates/f", "")
	for _, tt := range []struct {
		pattern, replacement string
		more                 obj
		from, want           string
	}{
		{"(a)", "[$1]", nil, "a", "[a]"},
		{"(a)", "[$1x]", nil, "a", "[]"},
		{"(a)", "[${1}x]", nil, "a", "[ax]"},
		{"(a)", "[$1é]", nil, "a", "[aé]"},
		{"(?P<n>a)", "[$n|${n}|$0|$9|$no]", nil, "a", "[a|a|a||]"},
		{"a", `\1`, nil, "a", `\1`},
		{"a", "$$1 $- ${1 $", nil, "a", "$1 $- ${1 $"},
		{"a", "[${foo bar}]", nil, "a", "[]"},
		{"a", "$1$$", obj{"regex": false}, "A a", "A $1$$"},
		{"a", "$$", obj{"regex": false, "ignore_case": true}, "A a", "$$ $$"}, // section 11, 7
		{"x*", "-", nil, "abc\n", "-a-b-c-\n-"},
		{"a.c", "X", obj{"regex": false}, "abc a.c", "abc X"},
	} {
		if err := os.WriteFile(path, []byte(tt.from), 0o644); err != nil {
			t.Fatal(err)
		}
		req := obj{"sandbox_id": id, "files": []string{path}, "pattern": tt.pattern, "replacement": tt.replacement}
		maps.Copy(req, tt.more)
		h.ok(t, "fs::sed", req)
		if got := content(t, path); got != tt.want {
			t.Errorf("%q -> %q on %q: %q, want %q", tt.pattern, tt.replacement, tt.from, got, tt.want)
		}
	}
	for _, pattern := range []string{"(", `\1`, "(?=x)", `a{`, `\Q..\E`} {
		h.fails(t, "fs::grep", at(id, path, obj{"pattern": pattern}), "S217")
	}
	if err := os.WriteFile(path, []byte("٣\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if list, _ := h.ok(t, "fs::grep", at(id, path, obj{"pattern": `^\d\b$`}))["matches"].([]any); len(list) != 1 {
		t.Error(`\d is not Unicode's`)
	}
}

func subtle37(t *testing.T, h *host, id string) {
	const mib = 1 << 20
	for _, tt := range []struct {
		name, data string
		body       bool
	}{
		{"empty", "", true},
		{"text", "\ufeffa\x00é\n", true},
		{"below", strings.Repeat("x", mib-1), true},
		{"exactly", strings.Repeat("x", mib), false},
		{"large", strings.Repeat("0123456789abcdef", 5*mib/16) + "end", false},
		{"binary", "a\xffb", false},
	} {
		path := h.file(t, "read/"+tt.name, tt.data)
		out := h.ok(t, "fs::read", at(id, path))
		body, has := out["body"]
		if has != tt.body || has && body != tt.data || out["size"] != float64(len(tt.data)) || out["mode"] != "0644" {
			t.Errorf("%s: body %v, size %v, mode %v", tt.name, has, out["size"], out["mode"])
		}
		data, texts := h.download(t, out["content"])
		if string(data) != tt.data || len(texts) != 0 {
			t.Errorf("%s: %d bytes came through the channel, texts %q", tt.name, len(data), texts)
		}
	}
	out := h.ok(t, "fs::read", at(id, "/proc/version"))
	data, _ := h.download(t, out["content"])
	if out["size"] != 0.0 || out["body"] != string(data) || len(data) == 0 {
		t.Errorf("a file of /proc: size %v, body %v, %d bytes", out["size"], out["body"], len(data))
	}
	// Its size is 0 as well, but less than 1 MiB is what counts.
	if symbols, err := os.ReadFile("/proc/kallsyms"); err == nil && len(symbols) > mib {
		out := h.ok(t, "fs::read", at(id, "/proc/kallsyms"))
		data, _ := h.download(t, out["content"])
		if _, has := out["body"]; has || out["size"] != 0.0 || len(data) <= mib {
			t.Errorf("a large file of /proc: body %v, size %v, %d bytes", has, out["size"], len(data))
		}
	}
	h.fails(t, "fs::read", at(id, h.files), "S212")
	h.fails(t, "fs::read", at(id, h.files+"/none"), "S211")
}

func subtle41(t *testing.T, h *host, id string) {
	bare := strings.ReplaceAll(id, "-", "")
	for _, form := range []string{id, strings.ToUpper(id), bare, "urn:uuid:" + id, "{" + id + "}"} {
		h.ok(t, "fs::stat", at(form, "/"))
	}
	for _, form := range []string{"", " " + id, id + " ", id[1:], "no", strings.Repeat("x", 36)} {
		h.fails(t, "fs::stat", at(form, "/"), "S001", "UUID")
		h.fails(t, "stop", obj{"sandbox_id": form}, "S001", "UUID")
	}
	h.fails(t, "fs::stat", at(nobody, "/"), "S002")
	same(t, "stop", h.ok(t, "stop", obj{"sandbox_id": bare}), obj{"sandbox_id": id, "stopped": true})
}

func subtle42(t *testing.T, h *host, id string) {
	dir := h.dir(t, map[string]string{"file": "f", "full/x": "", "sub/y": ""})
	if err := os.Mkdir(dir+"/empty", 0o755); err != nil {
		t.Fatal(err)
	}
	mv := func(src, dst string, overwrite bool) obj {
		return obj{"sandbox_id": id, "src": dir + src, "dst": dir + dst, "overwrite": overwrite}
	}
	h.fails(t, "fs::mv", mv("/file", "/full", false), "S213")
	h.fails(t, "fs::mv", mv("/file", "/full", true), "S216")
	h.fails(t, "fs::mv", mv("/full", "/file", true), "S216")
	h.fails(t, "fs::mv", mv("/full", "/full/inner", false), "S216")
	h.fails(t, "fs::mv", mv("/file", "/file", false), "S213")
	h.ok(t, "fs::mv", mv("/file", "/file", true))
	h.ok(t, "fs::mv", mv("/sub", "/empty", true))
	if content(t, dir+"/empty/y") != "" || content(t, dir+"/file") != "f" {
		t.Error("contents after mv")
	}
	if _, err := os.Stat(dir + "/full/file"); err == nil {
		t.Error("mv moved into the directory")
	}
	h.ok(t, "fs::mv", mv("/file", "/renamed", false))
}

func subtle43(t *testing.T, h *host, id string) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: only root gives files away")
	}
	path := h.file(t, "setuid/file", "")
	h.ok(t, "fs::chmod", at(id, path, obj{"mode": "4755", "uid": 1234}))
	if got := mode(t, path); got != "4755" {
		t.Errorf("mode %s", got)
	}
}
