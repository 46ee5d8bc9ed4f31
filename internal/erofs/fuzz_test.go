package erofs_test

import (
	"bytes"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/erofs"
)

// FuzzAddLayer feeds two layers of arbitrary bytes. Whatever they are, the
// builder must not panic, and what it accepts must be an image that another
// implementation reads to the end.
func FuzzAddLayer(f *testing.F) {
	acl := dir("acl")
	acl.PAXRecords = map[string]string{"SCHILY.xattr.system.posix_acl_access": aclValue, "SCHILY.xattr.user.x": "y"}
	f.Add(layer(f, file("a", "1"), dir("d/"), file("d/x", "2"), acl), layer(f, file(".wh.a", ""), file("d/.wh..wh..opq", "")))
	f.Add(layer(f, symlink("l", "../d"), file("l/x", "1"), hardlink("h", "later"), file("later", "2")), layer(f, file("l", "3"), hardlink("k", "h")))
	f.Add(layer(f, symlink("a", "b"), symlink("b", "a"), file("a/x", "")), []byte{})
	f.Add(layer(f, file("a/b/c/d/e/f", random(1, 3000)), symlink("s", "t")), layer(f, dir("./"), file("a/b", "x")))
	f.Fuzz(func(t *testing.T, lower, upper []byte) {
		image, _, err := tryBuild(t, erofs.Limits{Unpacked: 1 << 20, Entries: 1000}, lower, upper)
		if err != nil {
			return
		}
		readImage(t, image)
		again, _, err := tryBuild(t, erofs.Limits{Unpacked: 1 << 20, Entries: 1000}, lower, upper)
		if err != nil {
			t.Fatalf("the second build of the same layers fails: %v", err)
		}
		if !bytes.Equal(readFile(t, image), readFile(t, again)) {
			t.Error("two builds of the same layers differ")
		}
	})
}
