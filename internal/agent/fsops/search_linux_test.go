package fsops_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/agent/fsops"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
)

// grep returns the matches as "path:line:content", paths relative to dir.
func grep(t *testing.T, dir string, opts fsops.GrepOptions) ([]string, bool) {
	t.Helper()
	var out []string
	open := false
	truncated, err := fsops.Grep(t.Context(), opts, func(m fsops.Match) error {
		if len(m.Content) > fsops.MaxPiece {
			return fmt.Errorf("a piece of %d bytes", len(m.Content))
		}
		if open {
			out[len(out)-1] += string(m.Content)
		} else {
			out = append(out, fmt.Sprintf("%s:%d:%s", strings.TrimPrefix(m.Path, dir), m.Line, m.Content))
		}
		open = m.Continued
		return nil
	})
	check(t, err)
	return out, truncated
}

func wantLines(t *testing.T, got []string, want ...string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Fatalf("got %q\nwant %q", got, want)
	}
}

func TestGrep_Lines(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := put(t, dir+"/f", strings.Join([]string{"foo\r", "bar foo", "", "bad \xff foo", "foo\rx", "last foo\r"}, "\n"))
	all := fsops.GrepOptions{Path: path, Pattern: "foo"}
	got, truncated := grep(t, dir, all)
	wantLines(t, got, "/f:1:foo", "/f:2:bar foo", "/f:5:foo\rx", "/f:6:last foo\r")
	if truncated {
		t.Error("truncated")
	}
	all.Pattern = "foo$"
	got, _ = grep(t, dir, all)
	wantLines(t, got, "/f:1:foo", "/f:2:bar foo")
	all.Pattern = ""
	got, _ = grep(t, dir, all)
	if len(got) != 5 {
		t.Errorf("the empty pattern matches %d lines of 5 that are UTF-8", len(got))
	}
	all.Pattern, all.IgnoreCase = "FOO", true
	got, _ = grep(t, dir, all)
	if len(got) != 4 {
		t.Errorf("ignoring case: %q", got)
	}
	put(t, dir+"/empty", "")
	got, _ = grep(t, dir, fsops.GrepOptions{Path: dir + "/empty", Pattern: ""})
	wantLines(t, got)
	put(t, dir+"/newline", "a\n")
	got, _ = grep(t, dir, fsops.GrepOptions{Path: dir + "/newline", Pattern: ""})
	wantLines(t, got, "/newline:1:a")
}

func TestGrep_MaxMatchesIsTruncatedAtExactlyThatMany(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := put(t, dir+"/f", strings.Repeat("hit\n", 50))
	for limit, want := range map[uint64]struct {
		n         int
		truncated bool
	}{10: {10, true}, 50: {50, true}, 51: {50, false}, 0: {50, false}} {
		got, truncated := grep(t, dir, fsops.GrepOptions{Path: path, Pattern: "hit", MaxMatches: limit})
		if len(got) != want.n || truncated != want.truncated {
			t.Errorf("limit %d: %d, %v", limit, len(got), truncated)
		}
	}
}

func TestGrep_LongLines(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	line := strings.Repeat("é", 10) + "x"
	path := put(t, dir+"/f", line+"\n")
	for limit, want := range map[uint64]string{
		0: line, 21: line, 22: line, 20: strings.Repeat("é", 10) + "…", 5: "éé…", 1: "…", 4: "éé…",
	} {
		got, _ := grep(t, dir, fsops.GrepOptions{Path: path, Pattern: "x$", MaxLineBytes: limit})
		wantLines(t, got, "/f:1:"+want)
	}
	// Longer than what is held in memory, with the match at the very end.
	long := strings.Repeat("é", 1_500_000)
	put(t, dir+"/f", "short\n"+long+"end\r\n"+long+"\xff\nshort end\n"+long+"x end")
	got, _ := grep(t, dir, fsops.GrepOptions{Path: path, Pattern: `end$`})
	wantLines(t, got, "/f:2:"+long+"end", "/f:4:short end", "/f:5:"+long+"x end")
	got, _ = grep(t, dir, fsops.GrepOptions{Path: path, Pattern: `\b end$|éx\b`, MaxLineBytes: 2_000_001})
	wantLines(t, got, "/f:4:short end", "/f:5:"+long[:2_000_000]+"…")
}

// Ten thousand long matches, and a line of 50 MB, in flat memory.
func TestGrep_FlatMemory(t *testing.T) {
	dir := elsewhere(t)
	put(t, dir+"/many", strings.Repeat(strings.Repeat("m", 5000)+"\n", 10_000))
	huge, err := os.Create(dir + "/huge")
	check(t, err)
	chunk := []byte(strings.Repeat("h", 1<<20))
	for range 50 {
		_, err := huge.Write(chunk)
		check(t, err)
	}
	_, err = huge.WriteString("m")
	check(t, err)
	check(t, huge.Close())
	runtime.GC()
	var before, now runtime.MemStats
	runtime.ReadMemStats(&before)
	calls, size := 0, 0
	_, err = fsops.Grep(t.Context(), fsops.GrepOptions{Path: dir, Pattern: "m$", Recursive: true}, func(m fsops.Match) error {
		size += len(m.Content)
		if calls++; calls%500 == 0 {
			runtime.GC()
			runtime.ReadMemStats(&now)
			if grown := int64(now.HeapAlloc) - int64(before.HeapAlloc); grown > 8<<20 {
				return fmt.Errorf("the heap grew by %d bytes", grown)
			}
		}
		return nil
	})
	check(t, err)
	if want := 10_000*5000 + 50<<20 + 1; size != want {
		t.Errorf("%d bytes of matches, want %d", size, want)
	}
}

func TestGrep_Tree(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, name := range []string{"a/b", "a/z/y", "a-c", "a.d", "ab", "B", "z", "é/x"} {
		put(t, dir+"/"+name, "hit\n")
	}
	put(t, dir+"/binary", "hit\x00\n")
	put(t, dir+"/late", strings.Repeat("x", 8192)+"\x00\nhit\n")
	check(t, os.Symlink("z", dir+"/link"))
	check(t, os.Symlink("a", dir+"/linkdir"))
	check(t, os.Symlink("nowhere", dir+"/dangling"))
	check(t, unix.Mkfifo(dir+"/fifo", 0o600))
	got, _ := grep(t, dir, fsops.GrepOptions{Path: dir, Pattern: "hit", Recursive: true})
	wantLines(t, got, "/B:1:hit", "/a-c:1:hit", "/a.d:1:hit", "/a/b:1:hit", "/a/z/y:1:hit", "/ab:1:hit", "/late:2:hit", "/z:1:hit", "/é/x:1:hit")
	got, _ = grep(t, dir, fsops.GrepOptions{Path: dir + "//", Pattern: "hit", Recursive: true, Include: []string{"z"}})
	wantLines(t, got, "//a/z/y:1:hit", "//z:1:hit")
	got, _ = grep(t, dir, fsops.GrepOptions{Path: dir + "/binary", Pattern: "hit"})
	wantLines(t, got)
}

func TestGrep_Globs(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, name := range []string{"main.py", "src/a.py", "src/sub/b.py", "src/c.js", "node_modules/p/d.py", "lib/src/e.py"} {
		put(t, dir+"/"+name, "hit\n")
	}
	for _, c := range []struct {
		include, exclude []string
		want             string
	}{
		{nil, nil, "lib/src/e.py main.py node_modules/p/d.py src/a.py src/c.js src/sub/b.py"},
		{[]string{"*.py"}, nil, "lib/src/e.py main.py node_modules/p/d.py src/a.py src/sub/b.py"},
		{[]string{"src/*.py"}, nil, "src/a.py"},
		{[]string{"**/*.py"}, []string{"node_modules"}, "lib/src/e.py main.py src/a.py src/sub/b.py"},
		{[]string{"src/**"}, nil, "src/a.py src/c.js src/sub/b.py"},
		{[]string{"src/"}, []string{"*.js"}, "lib/src/e.py src/a.py src/sub/b.py"},
		{[]string{"/src"}, []string{"sub/"}, "src/a.py src/c.js"},
		{nil, []string{"*.py", "!main.py"}, "main.py src/c.js"},
		{[]string{"?ain.py"}, nil, "main.py"},
	} {
		got, _ := grep(t, dir, fsops.GrepOptions{Path: dir, Pattern: "hit", Recursive: true, Include: c.include, Exclude: c.exclude})
		want := strings.Fields(c.want)
		for i := range want {
			want[i] = "/" + want[i] + ":1:hit"
		}
		if !slices.Equal(got, want) {
			t.Errorf("include %q exclude %q: %q, want %q", c.include, c.exclude, got, want)
		}
	}
	// They count for the base name of a single file too.
	got, _ := grep(t, dir, fsops.GrepOptions{Path: dir + "/main.py", Pattern: "hit", Include: []string{"*.js"}})
	wantLines(t, got)
}

func TestGrep_Roots(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	put(t, dir+"/d/f", "hit\n")
	check(t, os.Symlink("d", dir+"/ld"))
	check(t, os.Symlink("d/f", dir+"/lf"))
	check(t, os.Symlink("nowhere", dir+"/dangling"))
	check(t, unix.Mkfifo(dir+"/fifo", 0o600))
	got, _ := grep(t, dir, fsops.GrepOptions{Path: dir + "/ld", Pattern: "hit", Recursive: true})
	wantLines(t, got, "/ld/f:1:hit")
	got, _ = grep(t, dir, fsops.GrepOptions{Path: dir + "/lf", Pattern: "hit", Recursive: true})
	wantLines(t, got, "/lf:1:hit")
	for _, c := range []struct {
		path, pattern string
		recursive     bool
		code          fault.Code
	}{
		{dir + "/missing", "(", true, fault.S211},
		{dir + "/dangling", "x", true, fault.S211},
		{dir + "/d", "(", false, fault.S217},
		{dir + "/d", "x", false, fault.S210},
		{dir + "/ld", "x", false, fault.S210},
		{dir + "/d/f/x", "x", false, fault.S216},
		{dir + "/fifo", "x", false, fault.S212},
		{"/dev/zero", "x", false, fault.S212},
		{"", "x", false, fault.S211},
	} {
		_, err := fsops.Grep(t.Context(), fsops.GrepOptions{Path: c.path, Pattern: c.pattern, Recursive: c.recursive}, func(fsops.Match) error { return nil })
		wantCode(t, err, c.code)
	}
}

// More and longer names than are sorted at a time. Of different lengths, since they
// count by their memory.
func TestGrep_BigDirectoryStaysInOrder(t *testing.T) {
	dir := elsewhere(t)
	put(t, dir+"/0", "hit\n")
	for i := 1; i < 64_000; i++ {
		check(t, os.Link(dir+"/0", fmt.Sprintf("%s/%d%s", dir, i, strings.Repeat("-", 160+i%7*13))))
	}
	var paths []string
	_, err := fsops.Grep(t.Context(), fsops.GrepOptions{Path: dir, Pattern: "hit", Recursive: true}, func(m fsops.Match) error {
		paths = append(paths, m.Path)
		return nil
	})
	check(t, err)
	if len(paths) != 64_000 || !slices.IsSorted(paths) || len(slices.Compact(paths)) != 64_000 {
		t.Errorf("%d paths", len(paths))
	}
}

func TestGrep_EndsWithItsContextOrEmit(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	put(t, dir+"/f", strings.Repeat("hit\n", 2))
	stop := errors.New("stop")
	_, err := fsops.Grep(t.Context(), fsops.GrepOptions{Path: dir, Pattern: "hit", Recursive: true}, func(fsops.Match) error { return stop })
	if !errors.Is(err, stop) {
		t.Errorf("%v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for _, path := range []string{dir, dir + "/f"} {
		_, err = fsops.Grep(ctx, fsops.GrepOptions{Path: path, Pattern: "hit", Recursive: true}, func(fsops.Match) error { return nil })
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", path, err)
		}
	}
}

// sed returns the results as "path:count" or "path:error", relative to dir.
func sed(t *testing.T, dir string, opts fsops.SedOptions) []string {
	t.Helper()
	var out []string
	check(t, fsops.Sed(t.Context(), opts, func(r fsops.SedResult) error {
		line := fmt.Sprintf("%s:%d", strings.TrimPrefix(r.Path, dir), r.Replacements)
		if r.Err != nil {
			line = fmt.Sprintf("%s:%s", strings.TrimPrefix(r.Path, dir), fault.Of(r.Err).Code)
		}
		out = append(out, line)
		return nil
	}))
	return out
}

func TestSed_Replacements(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, c := range []struct {
		in, out string
		opts    fsops.SedOptions
		n       int
	}{
		{"a-a\n-a\n", "b-b\n-b\n", fsops.SedOptions{Pattern: "a", Replacement: "b"}, 3},
		{"a-a\n-a\n", "b-a\n-b\n", fsops.SedOptions{Pattern: "a", Replacement: "b", FirstOnly: true}, 2},
		{"1foo\n2foo", "1foo\n2bar", fsops.SedOptions{Pattern: "foo$", Replacement: "bar"}, 1},
		{"a \nb \n", "ab", fsops.SedOptions{Pattern: `\s+$`, Replacement: ""}, 2},
		{"x\r\ny\r\n", "z\r\ny\r\n", fsops.SedOptions{Pattern: "x", Replacement: "z"}, 1},
		{"a.b\n", "a$1b\n", fsops.SedOptions{Pattern: ".", Replacement: "$1", Literal: true}, 1},
		{"A a\n", "$$ $$\n", fsops.SedOptions{Pattern: "a", Replacement: "$$", Literal: true, IgnoreCase: true}, 2},
		{"key=val\n", "val=key\n", fsops.SedOptions{Pattern: `(?P<k>\w+)=(\w+)`, Replacement: "$2=${k}"}, 1},
		{"ABC\n", "x\n", fsops.SedOptions{Pattern: "abc", Replacement: "x", IgnoreCase: true}, 1},
		{"abc\n", "-a-b-c-\n-", fsops.SedOptions{Pattern: "x*", Replacement: "-"}, 5},
		{"a\x00a\n", "b\x00b\n", fsops.SedOptions{Pattern: "a", Replacement: "b"}, 2},
		{"", "", fsops.SedOptions{Pattern: "a*", Replacement: "b"}, 0},
		{"no match", "no match", fsops.SedOptions{Pattern: "xyz", Replacement: "b"}, 0},
		{"a", "a", fsops.SedOptions{Pattern: "a", Replacement: "a"}, 1},
	} {
		path := put(t, dir+"/f", c.in)
		c.opts.Files = []string{path}
		wantLines(t, sed(t, dir, c.opts), fmt.Sprintf("/f:%d", c.n))
		if got := content(t, path); got != c.out {
			t.Errorf("%q with %q → %q: %q, want %q", c.in, c.opts.Pattern, c.opts.Replacement, got, c.out)
		}
	}
	wantNames(t, dir, "f")
}

func TestSed_FilesFailOneByOne(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	put(t, dir+"/good", "a\n")
	put(t, dir+"/bad", "a\n\xff\n")
	put(t, dir+"/long", "a\n"+strings.Repeat("x", 9<<20))
	check(t, os.Mkdir(dir+"/d", 0o755))
	check(t, unix.Mkfifo(dir+"/fifo", 0o600))
	got := sed(t, dir, fsops.SedOptions{Pattern: "a", Replacement: "b", Files: []string{
		dir + "/good", dir + "/missing", dir + "/bad", dir + "/d", "", dir + "/fifo", dir + "/long", dir + "/good", dir + "/good/",
	}})
	wantLines(t, got, "/good:1", "/missing:S211", "/bad:S216", "/d:S212", ":S211", "/fifo:S212", "/long:S216", "/good:0", "/good/:S216")
	if content(t, dir+"/good") != "b\n" || content(t, dir+"/bad") != "a\n\xff\n" {
		t.Error("content")
	}
	wantNames(t, dir, "good", "bad", "long", "d", "fifo")
}

func TestSed_KeepsModeOwnerAttributesAndUntouchedFiles(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := put(t, dir+"/f", "a\n")
	other := put(t, dir+"/g", "x\n")
	check(t, unix.Chmod(path, 0o750))
	attrs := unix.Setxattr(path, "user.test", []byte("kept"), 0) == nil
	if os.Geteuid() == 0 {
		check(t, os.Chown(path, 12, 34))
		check(t, unix.Chmod(path, 0o6750))
	}
	var before, untouched, after unix.Stat_t
	check(t, unix.Stat(path, &before))
	check(t, unix.Stat(other, &untouched))
	wantLines(t, sed(t, dir, fsops.SedOptions{Path: &dir, Recursive: true, Pattern: "a", Replacement: "b"}), "/f:1", "/g:0")
	check(t, unix.Stat(path, &after))
	if after.Mode != before.Mode || after.Uid != before.Uid || after.Gid != before.Gid {
		t.Errorf("mode %o owner %d:%d", after.Mode, after.Uid, after.Gid)
	}
	value := make([]byte, 10)
	if n, err := unix.Getxattr(path, "user.test", value); attrs && (err != nil || string(value[:n]) != "kept") {
		t.Errorf("attribute: %q %v", value[:max(n, 0)], err)
	}
	check(t, unix.Stat(other, &after))
	if after.Ino != untouched.Ino || after.Mtim != untouched.Mtim {
		t.Error("a file without a match was rewritten")
	}
}

func TestSed_LinkInFilesBecomesAFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	put(t, dir+"/target", "a\n")
	check(t, os.Chmod(dir+"/target", 0o751))
	check(t, os.Symlink("target", dir+"/link"))
	wantLines(t, sed(t, dir, fsops.SedOptions{Files: []string{dir + "/link"}, Pattern: "a", Replacement: "b"}), "/link:1")
	if content(t, dir+"/target") != "a\n" || content(t, dir+"/link") != "b\n" {
		t.Error("content")
	}
	if info, err := os.Lstat(dir + "/link"); err != nil || info.Mode() != 0o751 {
		t.Errorf("%v %v", info.Mode(), err)
	}
}

func TestSed_Walk(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, name := range []string{"d/a.py", "d/b.js", "d/sub/c.py", "d/x/d.py"} {
		put(t, dir+"/"+name, "a\n")
	}
	check(t, os.Symlink("d", dir+"/ld"))
	check(t, os.Symlink("d/b.js", dir+"/lf"))
	check(t, os.Symlink("../b.js", dir+"/d/sub/link"))
	base := fsops.SedOptions{Recursive: true, Pattern: "a", Replacement: "b", Include: []string{"*.py"}, Exclude: []string{"x/"}}
	with := func(path string, change func(*fsops.SedOptions)) fsops.SedOptions {
		opts := base
		opts.Path = &path
		if change != nil {
			change(&opts)
		}
		return opts
	}
	// The results carry the resolved path.
	resolved := func(rel string) string { return strings.TrimPrefix(dir+rel, dir) }
	wantLines(t, sed(t, dir, with(dir+"/ld", nil)), resolved("/d/a.py")+":1", resolved("/d/sub/c.py")+":1")
	if content(t, dir+"/d/x/d.py") != "a\n" || content(t, dir+"/d/b.js") != "a\n" {
		t.Error("an excluded file was changed")
	}
	single := func(o *fsops.SedOptions) { o.Recursive, o.Include = false, nil }
	wantLines(t, sed(t, dir, with(dir+"/d/x/d.py", single)), "/d/x/d.py:1")
	wantLines(t, sed(t, dir, with(dir+"/lf", single)), "/d/b.js:1")
	if target, err := os.Readlink(dir + "/lf"); err != nil || target != "d/b.js" {
		t.Errorf("the link at the root: %q %v", target, err)
	}
}

func TestSed_RefusalsChangeNothing(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := put(t, dir+"/f", "a\n")
	check(t, os.Symlink("nowhere", dir+"/dangling"))
	missing, empty, dangling := dir+"/missing", "", dir+"/dangling"
	for _, c := range []struct {
		opts fsops.SedOptions
		code fault.Code
	}{
		{fsops.SedOptions{Pattern: "a"}, fault.S210},
		{fsops.SedOptions{Pattern: "a", Files: []string{path}, Path: &path}, fault.S210},
		{fsops.SedOptions{Pattern: "a", Path: &empty}, fault.S211},
		{fsops.SedOptions{Pattern: "(", Path: &missing}, fault.S211},
		{fsops.SedOptions{Pattern: "a", Path: &dangling}, fault.S211},
		{fsops.SedOptions{Pattern: "(", Path: &dir}, fault.S210},
		{fsops.SedOptions{Pattern: "(", Path: &dir, Recursive: true}, fault.S217},
		{fsops.SedOptions{Pattern: "(", Files: []string{path}}, fault.S217},
		{fsops.SedOptions{Pattern: "", Literal: true, Files: []string{path}}, fault.S210},
	} {
		wantCode(t, fsops.Sed(t.Context(), c.opts, func(fsops.SedResult) error { return nil }), c.code)
	}
	if content(t, path) != "a\n" {
		t.Error("content")
	}
}

func TestSed_EndsWithItsContext(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := put(t, dir+"/f", "a\n")
	for n := range 20 {
		err := fsops.Sed(&countdown{Context: t.Context(), left: n}, fsops.SedOptions{Files: []string{path}, Pattern: "a", Replacement: "b"},
			func(fsops.SedResult) error { return nil })
		wantNames(t, dir, "f")
		if err == nil {
			if content(t, path) != "b\n" {
				t.Fatal("done, but not replaced")
			}
			return
		}
		if !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		if content(t, path) != "a\n" && content(t, path) != "b\n" {
			t.Fatal("torn")
		}
		put(t, dir+"/f", "a\n")
	}
	t.Fatal("never done")
}

// A match that takes minutes ends with its context too.
func TestSearch_LargePatternEndsWithItsContext(t *testing.T) {
	t.Parallel()
	path := t.TempDir() + "/f"
	put(t, path, strings.Repeat("a", 1<<20-1)+"\n")
	const pattern = `(?:a?){3000}b`
	for name, search := range map[string]func(context.Context) error{
		"grep": func(ctx context.Context) error {
			_, err := fsops.Grep(ctx, fsops.GrepOptions{Path: path, Pattern: pattern}, func(fsops.Match) error { return nil })
			return err
		},
		"sed": func(ctx context.Context) error {
			return fsops.Sed(ctx, fsops.SedOptions{Files: []string{path}, Pattern: pattern, Replacement: "x"}, func(fsops.SedResult) error { return nil })
		},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		if err := search(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
