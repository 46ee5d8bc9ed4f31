package erofs_test

import (
	"archive/tar"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/erofs"
)

func TestLayersMerge(t *testing.T) {
	t.Parallel()
	opaque := ".wh..wh..opq"
	tests := []struct {
		name   string
		layers [][]entry
		want   []string
	}{
		{
			"a whiteout hides a file",
			[][]entry{{file("a", "1"), file("b", "1")}, {file(".wh.a", "")}},
			[]string{"b = 1"},
		},
		{
			"a whiteout hides a tree",
			[][]entry{{file("d/x/y", "1"), file("b", "1")}, {file(".wh.d", "")}},
			[]string{"b = 1"},
		},
		{
			"a whiteout leaves the same layer's file, written before it",
			[][]entry{{file("a", "1")}, {file("a", "2"), file(".wh.a", "")}},
			[]string{"a = 2"},
		},
		{
			"a whiteout leaves the same layer's file, written after it",
			[][]entry{{file("a", "1")}, {file(".wh.a", ""), file("a", "2")}},
			[]string{"a = 2"},
		},
		{
			"a whiteout of a directory leaves the same layer's entries, written before it",
			[][]entry{{dir("d/"), file("d/old", "1")}, {file("d/new", "2"), file(".wh.d", "")}},
			[]string{"d/", "d/new = 2"},
		},
		{
			"a whiteout of a directory leaves the same layer's entries, written after it",
			[][]entry{{dir("d/"), file("d/old", "1")}, {file(".wh.d", ""), file("d/new", "2")}},
			[]string{"d/", "d/new = 2"},
		},
		{
			"a whiteout of a whole directory entry of the same layer",
			[][]entry{{file("d/old", "1")}, {dir("d/"), file("d/new", "2"), file(".wh.d", "")}},
			[]string{"d/", "d/new = 2"},
		},
		{
			"an opaque directory hides lower files only, names before and after the marker's",
			[][]entry{{file("d/-low", "1"), file("d/low", "1"), file("d/s/low", "1")}, {file("d/-new", "2"), file("d/s/new", "2"), file("d/"+opaque, ""), file("d/new", "2")}},
			[]string{"d/", "d/-new = 2", "d/new = 2", "d/s/", "d/s/new = 2"},
		},
		{
			"an opaque root",
			[][]entry{{file("a", "1"), file("d/b", "1")}, {file("c", "2"), file(opaque, "")}},
			[]string{"c = 2"},
		},
		{
			"an opaque marker does not hide what a later layer adds",
			[][]entry{{file("d/a", "1")}, {file("d/"+opaque, "")}, {file("d/b", "3")}},
			[]string{"d/", "d/b = 3"},
		},
		{
			"whiteouts of nothing",
			[][]entry{{file("f", "1")}, {file(".wh.x", ""), file("no/.wh.x", ""), file("no/"+opaque, ""), file("f/.wh.x", "")}},
			[]string{"f = 1"},
		},
		{
			"a whiteout is one whatever its type",
			[][]entry{{file("a", "1"), file("b", "1")}, {dir(".wh.a/"), hardlink(".wh.b", "a")}},
			[]string{},
		},
		{
			"aufs' own files are skipped",
			[][]entry{{file(".wh..wh.aufs", ""), dir(".wh..wh.plnk/"), file(".wh..wh.plnk/1.2", "x"), file("a", "1")}},
			[]string{"a = 1"},
		},
		{
			"a file over a directory, a directory over a file",
			[][]entry{{file("d/x", "1"), file("f", "1")}, {file("d", "2"), dir("f/"), file("f/y", "2")}},
			[]string{"d = 2", "f/", "f/y = 2"},
		},
		{
			"a symlink over a directory, a directory over a symlink",
			[][]entry{{file("d/x", "1"), symlink("l", "t"), file("t/x", "1")}, {symlink("d", "t"), dir("l/"), file("l/y", "2")}},
			[]string{"d -> t", "l/", "l/y = 2", "t/", "t/x = 1"},
		},
		{
			"a directory over a directory keeps the children",
			[][]entry{{file("d/x", "1")}, {dir("d/")}},
			[]string{"d/", "d/x = 1"},
		},
		{
			"the last of one name counts",
			[][]entry{{file("a", "1"), file("./a", "2"), file("/a", "3"), file("b//c", "1"), file("b/./c", "2")}},
			[]string{"a = 3", "b/", "b/c = 2"},
		},
		{
			"an entry below a symlinked parent",
			[][]entry{{dir("usr/lib/"), symlink("lib", "usr/lib"), symlink("abs", "/usr/lib")}, {file("lib/a", "2"), file("abs/b", "2")}},
			[]string{"abs -> /usr/lib", "lib -> usr/lib", "usr/", "usr/lib/", "usr/lib/a = 2", "usr/lib/b = 2"},
		},
		{
			"a parent link out of the root stays in it",
			[][]entry{{symlink("l", "../../../../etc"), symlink("m", "/../x"), file("l/passwd", "1"), file("m/y", "1")}},
			[]string{"etc/", "etc/passwd = 1", "l -> ../../../../etc", "m -> /../x", "x/", "x/y = 1"},
		},
		{
			"a whiteout below a symlinked parent",
			[][]entry{{file("t/a", "1"), symlink("l", "t")}, {file("l/.wh.a", "")}},
			[]string{"l -> t", "t/"},
		},
		{
			"hard links across layers",
			[][]entry{{file("a", "1")}, {hardlink("b", "a"), file(".wh.a", "")}, {hardlink("c", "/b")}},
			[]string{"b = 1", "c = 1"},
		},
		{
			"hard links before their target",
			[][]entry{{hardlink("x", "y"), hardlink("y", "z"), file("z", "1")}},
			[]string{"x = 1", "y = 1", "z = 1"},
		},
		{
			"a hard link that a later entry replaces",
			[][]entry{{hardlink("x", "nowhere"), file("x", "2")}},
			[]string{"x = 2"},
		},
		{
			"a hard link below a symlinked parent",
			[][]entry{{file("t/a", "1"), symlink("l", "t")}, {hardlink("b", "l/a")}},
			[]string{"b = 1", "l -> t", "t/", "t/a = 1"},
		},
		{
			"a replaced file leaves its other names",
			[][]entry{{file("a", "1"), hardlink("b", "a")}, {file("a", "2")}},
			[]string{"a = 2", "b = 1"},
		},
		{
			"a hard link to the name it replaces",
			[][]entry{{file("a", "1"), hardlink("b", "a")}, {hardlink("b", "a"), hardlink("a", "b")}},
			[]string{"a = 1", "b = 1"},
		},
		{
			"a global header is no file",
			[][]entry{{{Header: tar.Header{Typeflag: tar.TypeXGlobalHeader, Name: "pax_global_header", PAXRecords: map[string]string{"comment": "x"}}}, file("a", "1")}},
			[]string{"a = 1"},
		},
		{"no layers", nil, []string{}},
		{"an empty layer", [][]entry{{}}, []string{}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			var layers [][]byte
			for _, entries := range test.layers {
				layers = append(layers, layer(t, entries...))
			}
			wantBodies(t, build(t, layers...), []string{"1", "2", "3"}, test.want...)
		})
	}
}

func TestDirectoryTakesTheUpperAttributes(t *testing.T) {
	t.Parallel()
	low, up := dir("d/"), dir("d/")
	low.Mode, low.Uid, low.PAXRecords = 0o700, 5, map[string]string{"SCHILY.xattr.user.low": "1"}
	up.Mode, up.Uid, up.ModTime = 0o1777, 6, testTime
	nodes, _ := snapshot(t, build(t, layer(t, low, file("d/x", "1")), layer(t, up)))
	d := nodes["d"]
	if d.Mode&0o7777 != 0o1777 || d.UID != 6 || d.Xattrs != "" || d.Sec != testTime.Unix() {
		t.Errorf("directory is %+v, want the upper layer's attributes", d)
	}
	if _, ok := nodes["d/x"]; !ok {
		t.Error("the lower layer's file is gone")
	}
}

func TestKeptParentOfAHiddenDirectoryIsPlain(t *testing.T) {
	t.Parallel()
	low := dir("d/")
	low.Mode, low.Uid = 0o700, 5
	for _, upper := range [][]entry{{file("d/new", "2"), file(".wh.d", "")}, {file(".wh.d", ""), file("d/new", "2")}} {
		nodes, _ := snapshot(t, build(t, layer(t, low, file("d/old", "1")), layer(t, upper...)))
		if d := nodes["d"]; d.Mode&0o7777 != 0o755 || d.UID != 0 {
			t.Errorf("directory is %+v, want the one that the upper layer implies", d)
		}
	}
}

func TestHostileEntriesAreRefused(t *testing.T) {
	t.Parallel()
	loop := []entry{symlink("a", "b"), symlink("b", "a"), file("a/x", "1")}
	acl := file("f", "")
	acl.PAXRecords = map[string]string{"SCHILY.acl.access": "user::rwx,user:lisa:r--"}
	badACL := file("f", "")
	badACL.PAXRecords = map[string]string{"SCHILY.xattr.system.posix_acl_access": "\x01\x00\x00\x00"}
	owner := file("f", "")
	owner.Uid = 1<<32 - 1
	device := entry{Header: tar.Header{Typeflag: tar.TypeChar, Name: "dev", Devmajor: 4096}}
	unknown := entry{Header: tar.Header{Typeflag: 'Z', Name: "odd", Format: tar.FormatGNU}}
	tests := []struct {
		name, path, reason string
		entries            []entry
	}{
		{"dotdot", "../x", `".."`, []entry{file("../x", "")}},
		{"dotdot inside", "a/../../x", `".."`, []entry{file("a/../../x", "")}},
		{"dotdot at the end", "a/..", `".."`, []entry{dir("a/..")}},
		{"dotdot in a link target", "../x", `".."`, []entry{hardlink("l", "../x")}},
		{"whiteout of the parent", ".wh...", "whiteout", []entry{file(".wh...", "")}},
		{"whiteout of the directory", "a/.wh..", "whiteout", []entry{file("a/.wh..", "")}},
		{"whiteout of nothing", "a/.wh.", "whiteout", []entry{file("a/.wh.", "")}},
		{"below a whiteout", ".wh.a/b", "whiteout", []entry{file(".wh.a/b", "")}},
		{"file as parent", "f/x", "no directory", []entry{file("f", ""), file("f/x", "")}},
		{"link loop", "a/x", "symbolic links", loop},
		{"link to nothing", "l", "does not exist", []entry{hardlink("l", "gone")}},
		{"link to a directory", "l", "directory", []entry{dir("d/"), hardlink("l", "d")}},
		{"link to the root", "l", "root", []entry{hardlink("l", "/")}},
		{"link to itself", "l", "itself", []entry{hardlink("l", "l")}},
		{"links in a circle", "", "itself", []entry{hardlink("a", "b"), hardlink("b", "c"), hardlink("c", "a")}},
		{"file as root", "./", "root", []entry{{Header: tar.Header{Typeflag: tar.TypeSymlink, Name: "./", Linkname: "x"}}}},
		{"empty symlink", "l", "nothing", []entry{symlink("l", "")}},
		{"text ACL", "f", "ACL as text", []entry{acl}},
		{"damaged ACL", "f", "damaged ACL", []entry{badACL}},
		{"owner", "f", "owner", []entry{owner}},
		{"device", "dev", "device number", []entry{device}},
		{"unknown type", "odd", "tar type", []entry{unknown}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			_, _, err := tryBuild(t, erofs.Limits{}, layer(t, test.entries...))
			var bad *erofs.EntryError
			if !errors.As(err, &bad) {
				t.Fatalf("error is %v, want an EntryError", err)
			}
			if test.path != "" && bad.Path != test.path || !strings.Contains(bad.Reason, test.reason) {
				t.Errorf("error is about %q, %q; want %q and %q in the reason", bad.Path, bad.Reason, test.path, test.reason)
			}
		})
	}
}

func TestLongLinkChainsAreQuick(t *testing.T) {
	t.Parallel()
	// Each link is to the next, which comes later: resolved one a round this would
	// be 50000 * 50000 / 2 lookups.
	const n = 50_000
	var entries []entry
	for k := range n {
		entries = append(entries, hardlink(fmt.Sprintf("l%d", k), fmt.Sprintf("l%d", k+1)))
	}
	entries = append(entries, file(fmt.Sprintf("l%d", n), "1"))
	nodes, _ := snapshot(t, build(t, layer(t, entries...)))
	if got := nodes["l0"].Nlink; got != n+1 {
		t.Errorf("file has %d links, want %d", got, n+1)
	}
}
