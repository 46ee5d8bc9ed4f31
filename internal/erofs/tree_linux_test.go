package erofs_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// readTree snapshots a directory of the host.
func readTree(t testing.TB, root string) map[string]node {
	t.Helper()
	nodes := map[string]node{}
	first := map[uint64]string{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		n := node{Mode: st.Mode, UID: st.Uid, GID: st.Gid, Nlink: uint32(st.Nlink), Rdev: uint32(st.Rdev), Size: st.Size, Sec: st.Mtim.Sec, Nsec: st.Mtim.Nsec}
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			n.Body = hashFile(t, path)
		case unix.S_IFLNK:
			if n.Body, err = os.Readlink(path); err != nil {
				return err
			}
		}
		n.Xattrs = hostXattrs(t, path)
		if _, ok := first[st.Ino]; !ok {
			first[st.Ino] = rel
		}
		n.First = first[st.Ino]
		nodes[rel] = n
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return nodes
}

func hostXattrs(t testing.TB, path string) string {
	t.Helper()
	buf := make([]byte, 1<<16)
	n, err := unix.Llistxattr(path, buf)
	if err != nil {
		t.Fatalf("list xattrs of %q: %v", path, err)
	}
	all := map[string]string{}
	for name := range strings.SplitSeq(strings.TrimSuffix(string(buf[:n]), "\x00"), "\x00") {
		if name == "" {
			continue
		}
		value := make([]byte, 1<<16)
		k, err := unix.Lgetxattr(path, name, value)
		if err != nil {
			t.Fatalf("get xattr %q of %q: %v", name, path, err)
		}
		all[name] = string(value[:k])
	}
	return xattrString(all)
}
