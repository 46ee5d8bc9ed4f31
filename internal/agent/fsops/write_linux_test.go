package fsops_test

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/agent/fsops"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
)

func write(path, content string, opts fsops.WriteOptions) error {
	u, err := fsops.Create(path, opts)
	if err != nil {
		return err
	}
	defer u.Close()
	if _, err := u.Write([]byte(content)); err != nil {
		return err
	}
	n, err := u.Commit()
	if err == nil && n != uint64(len(content)) {
		return fmt.Errorf("%d bytes written, not %d", n, len(content))
	}
	return err
}

func TestWrite_NewAndReplaced(t *testing.T) {
	t.Parallel()
	for name, dir := range map[string]string{"disk": t.TempDir(), "tmpfs": elsewhere(t)} {
		check(t, write(dir+"/f", "one", fsops.WriteOptions{Mode: 0o4755}))
		wantMode(t, dir+"/f", 0o4755)
		check(t, write(dir+"/f", "", fsops.WriteOptions{Mode: 0o644}))
		wantMode(t, dir+"/f", 0o644)
		if got := content(t, dir+"/f"); got != "" {
			t.Errorf("%s: %q", name, got)
		}
		check(t, write(dir+"/f", "three\x00\xff", fsops.WriteOptions{Mode: 0}))
		wantMode(t, dir+"/f", 0)
		wantNames(t, dir, "f")
	}
}

func TestWrite_ReplacesLinksAndFollowsThoseOfParents(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	put(t, dir+"/d/target", "kept")
	check(t, os.Symlink("d", dir+"/ld"))
	check(t, os.Symlink("target", dir+"/d/link"))
	check(t, os.Symlink("nowhere", dir+"/d/dangling"))
	check(t, write(dir+"/ld/link", "new", fsops.WriteOptions{Mode: 0o600}))
	check(t, write(dir+"/ld/dangling", "new", fsops.WriteOptions{Mode: 0o600}))
	for _, name := range []string{"link", "dangling"} {
		if info, err := os.Lstat(dir + "/d/" + name); err != nil || !info.Mode().IsRegular() {
			t.Errorf("%s: %v %v", name, info, err)
		}
	}
	if content(t, dir+"/d/target") != "kept" {
		t.Error("the link was followed")
	}
	wantNames(t, dir+"/d", "target", "link", "dangling")
}

func TestWrite_KeepsTheOwnerOfAReplacedFile(t *testing.T) {
	t.Parallel()
	needRoot(t)
	dir := t.TempDir()
	put(t, dir+"/f", "")
	check(t, os.Chown(dir+"/f", 1234, 4321))
	check(t, write(dir+"/f", "x", fsops.WriteOptions{Mode: 0o6755}))
	var st unix.Stat_t
	check(t, unix.Stat(dir+"/f", &st))
	if st.Uid != 1234 || st.Gid != 4321 {
		t.Errorf("owner %d:%d", st.Uid, st.Gid)
	}
	wantMode(t, dir+"/f", 0o6755)
}

func TestWrite_Parents(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	put(t, dir+"/f", "")
	check(t, os.Symlink("nowhere", dir+"/dangling"))
	for _, path := range []string{dir + "/a/b/c", dir + "/f/b/c", dir + "/dangling/c"} {
		err := write(path, "x", fsops.WriteOptions{Mode: 0o644})
		wantCode(t, err, fault.S211, path)
		if !fault.Of(err).ParentMissing() {
			t.Errorf("%s: no fix in %v", path, err)
		}
	}
	wantCode(t, write(dir+"/f/x", "x", fsops.WriteOptions{}), fault.S216)
	wantCode(t, write(dir+"/f/x", "x", fsops.WriteOptions{Parents: true}), fault.S213)
	wantCode(t, write(dir+"/f/x/y", "x", fsops.WriteOptions{Parents: true}), fault.S216)
	check(t, write(dir+"/a/b/c", "x", fsops.WriteOptions{Mode: 0o644, Parents: true}))
	if content(t, dir+"/a/b/c") != "x" {
		t.Error("content")
	}
	wantNames(t, dir, "f", "dangling", "a")
}

func TestWrite_RefusesDirectoriesAndSlashes(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	check(t, os.Mkdir(dir+"/d", 0o755))
	put(t, dir+"/f", "kept")
	for path, code := range map[string]fault.Code{
		dir + "/d": fault.S216, dir + "/d/": fault.S216, dir + "/d/.": fault.S216, dir + "/d/..": fault.S216, "/": fault.S216,
		dir + "/missing/": fault.S211, dir + "/f/": fault.S216, "": fault.S211, dir + "/a\x00": fault.S216,
	} {
		err := write(path, "x", fsops.WriteOptions{})
		wantCode(t, err, code)
		if fault.Of(err).ParentMissing() {
			t.Errorf("%q: offers the parents fix", path)
		}
	}
	wantNames(t, dir, "d", "f")
	if content(t, dir+"/f") != "kept" {
		t.Error("the file was changed")
	}
}

// A directory that appears at the path during the upload stays.
func TestWrite_DirectoryAppearsMeanwhile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	u, err := fsops.Create(dir+"/f", fsops.WriteOptions{Mode: 0o644})
	check(t, err)
	check(t, os.Mkdir(dir+"/f", 0o755))
	_, err = u.Commit()
	wantCode(t, err, fault.S216, dir+"/f")
	u.Close()
	wantNames(t, dir, "f")
}

func TestWrite_NothingIsSeenBeforeCommit(t *testing.T) {
	t.Parallel()
	for _, dir := range []string{t.TempDir(), elsewhere(t)} {
		put(t, dir+"/f", "old")
		u, err := fsops.Create(dir+"/f", fsops.WriteOptions{Mode: 0o644})
		check(t, err)
		_, err = u.Write([]byte(strings.Repeat("new", 100_000)))
		check(t, err)
		if fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR, 0o600); err == nil {
			check(t, unix.Close(fd))
			wantNames(t, dir, "f") // not even a temporary name: a crash here leaves nothing
		} else {
			t.Logf("no nameless files in %s: %v", dir, err) // an overlay of Linux 6.1, for one
		}
		if content(t, dir+"/f") != "old" {
			t.Error("the old content is gone")
		}
		u.Close()
		wantNames(t, dir, "f")
		if content(t, dir+"/f") != "old" {
			t.Error("the old content is gone")
		}
	}
}

func TestWrite_ConcurrentWritersTearNothing(t *testing.T) {
	t.Parallel()
	dir := elsewhere(t)
	var writers sync.WaitGroup
	for i := range 8 {
		writers.Go(func() {
			for range 10 {
				if err := write(dir+"/f", strings.Repeat(string(rune('a'+i)), 100_000), fsops.WriteOptions{Mode: 0o644}); err != nil {
					t.Error(err)
				}
				got, err := os.ReadFile(dir + "/f")
				if err != nil || len(got) != 100_000 || strings.Trim(string(got), string(got[:1])) != "" {
					t.Errorf("torn: %d bytes, %v", len(got), err)
				}
			}
		})
	}
	writers.Wait()
	wantNames(t, dir, "f")
}

func TestWrite_DiskFull(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"); err != nil {
		t.Skipf("cannot mount: %v", err)
	}
	defer func() { check(t, unix.Unmount(dir, unix.MNT_DETACH)) }()
	put(t, dir+"/f", "old")
	err := write(dir+"/f", strings.Repeat("x", 2<<20), fsops.WriteOptions{Mode: 0o644})
	wantCode(t, err, fault.S216, dir+"/f")
	if !strings.Contains(err.Error(), "no space") {
		t.Errorf("%v", err)
	}
	wantNames(t, dir, "f")
	if content(t, dir+"/f") != "old" {
		t.Error("the old content is gone")
	}
}

// overlay mounts an overlay over lower and returns its merged directory.
func overlay(t *testing.T, lower string) string {
	t.Helper()
	needRoot(t)
	base := elsewhere(t)
	for _, dir := range []string{"upper", "work", "merged"} {
		check(t, os.Mkdir(base+"/"+dir, 0o755))
	}
	options := fmt.Sprintf("lowerdir=%s,upperdir=%s/upper,workdir=%s/work", lower, base, base)
	if err := unix.Mount("overlay", base+"/merged", "overlay", 0, options); err != nil {
		t.Skipf("cannot mount an overlay: %v", err)
	}
	t.Cleanup(func() { check(t, unix.Unmount(base+"/merged", unix.MNT_DETACH)) })
	return base + "/merged"
}

// The root of every guest is an overlay.
func TestWrite_OnOverlay(t *testing.T) {
	lower := t.TempDir()
	put(t, lower+"/d/f", "lower")
	dir := overlay(t, lower)
	check(t, write(dir+"/d/f", "new", fsops.WriteOptions{Mode: 0o600}))
	check(t, write(dir+"/d/g", "made", fsops.WriteOptions{Mode: 0o600}))
	if content(t, dir+"/d/f") != "new" || content(t, dir+"/d/g") != "made" || content(t, lower+"/d/f") != "lower" {
		t.Error("content")
	}
	wantNames(t, dir+"/d", "f", "g")
}
