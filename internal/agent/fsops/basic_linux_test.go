package fsops_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/agent/fsops"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
)

func TestStat_NeverFollowsTheLastLink(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	put(t, dir+"/f", "hello")
	check(t, os.Chmod(dir+"/f", 0o640))
	check(t, os.Chtimes(dir+"/f", time.Unix(1, 0), time.Unix(-5, 0)))
	check(t, os.Mkdir(dir+"/d", 0o755))
	check(t, os.Chmod(dir+"/d", 0o1777|os.ModeSticky))
	check(t, os.Symlink("f", dir+"/l"))
	check(t, os.Symlink("d", dir+"/ld"))
	check(t, os.Symlink("nowhere", dir+"/dangling"))
	check(t, unix.Mkfifo(dir+"/p", 0o600))
	for path, want := range map[string]fsops.Entry{
		dir + "/f":        {Name: "f", Type: fsops.Regular, Size: 5, Mode: 0o640, MtimeUnix: -5},
		dir + "/d":        {Name: "d", Type: fsops.Directory, Mode: 0o1777},
		dir + "/d/":       {Name: "d", Type: fsops.Directory, Mode: 0o1777},
		dir + "/d/.":      {Name: "d", Type: fsops.Directory, Mode: 0o1777},
		dir + "/d/..":     {Name: dir + "/d/..", Type: fsops.Directory, Mode: mode(t, dir)},
		dir + "/l":        {Name: "l", Type: fsops.Symlink, Size: 1, Mode: 0o777},
		dir + "/ld":       {Name: "ld", Type: fsops.Symlink, Size: 1, Mode: 0o777},
		dir + "/ld/":      {Name: "ld", Type: fsops.Directory, Mode: 0o1777},
		dir + "/dangling": {Name: "dangling", Type: fsops.Symlink, Size: 7, Mode: 0o777},
		dir + "/p":        {Name: "p", Type: fsops.Other, Mode: 0o600},
		"/":               {Name: "/", Type: fsops.Directory, Mode: mode(t, "/")},
		".":               {Name: ".", Type: fsops.Directory, Mode: mode(t, "/")},
		dir[1:] + "/f":    {Name: "f", Type: fsops.Regular, Size: 5, Mode: 0o640, MtimeUnix: -5},
	} {
		got, err := fsops.Stat(path)
		check(t, err)
		if want.Type != fsops.Regular {
			got.MtimeUnix = 0
		}
		if got.Type == fsops.Directory {
			got.Size = 0
		}
		if got != want {
			t.Errorf("%s: %+v, want %+v", path, got, want)
		}
	}
}

func TestStat_Errors(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	put(t, dir+"/f", "")
	check(t, os.Symlink("loop", dir+"/loop"))
	for path, code := range map[string]fault.Code{
		dir + "/missing": fault.S211, dir + "/f/x": fault.S216, dir + "/f/": fault.S216, "": fault.S211, dir + "/a\x00b": fault.S216,
		dir + "/loop/x": fault.S216, dir + "/" + strings.Repeat("n", 300): fault.S216,
	} {
		_, err := fsops.Stat(path)
		wantCode(t, err, code, path)
	}
}

func list(t *testing.T, path string) []fsops.Entry {
	t.Helper()
	var all []fsops.Entry
	check(t, fsops.List(t.Context(), path, func(batch []fsops.Entry) error {
		all = append(all, batch...)
		return nil
	}))
	slices.SortFunc(all, func(a, b fsops.Entry) int { return strings.Compare(a.Name, b.Name) })
	return all
}

func TestList_DescribesEntriesThemselves(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	put(t, dir+"/.hidden", "x")
	put(t, dir+"/bad\xffname", "")
	check(t, os.Symlink("/nowhere", dir+"/link"))
	check(t, os.Mkdir(dir+"/sub", 0o700))
	got := list(t, dir)
	if len(got) != 4 {
		t.Fatalf("%+v", got)
	}
	for i, want := range []fsops.Entry{
		{Name: ".hidden", Type: fsops.Regular, Size: 1},
		{Name: "bad\xffname", Type: fsops.Regular},
		{Name: "link", Type: fsops.Symlink, Size: 8},
		{Name: "sub", Type: fsops.Directory},
	} {
		if got[i].Name != want.Name || got[i].Type != want.Type || want.Type != fsops.Directory && got[i].Size != want.Size {
			t.Errorf("%+v, want %+v", got[i], want)
		}
	}
	if len(list(t, dir+"/sub")) != 0 {
		t.Error("an empty directory has entries")
	}
}

func TestList_Errors(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	put(t, dir+"/f", "")
	check(t, os.Symlink(dir, dir+"/link"))
	check(t, os.Symlink("/nowhere", dir+"/dangling"))
	for path, code := range map[string]fault.Code{
		dir + "/missing": fault.S211, dir + "/f": fault.S212, dir + "/link": fault.S212, dir + "/dangling": fault.S212, dir + "/f/x": fault.S216, "": fault.S211,
	} {
		wantCode(t, fsops.List(t.Context(), path, func([]fsops.Entry) error { return nil }), code, path)
	}
	if n := len(list(t, dir+"/link/")); n != 3 {
		t.Errorf("a link with a slash lists %d entries", n)
	}
	stop := errors.New("stop")
	if err := fsops.List(t.Context(), dir, func([]fsops.Entry) error { return stop }); !errors.Is(err, stop) {
		t.Errorf("emit's error: %v", err)
	}
}

// 200 000 entries in a few hundred at a time.
func TestList_BigDirectoryInFlatMemory(t *testing.T) {
	dir := elsewhere(t)
	f, err := os.Create(dir + "/0")
	check(t, err)
	check(t, f.Close())
	const n = 200_000
	for i := 1; i < n; i++ {
		check(t, os.Link(dir+"/0", fmt.Sprintf("%s/%d", dir, i)))
	}
	var before, now runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	seen, largest, batches := 0, 0, 0
	check(t, fsops.List(t.Context(), dir, func(batch []fsops.Entry) error {
		seen += len(batch)
		largest = max(largest, len(batch))
		if batches++; batches%100 == 0 {
			runtime.GC()
			runtime.ReadMemStats(&now)
			if grown := int64(now.HeapAlloc) - int64(before.HeapAlloc); grown > 8<<20 {
				return fmt.Errorf("the heap grew by %d bytes", grown)
			}
		}
		return nil
	}))
	if seen != n || largest > 512 {
		t.Errorf("%d entries, %d at a time", seen, largest)
	}
}

func TestMakeDir_ModeIsExactForTheLeafOnly(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	created, err := fsops.MakeDir(dir+"/a", 0o2777, false)
	check(t, err)
	if !created {
		t.Error("not created")
	}
	wantMode(t, dir+"/a", 0o2777)
	created, err = fsops.MakeDir(dir+"/x/y/z", 0, true)
	check(t, err)
	if !created {
		t.Error("not created")
	}
	wantMode(t, dir+"/x/y/z", 0)
	if m := mode(t, dir+"/x/y"); m&0o700 != 0o700 || m&^0o755 != 0 {
		t.Errorf("mode of a parent is %04o", m)
	}
}

func TestMakeDir_ExistingPaths(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	check(t, os.Mkdir(dir+"/d", 0o711))
	put(t, dir+"/f", "")
	check(t, os.Symlink("d", dir+"/ld"))
	check(t, os.Symlink("f", dir+"/lf"))
	check(t, os.Symlink("nowhere", dir+"/dangling"))
	for _, path := range []string{"/d", "/ld", "/d/", "/d/.", "/d/.."} {
		created, err := fsops.MakeDir(dir+path, 0o700, true)
		check(t, err)
		if created {
			t.Errorf("%s: created", path)
		}
		_, err = fsops.MakeDir(dir+path, 0o700, false)
		wantCode(t, err, fault.S213, dir+path)
	}
	wantMode(t, dir+"/d", 0o711)
	for _, path := range []string{"/f", "/lf", "/dangling"} {
		for _, parents := range []bool{false, true} {
			_, err := fsops.MakeDir(dir+path, 0o700, parents)
			wantCode(t, err, fault.S213, dir+path)
		}
	}
}

func TestMakeDir_MissingParentCarriesTheFix(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	_, err := fsops.MakeDir(dir+"/a/b", 0o755, false)
	wantCode(t, err, fault.S211, dir+"/a/b")
	if !fault.Of(err).ParentMissing() {
		t.Error("no fix")
	}
	put(t, dir+"/f", "")
	for _, parents := range []bool{false, true} {
		_, err = fsops.MakeDir(dir+"/f/b", 0o755, parents)
		wantCode(t, err, fault.S216)
		_, err = fsops.MakeDir(dir+"/f/b/c", 0o755, parents)
		wantCode(t, err, fault.S216)
		_, err = fsops.MakeDir("", 0o755, parents)
		wantCode(t, err, fault.S211)
		_, err = fsops.MakeDir(dir+"/n\x00l", 0o755, parents)
		wantCode(t, err, fault.S216)
	}
	wantNames(t, dir, "f")
}

func TestMakeDir_ConcurrentCallsAgree(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	results := make(chan bool, 16)
	for range 16 {
		go func() {
			created, err := fsops.MakeDir(dir+"/a/b/c/d", 0o755, true)
			if err != nil {
				t.Error(err)
			}
			results <- created
		}()
	}
	made := 0
	for range 16 {
		if <-results {
			made++
		}
	}
	if made != 1 {
		t.Errorf("%d calls made the directory", made)
	}
}

func TestRemove(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	ctx := t.Context()
	for _, recursive := range []bool{false, true} {
		wantCode(t, fsops.Remove(ctx, dir+"/missing", recursive), fault.S211, dir+"/missing")
		wantCode(t, fsops.Remove(ctx, "", recursive), fault.S211)
		wantCode(t, fsops.Remove(ctx, dir+"/x\x00", recursive), fault.S216)
		put(t, dir+"/keep/f", "kept")
		wantCode(t, fsops.Remove(ctx, dir+"/keep/f/x", recursive), fault.S216)
		check(t, os.Symlink("keep", dir+"/link"))
		wantCode(t, fsops.Remove(ctx, dir+"/link/", recursive), fault.S216)
		check(t, fsops.Remove(ctx, dir+"/link", recursive))
		check(t, os.Symlink("nowhere", dir+"/dangling"))
		check(t, fsops.Remove(ctx, dir+"/dangling", recursive))
		check(t, unix.Mkfifo(dir+"/fifo", 0o600))
		check(t, fsops.Remove(ctx, dir+"/fifo", recursive))
		check(t, os.Mkdir(dir+"/empty", 0o700))
		check(t, fsops.Remove(ctx, dir+"/empty", recursive))
		check(t, os.Mkdir(dir+"/empty", 0o700))
		check(t, fsops.Remove(ctx, dir+"/empty/", recursive))
		for path, why := range map[string]string{
			"/": "root directory", "//": "root directory", dir + "/keep/.": "own path", dir + "/keep/..": "own path",
		} {
			err := fsops.Remove(ctx, path, recursive)
			wantCode(t, err, fault.S216, path)
			if !strings.Contains(err.Error(), why) {
				t.Errorf("%s: %v, want it to say %q", path, err, why)
			}
		}
		if content(t, dir+"/keep/f") != "kept" {
			t.Error("something else was removed")
		}
	}
	wantCode(t, fsops.Remove(ctx, dir+"/keep", false), fault.S214, dir+"/keep")
	wantNames(t, dir, "keep")
	check(t, fsops.Remove(ctx, dir+"/keep", true))
	wantNames(t, dir)
}

func TestRemove_TreeDoesNotFollowLinks(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	put(t, dir+"/outside/f", "kept")
	for i := range 1500 {
		put(t, fmt.Sprintf("%s/tree/d%d/f%d", dir, i%7, i), "")
	}
	check(t, os.Symlink("../outside", dir+"/tree/link"))
	check(t, os.Symlink(dir+"/outside", dir+"/tree/d1/link"))
	check(t, unix.Mkfifo(dir+"/tree/d1/fifo", 0o600))
	put(t, dir+"/tree/\xff\n", "")
	check(t, fsops.Remove(t.Context(), dir+"/tree", true))
	wantNames(t, dir, "outside")
	if content(t, dir+"/outside/f") != "kept" {
		t.Error("a link was followed")
	}
}

// A directory that is swapped for a link again and again while the tree is being
// removed never leads outside.
func TestRemove_SwappedDirectory(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	put(t, dir+"/outside/f", "kept")
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
			}
			_ = os.MkdirAll(dir+"/tree/d/sub", 0o755)
			_ = os.WriteFile(dir+"/tree/d/sub/f", nil, 0o644)
			_ = os.Symlink(dir+"/outside", dir+"/link")
			_ = unix.Renameat2(unix.AT_FDCWD, dir+"/tree/d", unix.AT_FDCWD, dir+"/link", unix.RENAME_EXCHANGE)
			_ = os.RemoveAll(dir + "/link")
		}
	}()
	for range 300 {
		_ = fsops.Remove(t.Context(), dir+"/tree", true) // may lose the race for the directory itself
	}
	close(stop)
	<-stopped
	if content(t, dir+"/outside/f") != "kept" {
		t.Error("a link was followed")
	}
}

func TestRemove_EndsWithItsContext(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	put(t, dir+"/tree/f", "")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := fsops.Remove(ctx, dir+"/tree", true); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	wantNames(t, dir, "tree")
}

func TestRemove_MountPoint(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	check(t, os.Mkdir(dir+"/m", 0o755))
	if err := unix.Mount("tmpfs", dir+"/m", "tmpfs", 0, ""); err != nil {
		t.Skipf("cannot mount: %v", err)
	}
	defer func() { check(t, unix.Unmount(dir+"/m", unix.MNT_DETACH)) }()
	wantCode(t, fsops.Remove(t.Context(), dir+"/m", true), fault.S216, dir+"/m")
}

func TestChmod_CountsEveryEntry(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	put(t, dir+"/root/a/b", "")
	put(t, dir+"/root/a/c", "")
	n, err := fsops.Chmod(t.Context(), dir+"/root", fsops.ChmodOptions{Mode: 0o700, Recursive: true})
	check(t, err)
	if n != 4 {
		t.Errorf("%d updated, want 4", n)
	}
	for _, path := range []string{"", "/a", "/a/b", "/a/c"} {
		wantMode(t, dir+"/root"+path, 0o700)
	}
	n, err = fsops.Chmod(t.Context(), dir+"/root", fsops.ChmodOptions{Mode: 0o755})
	check(t, err)
	if n != 1 {
		t.Errorf("%d updated, want 1", n)
	}
	wantMode(t, dir+"/root/a", 0o700)
	n, err = fsops.Chmod(t.Context(), dir+"/root/a/b", fsops.ChmodOptions{Mode: 0o4711, Recursive: true})
	check(t, err)
	if n != 1 {
		t.Errorf("%d updated, want 1", n)
	}
	wantMode(t, dir+"/root/a/b", 0o4711)
}

func TestChmod_Links(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	put(t, dir+"/outside", "")
	put(t, dir+"/tree/f", "")
	check(t, os.Symlink("../outside", dir+"/tree/link"))
	check(t, os.Symlink("nowhere", dir+"/tree/dangling"))
	n, err := fsops.Chmod(t.Context(), dir+"/tree", fsops.ChmodOptions{Mode: 0o711, Recursive: true})
	check(t, err)
	if n != 2 {
		t.Errorf("%d updated, want tree and f", n)
	}
	wantMode(t, dir+"/outside", 0o644)
	// The path itself is followed.
	n, err = fsops.Chmod(t.Context(), dir+"/tree/link", fsops.ChmodOptions{Mode: 0o600})
	check(t, err)
	if n != 1 {
		t.Errorf("%d updated", n)
	}
	wantMode(t, dir+"/outside", 0o600)
	for _, path := range []string{dir + "/tree/dangling", dir + "/missing", "", dir + "/tree/f/x", "a\x00b"} {
		_, err := fsops.Chmod(t.Context(), path, fsops.ChmodOptions{Mode: 0o600})
		wantCode(t, err, fault.S211, path)
	}
}

func TestChmod_OwnerKeepsSetID(t *testing.T) {
	t.Parallel()
	needRoot(t)
	dir := t.TempDir()
	put(t, dir+"/t/f", "")
	check(t, os.Symlink("f", dir+"/t/link"))
	uid, gid := uint32(1234), uint32(4321)
	n, err := fsops.Chmod(t.Context(), dir+"/t", fsops.ChmodOptions{Mode: 0o6755, UID: &uid, GID: &gid, Recursive: true})
	check(t, err)
	if n != 3 {
		t.Errorf("%d updated, want tree, f and the link's owner", n)
	}
	wantMode(t, dir+"/t/f", 0o6755)
	for _, path := range []string{"/t", "/t/f", "/t/link"} {
		var st unix.Stat_t
		check(t, unix.Lstat(dir+path, &st))
		if st.Uid != uid || st.Gid != gid {
			t.Errorf("%s belongs to %d:%d", path, st.Uid, st.Gid)
		}
	}
	uid = 99
	_, err = fsops.Chmod(t.Context(), dir+"/t/f", fsops.ChmodOptions{Mode: 0o600, UID: &uid})
	check(t, err)
	var st unix.Stat_t
	check(t, unix.Lstat(dir+"/t/f", &st))
	if st.Uid != 99 || st.Gid != gid {
		t.Errorf("the uid alone: %d:%d", st.Uid, st.Gid)
	}
}

func read(t *testing.T, path string) (string, error) {
	t.Helper()
	r, err := fsops.Open(t.Context(), path)
	if err != nil {
		return "", err
	}
	defer r.Close()
	b, err := io.ReadAll(r)
	return string(b), err
}

func TestRead(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	put(t, dir+"/f", "hello\x00\xff")
	put(t, dir+"/empty", "")
	check(t, os.Symlink("f", dir+"/link"))
	for path, want := range map[string]string{"/f": "hello\x00\xff", "/empty": "", "/link": "hello\x00\xff"} {
		got, err := read(t, dir+path)
		check(t, err)
		if got != want {
			t.Errorf("%s: %q", path, got)
		}
	}
	r, err := fsops.Open(t.Context(), dir+"/link")
	check(t, err)
	defer r.Close()
	if r.Size != 7 || r.Mode != 0o644 || r.Type != fsops.Regular {
		t.Errorf("%+v", r.Entry)
	}
}

func TestRead_ProcFileHasContentThoughSizeIsZero(t *testing.T) {
	t.Parallel()
	r, err := fsops.Open(t.Context(), "/proc/self/status")
	check(t, err)
	defer r.Close()
	b, err := io.ReadAll(r)
	check(t, err)
	if r.Size != 0 || !strings.Contains(string(b), "Pid:") {
		t.Errorf("size %d, %d bytes", r.Size, len(b))
	}
}

// None of these may hang, whatever is on the other side.
func TestRead_RefusesWhatIsNoRegularFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	check(t, unix.Mkfifo(dir+"/fifo", 0o600))
	check(t, os.Symlink("fifo", dir+"/link"))
	check(t, os.Symlink("nowhere", dir+"/dangling"))
	put(t, dir+"/f", "")
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	check(t, err)
	defer func() { check(t, unix.Close(fd)) }()
	check(t, unix.Bind(fd, &unix.SockaddrUnix{Name: filepath.Join(dir, "s")}))
	for path, code := range map[string]fault.Code{
		dir: fault.S212, dir + "/fifo": fault.S212, dir + "/link": fault.S212, dir + "/s": fault.S212, "/dev/zero": fault.S212,
		dir + "/dangling": fault.S211, dir + "/missing": fault.S211, dir + "/f/x": fault.S216, dir + "/f/": fault.S216, "": fault.S211,
	} {
		_, err := read(t, path)
		wantCode(t, err, code, path)
	}
}

func TestRead_EndsWithItsContext(t *testing.T) {
	t.Parallel()
	path := put(t, t.TempDir()+"/f", "content")
	ctx, cancel := context.WithCancel(t.Context())
	r, err := fsops.Open(ctx, path)
	check(t, err)
	defer r.Close()
	cancel()
	if _, err := r.Read(make([]byte, 10)); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}
