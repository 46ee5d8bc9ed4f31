package erofs_test

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	reader "github.com/erofs/go-erofs"
	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/erofs"
)

// entry is one tar entry of a test layer.
type entry struct {
	tar.Header
	body string
}

func file(name, body string) entry {
	return entry{tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(body))}, body}
}

func dir(name string) entry {
	return entry{Header: tar.Header{Typeflag: tar.TypeDir, Name: name, Mode: 0o755}}
}

func symlink(name, target string) entry {
	return entry{Header: tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target}}
}

func hardlink(name, target string) entry {
	return entry{Header: tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: target}}
}

// layer makes a tar of entries.
func layer(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, e := range entries {
		h := e.Header
		if h.Format == tar.FormatUnknown {
			h.Format = tar.FormatPAX
		}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatalf("write header of %q: %v", e.Name, err)
		}
		if _, err := io.WriteString(w, e.body); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

// tempFiles returns an image file and a side file.
func tempFiles(t testing.TB) (image, side *os.File) {
	t.Helper()
	dir := t.TempDir()
	open := func(name string) *os.File {
		f, err := os.OpenFile(filepath.Join(dir, name), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := f.Close(); err != nil {
				t.Error(err)
			}
		})
		return f
	}
	return open("image.erofs"), open("side")
}

// tryBuild makes an image of layers and returns its path.
func tryBuild(t testing.TB, limits erofs.Limits, layers ...[]byte) (string, erofs.Stats, error) {
	t.Helper()
	image, side := tempFiles(t)
	b := erofs.NewBuilder(image, side, limits)
	for _, l := range layers {
		if err := b.AddLayer(t.Context(), bytes.NewReader(l)); err != nil {
			return "", erofs.Stats{}, err
		}
	}
	stats, err := b.Finish()
	return image.Name(), stats, err
}

func build(t testing.TB, layers ...[]byte) string {
	t.Helper()
	path, _, err := tryBuild(t, erofs.Limits{}, layers...)
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// node is what a file system shows of one path.
type node struct {
	Mode, UID, GID, Nlink, Rdev uint32
	Size, Sec, Nsec             int64
	Body                        string // hash of a file, target of a symlink
	First                       string // the first path of the same inode
	Xattrs                      string
}

// snapshot reads image through go-erofs and, where the kernel may mount it,
// through the kernel; both must agree. The kernel's view is returned if there is
// one, and whether it is.
func snapshot(t testing.TB, image string) (map[string]node, bool) {
	t.Helper()
	fsck(t, image)
	ours := readImage(t, image)
	mounted, ok := mount(t, image)
	if !ok {
		return ours, false
	}
	kernel := readTree(t, mounted)
	for path, n := range ours {
		k := kernel[path]
		// go-erofs looks for ACLs elsewhere.
		if strings.Contains(k.Xattrs, "system.posix_acl") {
			n.Xattrs, k.Xattrs = "", ""
		}
		if n != k {
			t.Errorf("%q:\n go-erofs %+v\n kernel   %+v", path, n, k)
		}
	}
	if len(ours) > len(kernel) {
		t.Errorf("go-erofs shows %d paths, the kernel %d", len(ours), len(kernel))
	}
	return kernel, true
}

func fsck(t testing.TB, image string) {
	t.Helper()
	bin, err := exec.LookPath("fsck.erofs")
	if err != nil {
		t.Log("fsck.erofs is not installed: not run")
		return
	}
	out, err := exec.Command(bin, image).CombinedOutput()
	if err != nil || bytes.Contains(out, []byte("<E>")) {
		t.Errorf("fsck.erofs: %v\n%s", err, out)
	}
}

// mount mounts image for the test's time.
func mount(t testing.TB, image string) (string, bool) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Log("not root: images are not mounted by the kernel")
		return "", false
	}
	list, err := os.ReadFile("/proc/filesystems")
	if err != nil || !bytes.Contains(list, []byte("\terofs\n")) {
		t.Log("no erofs in /proc/filesystems: images are not mounted by the kernel")
		return "", false
	}
	target := t.TempDir()
	if out, err := exec.Command("mount", "-t", "erofs", "-o", "loop,ro", image, target).CombinedOutput(); err != nil {
		if !bytes.Contains(out, []byte("wrong fs type")) && !bytes.Contains(out, []byte("tructure")) {
			t.Logf("no loop mounts here: %s", out)
			return "", false
		}
		t.Fatalf("the kernel refuses the image: %s", out)
	}
	t.Cleanup(func() {
		if out, err := exec.Command("umount", "-l", target).CombinedOutput(); err != nil {
			t.Errorf("umount: %s", out)
		}
	})
	return target, true
}

func hashFile(t testing.TB, path string) string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	h := sha256.New()
	_, err = io.Copy(h, f)
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
	return hex.EncodeToString(h.Sum(nil))
}

func hash(body string) string {
	sum := sha256.Sum256([]byte(body))
	return hex.EncodeToString(sum[:])
}

func xattrString(all map[string]string) string {
	var s strings.Builder
	for _, name := range slices.Sorted(maps.Keys(all)) {
		fmt.Fprintf(&s, "%s=%x;", name, all[name])
	}
	return s.String()
}

// readImage snapshots an image through go-erofs, leaving out names that io/fs
// does not allow.
func readImage(t testing.TB, image string) map[string]node {
	t.Helper()
	f, err := os.Open(image)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	})
	img, err := reader.Open(f)
	if err != nil {
		t.Fatal(err)
	}
	nodes := map[string]node{}
	first := map[int64]string{}
	err = fs.WalkDir(img, ".", func(path string, d fs.DirEntry, err error) error {
		if !fs.ValidPath(path) {
			return fs.SkipDir
		}
		if err != nil {
			return fmt.Errorf("%q: %w", path, err)
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		st := info.Sys().(*reader.Stat)
		n := node{
			Mode: unixMode(st.Mode), UID: st.UID, GID: st.GID, Nlink: uint32(st.Nlink), Rdev: st.Rdev,
			Size: st.Size, Sec: int64(st.Mtime), Nsec: int64(st.MtimeNs), Xattrs: xattrString(st.Xattrs),
		}
		switch st.Mode.Type() {
		case 0:
			body, err := fs.ReadFile(img, path)
			if err != nil {
				return err
			}
			n.Body = hash(string(body))
		case fs.ModeSymlink:
			if n.Body, err = fs.ReadLink(img, path); err != nil {
				return err
			}
		}
		if _, ok := first[st.Ino]; !ok {
			first[st.Ino] = path
		}
		n.First = first[st.Ino]
		nodes[path] = n
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return nodes
}

func unixMode(m fs.FileMode) uint32 {
	mode := uint32(m.Perm())
	for bit, value := range map[fs.FileMode]uint32{fs.ModeSetuid: 0o4000, fs.ModeSetgid: 0o2000, fs.ModeSticky: 0o1000} {
		if m&bit != 0 {
			mode |= value
		}
	}
	switch {
	case m.IsDir():
		mode |= unix.S_IFDIR
	case m&fs.ModeSymlink != 0:
		mode |= unix.S_IFLNK
	case m&fs.ModeCharDevice != 0:
		mode |= unix.S_IFCHR
	case m&fs.ModeDevice != 0:
		mode |= unix.S_IFBLK
	case m&fs.ModeNamedPipe != 0:
		mode |= unix.S_IFIFO
	default:
		mode |= unix.S_IFREG
	}
	return mode
}

// paths lists what a snapshot has, files with their body: "a/b", "l -> target".
func bodies(nodes map[string]node, known ...string) []string {
	names := map[string]string{}
	for _, body := range known {
		names[hash(body)] = body
	}
	var list []string
	for path, n := range nodes {
		switch n.Mode & unix.S_IFMT {
		case unix.S_IFDIR:
			list = append(list, path+"/")
		case unix.S_IFLNK:
			list = append(list, path+" -> "+n.Body)
		case unix.S_IFREG:
			list = append(list, path+" = "+names[n.Body])
		default:
			list = append(list, path)
		}
	}
	slices.Sort(list)
	return list[1:] // without "./"
}

func wantBodies(t *testing.T, image string, known []string, want ...string) {
	t.Helper()
	nodes, _ := snapshot(t, image)
	got := bodies(nodes, known...)
	slices.Sort(want)
	if !reflect.DeepEqual(got, want) {
		t.Errorf("image has\n  %s\nwant\n  %s", strings.Join(got, "\n  "), strings.Join(want, "\n  "))
	}
}

var testTime = time.Unix(1_700_000_000, 123_456_789)

func readFile(t testing.TB, path string) []byte {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return content
}
