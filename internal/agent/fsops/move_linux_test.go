package fsops_test

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/agent/fsops"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
)

func move(t *testing.T, src, dst string, overwrite bool) error {
	t.Helper()
	return fsops.Move(t.Context(), src, dst, overwrite)
}

func TestMove_WithinAFilesystem(t *testing.T) {
	t.Parallel()
	testMove(t, t.TempDir(), t.TempDir())
}

func TestMove_AcrossFilesystems(t *testing.T) {
	t.Parallel()
	testMove(t, t.TempDir(), elsewhere(t))
}

// testMove goes through what move must do the same whether it renames or copies.
func testMove(t *testing.T, from, to string) {
	put(t, from+"/f", "content")
	put(t, to+"/taken", "old")
	wantCode(t, move(t, from+"/f", to+"/taken", false), fault.S213, to+"/taken")
	if content(t, from+"/f") != "content" || content(t, to+"/taken") != "old" {
		t.Fatal("a refused move changed something")
	}
	check(t, move(t, from+"/f", to+"/new", false))
	wantNames(t, from)
	check(t, move(t, to+"/new", from+"/f", false))
	check(t, move(t, from+"/f", to+"/taken", true))
	if content(t, to+"/taken") != "content" {
		t.Error("not overwritten")
	}
	wantNames(t, from)

	// Kinds that do not go together; nothing moves into a directory.
	put(t, from+"/f", "content")
	put(t, from+"/d/x", "")
	put(t, to+"/full/x", "")
	check(t, os.Mkdir(to+"/empty", 0o755))
	wantCode(t, move(t, from+"/f", to+"/empty", true), fault.S216)
	wantCode(t, move(t, from+"/f", to+"/empty", false), fault.S213)
	wantCode(t, move(t, from+"/d", to+"/taken", true), fault.S216)
	wantCode(t, move(t, from+"/d", to+"/full", true), fault.S216)
	check(t, move(t, from+"/d", to+"/empty", true))
	wantNames(t, to, "taken", "full", "empty")
	wantNames(t, to+"/empty", "x")
	wantNames(t, from, "f")

	// A missing parent of the destination: plain, without a fix.
	err := move(t, from+"/f", to+"/missing/f", false)
	wantCode(t, err, fault.S211, to+"/missing/f")
	if fault.Of(err).ParentMissing() {
		t.Error("offers the parents fix")
	}
	wantCode(t, move(t, from+"/f", to+"/taken/f", false), fault.S216)

	// Links move as links; dangling ones count as missing, and do not stand in
	// the way.
	check(t, os.Symlink("f", from+"/link"))
	check(t, os.Symlink("nowhere", from+"/dangling"))
	check(t, os.Symlink("nowhere", to+"/dangling"))
	wantCode(t, move(t, from+"/dangling", to+"/x", false), fault.S211, from+"/dangling")
	check(t, move(t, from+"/link", to+"/link", false))
	if target, err := os.Readlink(to + "/link"); err != nil || target != "f" {
		t.Errorf("%q %v", target, err)
	}
	check(t, move(t, from+"/f", to+"/dangling", false))
	if content(t, to+"/dangling") != "content" {
		t.Error("the dangling link is still there")
	}
	wantNames(t, from, "dangling")
	wantNames(t, to, "taken", "full", "empty", "link", "dangling")
}

func TestMove_ErrorsOfPaths(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	put(t, dir+"/f", "")
	put(t, dir+"/d/sub/x", "")
	for _, src := range []string{dir + "/missing", "", "a\x00", dir + "/f/x"} {
		wantCode(t, move(t, src, dir+"/new", false), fault.S211, src)
	}
	wantCode(t, move(t, dir+"/f", "", false), fault.S211)
	wantCode(t, move(t, dir+"/f", "a\x00", true), fault.S216)
	wantCode(t, move(t, dir+"/d", dir+"/d/sub/d", false), fault.S216)
	wantCode(t, move(t, dir+"/f", dir+"/f", false), fault.S213)
	check(t, move(t, dir+"/f", dir+"/f", true))
	check(t, move(t, dir+"/f", dir+"/./f", true))
	wantNames(t, dir, "f", "d")
}

// Rename leaves two names of one file alone and calls that done.
func TestMove_OntoAHardLinkOfItself(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	put(t, dir+"/a", "x")
	check(t, os.Link(dir+"/a", dir+"/b"))
	check(t, os.Symlink(dir, dir+"/here"))
	check(t, move(t, dir+"/a", dir+"/here/a", true))
	wantNames(t, dir, "a", "b", "here")
	check(t, move(t, dir+"/a", dir+"/b", true))
	wantNames(t, dir, "b", "here")
}

// build makes a tree with everything that a copy can lose.
func build(t *testing.T, root string) {
	t.Helper()
	// tmpfs has them since Linux 6.6; where they are missing they get lost.
	probe := put(t, elsewhere(t)+"/probe", "")
	attributesEverywhere := unix.Setxattr(probe, "user.test", []byte("x"), 0) == nil
	put(t, root+"/sub/file", "content")
	put(t, root+"/sub/deep/er/file", strings.Repeat("x", 700_000))
	put(t, root+"/bad\xffname\n", "odd")
	put(t, root+"/setuid", "")
	check(t, unix.Chmod(root+"/setuid", 0o4755))
	check(t, os.Link(root+"/sub/file", root+"/hard"))
	check(t, os.Symlink("../outside", root+"/link"))
	check(t, os.Symlink("nowhere", root+"/dangling"))
	check(t, unix.Mkfifo(root+"/fifo", 0o640))
	check(t, os.Mkdir(root+"/empty", 0o700))
	check(t, unix.Chmod(root+"/empty", 0o1777))
	sparse, err := os.Create(root + "/sparse")
	check(t, err)
	_, err = sparse.WriteAt([]byte("end"), 10<<20)
	check(t, err)
	check(t, sparse.Close())
	if err := unix.Lsetxattr(root+"/sub/file", "user.test", []byte("kept"), 0); err != nil || !attributesEverywhere {
		t.Logf("no extended attributes here and elsewhere: %v", err)
		_ = unix.Lremovexattr(root+"/sub/file", "user.test") // was not set, or must not be
	}
	if os.Geteuid() == 0 {
		check(t, os.Lchown(root+"/sub", 1, 2))
		check(t, os.Lchown(root+"/sub/deep/er/file", 3, 4))
		check(t, os.Lchown(root+"/link", 5, 6))
		check(t, unix.Mknod(root+"/null", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
	}
	for _, path := range []string{"/fifo", "/link", "/sub/file", "/sub/deep", "/sub", ""} {
		ts := unix.NsecToTimespec(time.Unix(1_000_000_000+int64(len(path)), 123_456_789).UnixNano())
		check(t, unix.UtimesNanoAt(unix.AT_FDCWD, root+path, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW))
	}
}

func TestMove_DirectoryAcrossFilesystems(t *testing.T) {
	t.Parallel()
	from, to := t.TempDir(), elsewhere(t)
	build(t, from+"/tree")
	want := snapshot(t, from+"/tree")
	check(t, move(t, from+"/tree", to+"/moved", false))
	if got := snapshot(t, to+"/moved"); got != want {
		t.Errorf("the copy differs:\n%s\nwant\n%s", got, want)
	}
	var st unix.Stat_t
	check(t, unix.Stat(to+"/moved/sparse", &st))
	if st.Blocks*512 > 1<<20 {
		t.Errorf("the hole was filled: %d bytes on disk", st.Blocks*512)
	}
	wantNames(t, from)
	wantNames(t, to, "moved")
	check(t, move(t, to+"/moved", from+"/back", false))
	if got := snapshot(t, from+"/back"); got != want {
		t.Errorf("the way back differs:\n%s\nwant\n%s", got, want)
	}
	wantNames(t, to)
}

// A directory of the image cannot be renamed by the overlay: the kernel says
// EXDEV although it is one file system.
func TestMove_DirectoryOfTheLowerLayer(t *testing.T) {
	lower := t.TempDir()
	build(t, lower+"/tree")
	dir := overlay(t, lower)
	want := snapshot(t, dir+"/tree")
	check(t, move(t, dir+"/tree", dir+"/moved", false))
	if got := snapshot(t, dir+"/moved"); got != want {
		t.Errorf("the copy differs:\n%s\nwant\n%s", got, want)
	}
	wantNames(t, dir, "moved")
}

func TestMove_IntoItselfAcrossAMount(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	check(t, os.MkdirAll(dir+"/tree/m", 0o755))
	if err := unix.Mount("tmpfs", dir+"/tree/m", "tmpfs", 0, "size=1m"); err != nil {
		t.Skipf("cannot mount: %v", err)
	}
	defer func() { check(t, unix.Unmount(dir+"/tree/m", unix.MNT_DETACH)) }()
	wantCode(t, move(t, dir+"/tree", dir+"/tree/m/tree", false), fault.S216)
	wantNames(t, dir+"/tree/m")
	// Neither a mount point nor a tree with one in it moves away.
	to := elsewhere(t)
	wantCode(t, move(t, dir+"/tree", to+"/tree", false), fault.S216)
	wantCode(t, move(t, dir+"/tree/m", to+"/m", false), fault.S216)
	wantNames(t, to)
	wantNames(t, dir+"/tree", "m")
}

func TestMove_FailedCopyLeavesNothing(t *testing.T) {
	needRoot(t)
	from, to := t.TempDir(), t.TempDir()
	put(t, from+"/tree/a", "a")
	put(t, from+"/tree/b", strings.Repeat("b", 2<<20))
	if err := unix.Mount("tmpfs", to, "tmpfs", 0, "size=1m"); err != nil {
		t.Skipf("cannot mount: %v", err)
	}
	defer func() { check(t, unix.Unmount(to, unix.MNT_DETACH)) }()
	want := snapshot(t, from)
	wantCode(t, move(t, from+"/tree", to+"/tree", false), fault.S216)
	wantCode(t, move(t, from+"/tree/b", to+"/b", false), fault.S216)
	wantNames(t, to)
	if got := snapshot(t, from); got != want {
		t.Errorf("the source changed:\n%s\nwant\n%s", got, want)
	}
}

func TestMove_EndedCopyLeavesNothing(t *testing.T) {
	t.Parallel()
	from, to := t.TempDir(), elsewhere(t)
	build(t, from+"/tree")
	want := snapshot(t, from)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := fsops.Move(ctx, from+"/tree", to+"/tree", false); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	wantNames(t, to)
	if got := snapshot(t, from); got != want {
		t.Error("the source changed")
	}
}

// Ends the context at every point of the copy that it is asked about.
func TestMove_EndedAnywhereIsAllOrNothing(t *testing.T) {
	t.Parallel()
	for n := range 60 {
		from, to := elsewhere(t), t.TempDir()
		build(t, from+"/tree")
		want := snapshot(t, from+"/tree")
		err := fsops.Move(&countdown{Context: t.Context(), left: n}, from+"/tree", to+"/tree", false)
		if err == nil {
			if got := snapshot(t, to+"/tree"); got != want {
				t.Fatalf("after %d: moved, but differs", n)
			}
			wantNames(t, from)
			wantNames(t, to, "tree")
			if n < 10 {
				t.Fatalf("the context was asked only %d times", n)
			}
			return
		}
		if !errors.Is(err, context.Canceled) {
			t.Fatalf("after %d: %v", n, err)
		}
		wantNames(t, to)
		if got := snapshot(t, from+"/tree"); got != want {
			t.Fatalf("after %d: the source changed", n)
		}
	}
	t.Fatal("never moved")
}

// countdown is a context that ends when it has been asked often enough.
type countdown struct {
	context.Context
	left int
}

func (c *countdown) Err() error {
	if c.left--; c.left < 0 {
		return context.Canceled
	}
	return nil
}
