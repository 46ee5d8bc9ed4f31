package sandbox_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/sandbox"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/vmtest"
)

// TestFiles covers what the Manager adds to the agent's operations, whose own
// rules are tested in agent/fsops: units, faults, bounds.
func TestFiles(t *testing.T) {
	t.Parallel()
	h := newHost(t, &vmtest.Fake{}, nil)
	id := create(t, h.Manager)
	for _, test := range []struct {
		name string
		run  func(*testing.T, *host, string, string)
	}{
		{"list", testListDir},
		{"big list", testListDirTooBig},
		{"paths", testPaths},
		{"search", testSearch},
		{"big search", testSearchTooBig},
		{"write", testWrite},
		{"write a stream", testWriteStream},
		{"read", testRead},
		{"fifo", testFIFO},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := filepath.Join(h.files, strings.ReplaceAll(test.name, " ", "-"))
			if err := os.Mkdir(dir, 0o700); err != nil {
				t.Fatal(err)
			}
			test.run(t, h, id, dir)
		})
	}
}

func put(t testing.TB, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

// Semantics 5.9, 5.10.
func testListDir(t *testing.T, h *host, id, dir string) {
	if got, err := h.ListDir(t.Context(), id, dir); err != nil || got == nil || len(got) != 0 {
		t.Errorf("an empty directory: %#v, %v", got, err)
	}
	put(t, dir+"/b", "12345")
	put(t, dir+"/.a\xff", "")
	old := time.Unix(-5, 0)
	if err := errors.Join(os.Mkdir(dir+"/c", 0o700), os.Symlink("c", dir+"/d"), os.Chmod(dir+"/c", 0o755|os.ModeSticky), os.Chtimes(dir+"/b", old, old)); err != nil {
		t.Fatal(err)
	}
	got, err := h.ListDir(t.Context(), id, dir)
	if err != nil || len(got) != 4 {
		t.Fatalf("%+v, %v", got, err)
	}
	for i := range got {
		if got[i].Name != "b" {
			got[i].Mtime = 0
		}
		if got[i].IsDir {
			got[i].Size = 0
		}
	}
	want := []sandbox.FileInfo{
		{Name: ".a\uFFFD", Mode: "0644"},
		{Name: "b", Mode: "0644", Size: 5, Mtime: -5},
		{Name: "c", Mode: "1755", IsDir: true},
		{Name: "d", Mode: "0777", IsSymlink: true, Size: 1},
	}
	if !slices.Equal(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
	if got, err := h.Stat(t.Context(), id, dir+"/b"); err != nil || got != want[1] {
		t.Errorf("stat: %+v, %v", got, err)
	}
	for path, code := range map[string]fault.Code{
		dir + "/b": fault.S212, dir + "/d": fault.S212, dir + "/none": fault.S211, "": fault.S211, dir + "/b/x": fault.S216, "/\x00": fault.S216,
	} {
		_, err := h.ListDir(t.Context(), id, path)
		wantCode(t, err, code)
		if path != "" && fault.Of(err).Path != path {
			t.Errorf("%q: the fault is about %q", path, fault.Of(err).Path)
		}
	}
}

// Semantics 5.8: what no reply can hold is refused, whichever way it is too big.
func testListDirTooBig(t *testing.T, h *host, id, _ string) {
	dir, err := os.MkdirTemp("/dev/shm", "vmt") // a disk would take seconds
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	long := strings.Repeat("\x01", 240) // six bytes each in JSON
	for i := range 12_000 {
		if err := unix.Mknod(fmt.Sprintf("%s/%s%d", dir, long, i), unix.S_IFREG|0o600, 0); err != nil {
			t.Fatal(err)
		}
	}
	_, err = h.ListDir(t.Context(), id, dir)
	wantCode(t, err, fault.S216, "12000 entries")
}

func testPaths(t *testing.T, h *host, id, dir string) {
	ctx := t.Context()
	// mkdir: 5.11, and the fix of DESIGN 4.
	deep := dir + "/a/b"
	_, err := h.MakeDir(ctx, sandbox.MakeDirRequest{SandboxID: id, Path: deep, Mode: "0755"})
	wantCode(t, err, fault.S211, "parent not found")
	if !fault.Of(err).ParentMissing() {
		t.Errorf("fix %v", fault.Of(err).Fix)
	}
	for _, want := range []bool{true, false} {
		made, err := h.MakeDir(ctx, sandbox.MakeDirRequest{SandboxID: id, Path: deep, Mode: "1700", Parents: true})
		if err != nil || made != want {
			t.Errorf("mkdir: %v, %v", made, err)
		}
	}
	_, err = h.MakeDir(ctx, sandbox.MakeDirRequest{SandboxID: id, Path: deep, Mode: "0755"})
	wantCode(t, err, fault.S213)
	// Modes: 12 #27.
	for _, mode := range []string{"0o755", "8", "-1", " 755", "rwx", "77777777777777"} {
		_, err := h.MakeDir(ctx, sandbox.MakeDirRequest{SandboxID: id, Path: deep, Mode: mode})
		wantCode(t, err, fault.S210)
		_, err = h.Chmod(ctx, sandbox.ChmodRequest{SandboxID: id, Path: deep, Mode: mode})
		wantCode(t, err, fault.S210)
		_, err = h.WriteFile(ctx, sandbox.WriteRequest{SandboxID: id, Path: deep, Mode: mode, Content: new("")})
		wantCode(t, err, fault.S210)
	}
	put(t, deep+"/file", "")
	if n, err := h.Chmod(ctx, sandbox.ChmodRequest{SandboxID: id, Path: dir + "/a", Mode: "+755", Recursive: true}); err != nil || n != 3 {
		t.Errorf("chmod: %d, %v", n, err)
	}
	_, err = h.Chmod(ctx, sandbox.ChmodRequest{SandboxID: id, Path: dir + "/none", Mode: ""})
	wantCode(t, err, fault.S211)
	// rm: 5.12.
	wantCode(t, h.Remove(ctx, sandbox.RemoveRequest{SandboxID: id, Path: dir + "/a"}), fault.S214)
	wantCode(t, h.Remove(ctx, sandbox.RemoveRequest{SandboxID: id, Path: dir + "/none", Recursive: true}), fault.S211)
	// mv: 5.14.
	move := sandbox.MoveRequest{SandboxID: id, Src: deep + "/file", Dst: dir + "/moved"}
	if err := h.Move(ctx, move); err != nil {
		t.Error(err)
	}
	wantCode(t, h.Move(ctx, move), fault.S211)
	put(t, deep+"/file", "new")
	wantCode(t, h.Move(ctx, move), fault.S213)
	move.Overwrite = true
	if err := h.Move(ctx, move); err != nil {
		t.Error(err)
	}
	if err := h.Remove(ctx, sandbox.RemoveRequest{SandboxID: id, Path: dir + "/a", Recursive: true}); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 || left[0].Name() != "moved" {
		t.Errorf("%v, %v", left, err)
	}
}

func testSearch(t *testing.T, h *host, id, dir string) {
	put(t, dir+"/a.txt", "one\ntwo foo\n3 foo 3\n")
	put(t, dir+"/b.md", "foo\n")
	grep := sandbox.GrepRequest{SandboxID: id, Path: dir, Pattern: "FOO$", Recursive: true, IgnoreCase: true, MaxMatches: 10, MaxLineBytes: 4}
	got, err := h.Grep(t.Context(), grep)
	want := []sandbox.Match{{dir + "/a.txt", 2, "two …"}, {dir + "/b.md", 1, "foo"}}
	if err != nil || got.Truncated || !slices.Equal(got.Matches, want) {
		t.Errorf("%+v, %v", got, err)
	}
	grep.MaxMatches, grep.ExcludeGlobs = 1, []string{"*.md"}
	if got, err = h.Grep(t.Context(), grep); err != nil || !got.Truncated || !slices.Equal(got.Matches, want[:1]) {
		t.Errorf("%+v, %v", got, err)
	}
	grep.Pattern, grep.IncludeGlobs = "nothing", []string{"*.txt"}
	if got, err = h.Grep(t.Context(), grep); err != nil || got.Truncated || got.Matches == nil || len(got.Matches) != 0 {
		t.Errorf("%#v, %v", got, err)
	}
	grep.Recursive = false
	_, err = h.Grep(t.Context(), grep)
	wantCode(t, err, fault.S210)
	grep.Path, grep.Pattern = dir+"/b.md", "a("
	_, err = h.Grep(t.Context(), grep)
	wantCode(t, err, fault.S217)

	sed := sandbox.SedRequest{SandboxID: id, Files: []string{dir + "/a.txt", dir + "/none", dir + "/b.md"}, Pattern: "f(o+)", Replacement: "$1$$", Regex: true}
	result, err := h.Sed(t.Context(), sed)
	if err != nil || len(result.Results) != 3 || result.TotalReplacements != 3 {
		t.Fatalf("%+v, %v", result, err)
	}
	if r := result.Results[0]; !r.Success || r.Replacements != 2 || r.Error != nil {
		t.Errorf("%+v", r)
	}
	if r := result.Results[1]; r.Success || r.Replacements != 0 || r.Error == nil || r.Path != dir+"/none" {
		t.Errorf("%+v", r)
	}
	sed.Files, sed.Path, sed.Pattern, sed.Replacement, sed.Regex, sed.IgnoreCase = nil, &dir, "OO$", "$1$", false, true // 11 #7
	sed.Recursive, sed.IncludeGlobs = true, []string{"*.md"}
	if result, err = h.Sed(t.Context(), sed); err != nil || result.TotalReplacements != 1 || len(result.Results) != 1 {
		t.Errorf("%+v, %v", result, err)
	}
	if content, err := os.ReadFile(dir + "/b.md"); err != nil || string(content) != "$1$\n" {
		t.Errorf("%q, %v", content, err)
	}
	sed.Pattern = ""
	_, err = h.Sed(t.Context(), sed)
	wantCode(t, err, fault.S210)
	sed.Files = []string{dir}
	_, err = h.Sed(t.Context(), sed)
	wantCode(t, err, fault.S210)
}

// 11 #2: replies are bounded.
func testSearchTooBig(t *testing.T, h *host, id, dir string) {
	put(t, dir+"/big", strings.Repeat(strings.Repeat("x", 4000)+"\n", 10_000))
	got, err := h.Grep(t.Context(), sandbox.GrepRequest{SandboxID: id, Path: dir, Pattern: "x", Recursive: true, MaxMatches: 10_000, MaxLineBytes: 4096})
	if err != nil || !got.Truncated || len(got.Matches) < 100 {
		t.Fatalf("%d matches, %v, %v", len(got.Matches), got.Truncated, err)
	}
	size := 0
	for _, m := range got.Matches {
		size += len(m.Path) + len(m.Content)
	}
	if size > 2<<20 {
		t.Errorf("%d bytes in one reply", size)
	}
}

// Semantics 5.17.
func testWrite(t *testing.T, h *host, id, dir string) {
	path := dir + "/file"
	for _, req := range []sandbox.WriteRequest{
		{},
		{Content: new(""), ContentB64: new("")},
		{Content: new(""), Stream: func(context.Context) (io.ReadCloser, error) { t.Error("opened"); return nil, io.EOF }},
		{ContentB64: new("aGk")},
		{ContentB64: new("aGk=\n")},
		{ContentB64: new("YR==")},
	} {
		req.SandboxID, req.Path, req.Mode = id, path, "0644"
		_, err := h.WriteFile(t.Context(), req)
		wantCode(t, err, fault.S001)
	}
	for _, tt := range []struct {
		req  sandbox.WriteRequest
		mode os.FileMode
		want string
	}{
		{sandbox.WriteRequest{Content: new("text\x00é"), Mode: "0755"}, 0o755, "text\x00é"},
		{sandbox.WriteRequest{Content: new(""), Mode: "0644"}, 0o644, ""}, // 12 #28
		{sandbox.WriteRequest{ContentB64: new("AP8="), Mode: "600"}, 0o600, "\x00\xff"},
		{sandbox.WriteRequest{ContentB64: new(""), Mode: ""}, 0, ""},
	} {
		tt.req.SandboxID, tt.req.Path = id, path
		got, err := h.WriteFile(t.Context(), tt.req)
		if err != nil || got != (sandbox.Written{BytesWritten: uint64(len(tt.want)), Path: path}) {
			t.Errorf("%+v, %v", got, err)
		}
		info, err := os.Stat(path)
		if err != nil || info.Mode() != tt.mode {
			t.Errorf("%v, %v", info.Mode(), err)
		}
		if content, err := os.ReadFile(path); err != nil || string(content) != tt.want {
			t.Errorf("%q, %v", content, err)
		}
	}
	deep := sandbox.WriteRequest{SandboxID: id, Path: dir + "/x/y/z", Mode: "0644", Content: new("z")}
	_, err := h.WriteFile(t.Context(), deep)
	wantCode(t, err, fault.S211, "parent not found")
	if f := fault.Of(err); !f.ParentMissing() || !strings.Contains(f.FixNote, "merge") {
		t.Errorf("%+v", f)
	}
	deep.Parents = true
	if _, err := h.WriteFile(t.Context(), deep); err != nil {
		t.Error(err)
	}
	deep.Path = dir
	_, err = h.WriteFile(t.Context(), deep)
	wantCode(t, err, fault.S216)
	checkNoDrafts(t, dir)
}

// checkNoDrafts fails where a temporary file is left.
func checkNoDrafts(t testing.TB, dir string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if strings.Contains(e.Name(), "iii") {
			t.Errorf("left behind: %s", e.Name())
		}
	}
}

// body is a stream that counts how often it is opened and closed.
type body struct {
	io.Reader
	opened, closed atomic.Int32
}

func (b *body) open(context.Context) (io.ReadCloser, error) {
	b.opened.Add(1)
	return b, nil
}

func (b *body) Close() error {
	b.closed.Add(1)
	return nil
}

func testWriteStream(t *testing.T, h *host, id, dir string) {
	const size = 50 << 20
	sum := sha256.New()
	noise := io.TeeReader(io.LimitReader(rand.NewChaCha8([32]byte{1}), size), sum)
	for _, tt := range []struct {
		name    string
		content io.Reader
		path    string
		code    fault.Code
		opened  int32
	}{
		{"big", noise, dir + "/big", "", 1},
		{"empty", strings.NewReader(""), dir + "/empty", "", 1},
		{"fails at once", &failing{}, dir + "/failed", fault.S218, 1},
		{"fails later", io.MultiReader(strings.NewReader(strings.Repeat("x", 1<<20)), &failing{}), dir + "/failed", fault.S218, 1},
		{"refused", strings.NewReader("x"), dir + "/none/x", fault.S211, -1},
	} {
		b := &body{Reader: tt.content}
		got, err := h.WriteFile(t.Context(), sandbox.WriteRequest{SandboxID: id, Path: tt.path, Mode: "0644", Stream: b.open})
		if tt.code != "" {
			wantCode(t, err, tt.code)
		} else if err != nil {
			t.Errorf("%s: %v", tt.name, err)
		}
		if n := b.opened.Load(); n != b.closed.Load() || n > 1 || tt.opened >= 0 && n != tt.opened {
			t.Errorf("%s: opened %d times, closed %d times", tt.name, n, b.closed.Load())
		}
		if tt.name == "big" && got.BytesWritten != size {
			t.Errorf("%+v", got)
		}
	}
	_, err := h.WriteFile(t.Context(), sandbox.WriteRequest{
		SandboxID: id, Path: dir + "/failed", Mode: "0644",
		Stream: func(context.Context) (io.ReadCloser, error) { return nil, errors.New("no such channel") },
	})
	wantCode(t, err, fault.S218, "no such channel")
	if _, err := os.Lstat(dir + "/failed"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a failed upload is there: %v", err)
	}
	checkNoDrafts(t, dir)

	file, err := h.OpenFile(t.Context(), id, dir+"/big")
	if err != nil {
		t.Fatal(err)
	}
	back := sha256.New()
	if n, err := file.WriteTo(chunks{t, back}); err != nil || n != size || !bytes.Equal(back.Sum(nil), sum.Sum(nil)) {
		t.Errorf("%d bytes came back, the same: %v, %v", n, bytes.Equal(back.Sum(nil), sum.Sum(nil)), err)
	}
	if err := file.Close(); err != nil {
		t.Error(err)
	}
}

type failing struct{}

func (*failing) Read([]byte) (int, error) { return 0, errors.New("the caller is gone") }

// chunks checks the size of what is written.
type chunks struct {
	t testing.TB
	w io.Writer
}

func (c chunks) Write(p []byte) (int, error) {
	if len(p) == 0 || len(p) > 64<<10 {
		c.t.Errorf("a piece of %d bytes", len(p))
	}
	return c.w.Write(p)
}

// Semantics 5.18, 12 #37.
func testRead(t *testing.T, h *host, id, dir string) {
	const inline = 1 << 20
	text := strings.Repeat("é", inline/2)
	for name, tt := range map[string]struct {
		content string
		body    bool
	}{
		"empty": {"", true}, "text": {"a\x00\ufeffé\n", true}, "binary": {"a\xff", false},
		"below": {text[:inline-2], true}, "one below": {text[:inline-2] + "x", true}, "exact": {text, false}, "above": {text + "x", false},
		"cut character": {text[:inline-1], false},
	} {
		path := dir + "/" + name
		put(t, path, tt.content)
		if err := os.Chtimes(path, time.Unix(7, 0), time.Unix(7, 0)); err != nil {
			t.Fatal(err)
		}
		f, err := h.OpenFile(t.Context(), id, path)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if f.Size != uint64(len(tt.content)) || f.Mode != "0644" || f.Mtime != 7 || (f.Body != nil) != tt.body || tt.body && *f.Body != tt.content {
			t.Errorf("%s: size %d mode %s mtime %d body %v", name, f.Size, f.Mode, f.Mtime, f.Body != nil)
		}
		if got, err := io.ReadAll(f); err != nil || string(got) != tt.content {
			t.Errorf("%s: %d bytes, %v", name, len(got), err)
		}
		_ = f.Close()
	}
	f, err := h.OpenFile(t.Context(), id, "/proc/version")
	if err != nil || f.Size != 0 || f.Body == nil || *f.Body == "" {
		t.Errorf("/proc/version: %+v, %v", f, err)
	}
	_ = f.Close()
	if err := errors.Join(os.Symlink("nowhere", dir+"/dangling"), os.Symlink("text", dir+"/link")); err != nil {
		t.Fatal(err)
	}
	for path, code := range map[string]fault.Code{
		dir: fault.S212, dir + "/none": fault.S211, dir + "/dangling": fault.S211, dir + "/text/x": fault.S216,
	} {
		_, err := h.OpenFile(t.Context(), id, path)
		wantCode(t, err, code)
	}
	if f, err = h.OpenFile(t.Context(), id, dir+"/link"); err != nil || f.Size != 8 {
		t.Errorf("a link: %+v, %v", f, err)
	}
	_ = f.Close()

	// A reader that goes away, and one whose call has ended.
	big := base64.StdEncoding.EncodeToString(make([]byte, 6<<20))
	put(t, dir+"/big", big)
	call, end := context.WithCancel(t.Context())
	if f, err = h.OpenFile(call, id, dir+"/big"); err != nil {
		t.Fatal(err)
	}
	end()
	gone := errors.New("the reader is gone")
	if n, err := f.WriteTo(&limited{left: 1 << 20, err: gone}); n != 1<<20 || !errors.Is(err, gone) {
		t.Errorf("%d bytes, %v", n, err)
	}
	if rest, err := io.ReadAll(f); err != nil || int64(len(rest)) < int64(len(big))-(2<<20) {
		t.Errorf("the rest: %d bytes, %v", len(rest), err)
	}
	_ = f.Close()
	_, err = h.OpenFile(call, id, dir+"/big")
	wantCode(t, err, fault.S216, "canceled")
}

type limited struct {
	left int
	err  error
}

func (l *limited) Write(p []byte) (int, error) {
	if len(p) > l.left {
		return 0, l.err
	}
	l.left -= len(p)
	return len(p), nil
}

// 11 #18: a FIFO hangs nothing.
func testFIFO(t *testing.T, h *host, id, dir string) {
	if err := unix.Mkfifo(dir+"/fifo", 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := h.OpenFile(t.Context(), id, dir+"/fifo")
	wantCode(t, err, fault.S212)
	if got, err := h.Grep(t.Context(), sandbox.GrepRequest{SandboxID: id, Path: dir, Pattern: "x", Recursive: true}); err != nil || len(got.Matches) != 0 {
		t.Errorf("%+v, %v", got, err)
	}
	if _, err := h.Sed(t.Context(), sandbox.SedRequest{SandboxID: id, Path: &dir, Pattern: "x", Recursive: true}); err != nil {
		t.Error(err)
	}
}

// A transfer that is under way when its sandbox ends learns of it.
func TestFiles_EndWithTheirSandbox(t *testing.T) {
	t.Parallel()
	h := newHost(t, &vmtest.Fake{}, nil)
	for _, how := range []string{"stop", "kill"} {
		id := create(t, h.Manager)
		path := h.files + "/big"
		put(t, path, strings.Repeat("x", 16<<20))
		f, err := h.OpenFile(t.Context(), id, path)
		if err != nil {
			t.Fatal(err)
		}
		silent, feed := io.Pipe()
		writes := make(chan error, 1)
		reading := make(chan struct{})
		go func() {
			_, err := h.WriteFile(context.Background(), sandbox.WriteRequest{
				SandboxID: id, Path: h.files + "/new", Mode: "0644",
				Stream: func(context.Context) (io.ReadCloser, error) { close(reading); return silent, nil },
			})
			writes <- err
		}()
		h.Await(t, reading, "the upload")
		words := []string{"was stopped meanwhile"}
		if how == "stop" {
			if _, err := h.Stop(t.Context(), id, true); err != nil {
				t.Error(err)
			}
		} else {
			h.kill(t, id)
			words = []string{"killed"}
		}
		wantCode(t, <-writes, fault.S216, words...)
		if _, err := feed.Write([]byte("x")); !errors.Is(err, io.ErrClosedPipe) {
			t.Errorf("the body was not closed: %v", err)
		}
		_, err = io.Copy(io.Discard, f)
		wantCode(t, err, fault.S216, words...)
		_ = f.Close()
		if _, err := os.Lstat(h.files + "/new"); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("half an upload is there: %v", err)
		}
	}
}
