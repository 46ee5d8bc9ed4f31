package rexp_test

import (
	"bytes"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/agent/rexp"
)

func TestGlobs_GitignoreTable(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		pattern, path string
		want          bool
	}{
		{"*.py", "src/main.py", true},
		{"src/*.py", "src/main.py", true},
		{"src/*.py", "src/sub/x.py", false},
		{"src/*.py", "a/src/x.py", false},
		{"**/*.py", "main.py", true},
		{"**/*.py", "a/b/c.py", true},
		{"**/src/*.py", "src/x.py", true},
		{"**/src/*.py", "a/src/x.py", true},
		{"src/**", "src/a", true},
		{"src/**", "src/a/b", true},
		{"src/**", "src", false},
		{"src/**/*.py", "src/a/b.py", true},
		{"src/**/*.py", "src/b.py", true},
		{"src/**/*.py", "src/a/b/c.py", true},
		{"node_modules", "node_modules/a.js", true},
		{"node_modules/", "x/node_modules/p/a.js", true},
		{"node_modules/", "node_modules", false},
		{"node_modules/*", "node_modules/a.js", true},
		{"node_modules/*", "node_modules/p/a.js", true},
		{"/src/*.py", "src/x.py", true},
		{"./src/*.py", "src/x.py", false},
		{"*.{js,ts}", "a.js", false},
		{"*.{js,ts}", "a.{js,ts}", true},
		{"[ab].txt", "a.txt", true},
		{"[!ab].txt", "a.txt", false},
		{"!*.py", "x.py", false},
		{"?.txt", "é.txt", false},
		{"??.txt", "é.txt", true},
		{"a?b", "a/b", false},
		{"\\*.txt", "*.txt", true},
		{"\\*.txt", "a.txt", false},
		{"#x", "#x", false},
		{"\\#x", "#x", true},
		{"x ", "x", true},
		{"x\\ ", "x ", true},
		{"", "x", false},
		{"a[", "a[", false},
		{"a\\", "a\\", false},
		{"a\xff*", "a\xffb", true},
		{"A", "a", false},
	} {
		g, err := rexp.ParseGlobs([]string{c.pattern})
		if err != nil {
			t.Fatal(err)
		}
		if got := selected(g, c.path); got != c.want {
			t.Errorf("%q on %q: %v", c.pattern, c.path, got)
		}
	}
}

// selected reports whether the patterns select a file or a directory above it.
func selected(g *rexp.Globs, path string) bool {
	for i := range path {
		if path[i] == '/' && g.Match(path[:i], true) {
			return true
		}
	}
	return g.Match(path, false)
}

func TestGlobs_LastMatchDecides(t *testing.T) {
	t.Parallel()
	g, err := rexp.ParseGlobs([]string{"*.js", "!keep.js", "dist/", "!dist/a.js"})
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]bool{"a.js": true, "keep.js": false, "x/keep.js": false, "dist/a.js": true, "a.ts": false} {
		if got := selected(g, path); got != want {
			t.Errorf("%s: %v", path, got)
		}
	}
	if g.Empty() {
		t.Error("not empty")
	}
	if none, err := rexp.ParseGlobs([]string{"", "# x"}); err != nil || !none.Empty() {
		t.Error("comments are patterns")
	}
}

func TestGlobs_RefusesWhatNoPathCanMatch(t *testing.T) {
	t.Parallel()
	if _, err := rexp.ParseGlobs([]string{strings.Repeat("*", 5000)}); err == nil {
		t.Error("accepted")
	}
	// Stars that would take a backtracking matcher for ever.
	g, err := rexp.ParseGlobs([]string{strings.Repeat("*a", 100) + "b"})
	if err != nil {
		t.Fatal(err)
	}
	if selected(g, strings.Repeat("a", 255)) {
		t.Error("matched")
	}
}

// Random patterns against git itself.
func TestGlobs_AgreeWithGit(t *testing.T) {
	t.Parallel()
	git, err := exec.LookPath("git")
	if err != nil {
		t.Skip("git is not installed")
	}
	dir := t.TempDir()
	if out, err := exec.Command(git, "init", "-q", dir).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	pieces := []string{
		"a", "b", "c", "ab", "*", "**", "?", "/", "/", "[ab]", "[!a]", "[^b-c]", "[[:alpha:]]", "[a-", "\\", "\\*", "!", "#",
		" ", "\\ ", ".", "{a,b}", "é", "]", "[]a]", "[a\\]]", "***", "-", "[b-a]", "[[:foo:]]",
	}
	names := []string{"a", "b", "c", "ab", "abc", "a.b", "é", "{a,b}", "*", "a b", "]", "-", "#", "!a", "ba "}
	r := rand.New(rand.NewPCG(1, 2))
	join := func(from []string, most int, sep string) string {
		var parts []string
		for range 1 + r.IntN(most) {
			parts = append(parts, from[r.IntN(len(from))])
		}
		return strings.Join(parts, sep)
	}
	for range 200 {
		var patterns, paths []string
		for range 1 + r.IntN(3) {
			patterns = append(patterns, join(pieces, 5, ""))
		}
		for range 40 {
			paths = append(paths, join(names, 4, "/"))
		}
		if err := os.WriteFile(filepath.Join(dir, ".gitignore"), []byte(strings.Join(patterns, "\n")+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		compareWithGit(t, git, dir, patterns, paths)
	}
}

func compareWithGit(t *testing.T, git, dir string, patterns, paths []string) {
	t.Helper()
	cmd := exec.Command(git, "-C", dir, "-c", "core.excludesFile=/dev/null", "check-ignore", "--no-index", "-z", "--stdin", "-v", "-n")
	cmd.Env = append(os.Environ(), "GIT_CONFIG_NOSYSTEM=1")
	cmd.Stdin = strings.NewReader(strings.Join(paths, "\x00") + "\x00")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, _ := cmd.Output() // exits 1 when nothing is ignored
	fields := strings.Split(string(out), "\x00")
	if len(fields) != 4*len(paths)+1 {
		t.Fatalf("git said %d fields for %d paths: %s", len(fields), len(paths), stderr.String())
	}
	g, err := rexp.ParseGlobs(patterns)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i+3 < len(fields); i += 4 {
		rule, path := fields[i+2], fields[i+3]
		want := rule != "" && !strings.HasPrefix(rule, "!")
		if got := selected(g, path); got != want {
			t.Errorf("%q on %q: %v, git says %v by %q", patterns, path, got, want, rule)
		}
	}
}

func FuzzGlobs(f *testing.F) {
	f.Add("src/**/*.py", "src/a/b.py")
	f.Add("[a-\\]]!", "a/b")
	f.Add("\xff[^\x80-\xff]", "\xfe/x")
	f.Fuzz(func(t *testing.T, pattern, path string) {
		g, err := rexp.ParseGlobs([]string{pattern})
		if err != nil {
			return
		}
		if g.Match(path, false) && !selected(g, path) {
			t.Fatalf("%q on %q: not selected, although it matches", pattern, path)
		}
	})
}
