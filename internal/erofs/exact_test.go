package erofs_test

import (
	"archive/tar"
	"bytes"
	"fmt"
	"math/rand/v2"
	"path"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// aclValue is user::rwx,user:1000:r--,group::r-x,mask::r-x,other::r--.
const aclValue = "\x02\x00\x00\x00" +
	"\x01\x00\x07\x00\xff\xff\xff\xff" + "\x02\x00\x04\x00\xe8\x03\x00\x00" + "\x04\x00\x05\x00\xff\xff\xff\xff" +
	"\x10\x00\x05\x00\xff\xff\xff\xff" + "\x20\x00\x04\x00\xff\xff\xff\xff"

func random(seed uint64, n int) string {
	r := rand.New(rand.NewPCG(seed, 7))
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return string(b)
}

// everything is a layer with each kind of thing that a tar can say.
func everything() []entry {
	var list []entry
	add := func(e entry, change func(*tar.Header)) {
		if e.ModTime.IsZero() {
			e.ModTime = testTime
		}
		if change != nil {
			change(&e.Header)
		}
		list = append(list, e)
	}
	add(dir("./"), func(h *tar.Header) { h.Mode = 0o711; h.Uid = 3 })
	for _, size := range []int{0, 1, 2047, 2048, 2049, 4032, 4033, 4095, 4096, 4097, 6144, 8191, 8192, 100_000} {
		add(file(fmt.Sprintf("size-%d", size), random(uint64(size), size)), nil)
	}
	add(file("zeros", strings.Repeat("\x00", 70_000)), nil)
	add(file("setuid", "s"), func(h *tar.Header) { h.Mode = 0o4755; h.Uid = 70_000; h.Gid = 4_000_000_000 })
	add(file("setgid", "s"), func(h *tar.Header) { h.Mode = 0o2711 })
	add(dir("sticky/"), func(h *tar.Header) { h.Mode = 0o1777 })
	add(file("old", "1960"), func(h *tar.Header) { h.ModTime = time.Unix(-300_000_000, 5) })
	add(file("future", "2500"), func(h *tar.Header) { h.ModTime = time.Unix(16_725_225_600, 999_999_999) })
	add(entry{Header: tar.Header{Typeflag: tar.TypeChar, Name: "char", Devmajor: 259, Devminor: 70_000, Mode: 0o600}}, nil)
	add(entry{Header: tar.Header{Typeflag: tar.TypeBlock, Name: "block", Devmajor: 8, Devminor: 1, Mode: 0o660}}, nil)
	add(entry{Header: tar.Header{Typeflag: tar.TypeFifo, Name: "fifo", Mode: 0o622}}, nil)
	add(symlink("short", "size-1"), nil)
	add(symlink("long", strings.Repeat("x", 4000)), nil)
	add(symlink("longest", strings.Repeat("y", 4095)), nil)
	add(hardlink("hard", "size-100000"), nil)
	add(hardlink("hard2", "./hard"), nil)
	add(hardlink("hardsym", "short"), nil)
	for _, name := range []string{"-", "!", "..a", "...", " ", "\\", "a\nb", "\xff\xfe", "é", strings.Repeat("n", 255), strings.Repeat("\xf0", 255)} {
		add(file("names/"+name, name), nil)
	}
	deep := strings.Repeat("d/", 127) + "f"
	add(file(deep, "deep"), nil)
	long := strings.Repeat(strings.Repeat("l", 250)+"/", 15) + strings.Repeat("m", 80)
	add(file(long, "long path"), nil)
	add(file("xattr", "x"), func(h *tar.Header) {
		h.PAXRecords = map[string]string{
			"SCHILY.xattr.security.capability": "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00",
			"SCHILY.xattr.user.empty":          "", "SCHILY.xattr.user.big": random(1, 3000),
			"SCHILY.xattr.trusted.t": "v", "SCHILY.xattr.user." + strings.Repeat("k", 250): "long name",
			"SCHILY.xattr.com.apple.provenance": "dropped",
		}
	})
	add(file("manyxattrs", random(2, 5000)), func(h *tar.Header) {
		h.PAXRecords = map[string]string{}
		for k := range 50 {
			h.PAXRecords[fmt.Sprintf("SCHILY.xattr.user.k%d", k)] = random(uint64(k), 10*k)
		}
	})
	add(dir("acl/"), func(h *tar.Header) {
		h.PAXRecords = map[string]string{"SCHILY.xattr.system.posix_acl_access": aclValue, "SCHILY.xattr.system.posix_acl_default": aclValue}
		h.Mode = 0o754
	})
	add(symlink("xattrlink", strings.Repeat("z", 3000)), func(h *tar.Header) {
		h.PAXRecords = map[string]string{"SCHILY.xattr.trusted.t": random(3, 2000)}
	})
	for k := range 3000 {
		add(file(fmt.Sprintf("many/file-%d", k*7919%3000), fmt.Sprint(k)), nil)
	}
	return list
}

// expect is the snapshot that a kernel must show of entries without whiteouts.
func expect(entries []entry) map[string]node {
	nodes := map[string]node{".": {Mode: unix.S_IFDIR | 0o755}}
	for _, e := range entries {
		name := path.Clean("./" + e.Name)
		for parent := path.Dir(name); parent != "."; parent = path.Dir(parent) {
			if _, ok := nodes[parent]; !ok {
				nodes[parent] = node{Mode: unix.S_IFDIR | 0o755}
			}
		}
		n := node{Mode: uint32(e.Mode), UID: uint32(e.Uid), GID: uint32(e.Gid), Sec: e.ModTime.Unix(), Nsec: int64(e.ModTime.Nanosecond())}
		n.Rdev = uint32(unix.Mkdev(uint32(e.Devmajor), uint32(e.Devminor)))
		xattrs := map[string]string{}
		for key, value := range e.PAXRecords {
			if key, ok := strings.CutPrefix(key, "SCHILY.xattr."); ok && !strings.HasPrefix(key, "com.") {
				xattrs[key] = value
			}
		}
		n.Xattrs = xattrString(xattrs)
		switch e.Typeflag {
		case tar.TypeReg:
			n.Mode |= unix.S_IFREG
			n.Size, n.Body = e.Size, hash(e.body)
		case tar.TypeDir:
			n.Mode |= unix.S_IFDIR
		case tar.TypeSymlink:
			n.Mode = unix.S_IFLNK | 0o777
			n.Size, n.Body = int64(len(e.Linkname)), e.Linkname
		case tar.TypeChar:
			n.Mode |= unix.S_IFCHR
		case tar.TypeBlock:
			n.Mode |= unix.S_IFBLK
		case tar.TypeFifo:
			n.Mode |= unix.S_IFIFO
		case tar.TypeLink:
			n = nodes[path.Clean("./"+e.Linkname)]
		}
		nodes[name] = n
	}
	return nodes
}

func TestImageShowsWhatTheTarSays(t *testing.T) {
	t.Parallel()
	entries := everything()
	got, kernel := snapshot(t, build(t, layer(t, entries...)))
	want := expect(entries)
	for name, w := range want {
		g, ok := got[name]
		if !ok {
			if kernel || strings.ToValidUTF8(name, "") == name {
				t.Errorf("%q is missing", name)
			}
			continue
		}
		if !kernel && strings.Contains(w.Xattrs, "posix_acl") {
			w.Xattrs, g.Xattrs = "", ""
		}
		g.Nlink, g.First = 0, ""
		if w.Mode&unix.S_IFMT == unix.S_IFDIR {
			g.Size = 0
		}
		if g != w {
			t.Errorf("%.100q:\n  got  %+v\n  want %+v", name, g, w)
		}
	}
	if kernel && len(got) != len(want) {
		t.Errorf("image has %d paths, tar %d", len(got), len(want))
	}
	for name, links := range map[string]uint32{"hard": 3, "hard2": 3, "size-100000": 3, "short": 2, "hardsym": 2, "size-1": 1} {
		if got[name].Nlink != links {
			t.Errorf("%s has %d links, want %d", name, got[name].Nlink, links)
		}
	}
	if got["hard"].First != got["size-100000"].First || got["hardsym"].First != got["short"].First {
		t.Error("hard links do not share an inode")
	}
	if want := uint32(2 + 6); got["."].Nlink != want {
		t.Errorf("root has %d links, want %d", got["."].Nlink, want)
	}
}

func TestLongestPath(t *testing.T) {
	t.Parallel()
	// Longer than any one path that the kernel takes, with the mount point before it.
	long := strings.Repeat(strings.Repeat("l", 31)+"/", 127) + strings.Repeat("m", 32)
	if len(long) != 4096 {
		t.Fatalf("path has %d bytes", len(long))
	}
	image := build(t, layer(t, file(long, "long path")))
	fsck(t, image)
	if n, ok := readImage(t, image)[long]; !ok || n.Body != hash("long path") {
		t.Errorf("file is %+v, %v", n, ok)
	}
}

func TestSameLayersGiveSameBytes(t *testing.T) {
	t.Parallel()
	l := layer(t, everything()...)
	upper := layer(t, file("many/.wh..wh..opq", ""), file("size-100000", "now small"), file(".wh.names", ""))
	if !bytes.Equal(readFile(t, build(t, l, upper)), readFile(t, build(t, l, upper))) {
		t.Error("two images of the same layers differ")
	}
}

func TestHiddenFilesLeaveNoBytes(t *testing.T) {
	t.Parallel()
	secret := strings.Repeat("only below. ", 10_000)
	image := readFile(t, build(t, layer(t, file("a", secret), file("b", secret)), layer(t, file(".wh.a", ""), file("b", "new"))))
	// What ends in less than a block lies in the side file, which is dropped.
	if bytes.Contains(image, []byte("only below.")) {
		t.Error("the image holds bytes of a hidden file")
	}
}
