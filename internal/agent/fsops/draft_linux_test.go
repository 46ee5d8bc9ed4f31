package fsops

import (
	"errors"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// The file systems of the other tests all know nameless files; these are about
// those that do not. There is no such one to be found everywhere, so the draft
// is made here directly.
func TestDraft_Named(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(t *testing.T, d *draft, dir string){
		"discarded": func(*testing.T, *draft, string) {},
		"committed": func(t *testing.T, d *draft, dir string) {
			if err := d.commit("f"); err != nil {
				t.Fatal(err)
			}
			if b, err := os.ReadFile(dir + "/f"); err != nil || string(b) != "new" {
				t.Fatalf("%q %v", b, err)
			}
		},
		"refused": func(t *testing.T, d *draft, _ string) {
			if err := d.commit("d"); !errors.Is(err, unix.EISDIR) {
				t.Fatal(err)
			}
		},
		"copied": func(t *testing.T, d *draft, dir string) {
			if err := d.linkCopy("g", unix.EOPNOTSUPP); err != nil {
				t.Fatal(err)
			}
			if b, err := os.ReadFile(dir + "/g"); err != nil || string(b) != "new" {
				t.Fatalf("%q %v", b, err)
			}
			if err := d.linkCopy("f", unix.EOPNOTSUPP); !errors.Is(err, unix.EEXIST) {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			if err := errors.Join(os.WriteFile(dir+"/f", []byte("old"), 0o600), os.Mkdir(dir+"/d", 0o700)); err != nil {
				t.Fatal(err)
			}
			handle, _, err := openPath(unix.AT_FDCWD, dir, unix.O_DIRECTORY)
			if err != nil {
				t.Fatal(err)
			}
			defer closeFD(handle)
			d, err := newNamedDraft(handle)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := d.Write([]byte("new")); err != nil {
				t.Fatal(err)
			}
			end(t, d, dir)
			d.discard()
			entries, err := os.ReadDir(dir)
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range entries {
				if strings.HasPrefix(e.Name(), tempPrefix) {
					t.Errorf("%s is left", e.Name())
				}
			}
		})
	}
}

func TestRenameNoReplace_WithoutTheKernelsHelp(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := errors.Join(os.WriteFile(dir+"/a", []byte("a"), 0o600), os.WriteFile(dir+"/b", []byte("b"), 0o600)); err != nil {
		t.Fatal(err)
	}
	if err := renameSlowly(unix.AT_FDCWD, dir+"/a", unix.AT_FDCWD, dir+"/b"); !errors.Is(err, unix.EEXIST) {
		t.Errorf("%v", err)
	}
	if err := renameSlowly(unix.AT_FDCWD, dir+"/a", unix.AT_FDCWD, dir+"/c"); err != nil {
		t.Error(err)
	}
	if b, err := os.ReadFile(dir + "/c"); err != nil || string(b) != "a" {
		t.Errorf("%q %v", b, err)
	}
	if _, err := os.Stat(dir + "/a"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%v", err)
	}
}

func TestUTF8Check_PieceByPiece(t *testing.T) {
	t.Parallel()
	for text, valid := range map[string]bool{
		"": true, "aé€😀": true, "é\xff": false, "\xed\xa0\x80": false, "é\xc3": false, "\x80": false, "a\xe2\x82": false, "\xf0\x9f\x98\x80x": true,
	} {
		for size := 1; size <= 5; size++ {
			c, ok := utf8Check{}, true
			for rest := []byte(text); len(rest) > 0; {
				n := min(size, len(rest))
				ok = c.next(rest[:n]) && ok
				rest = rest[n:]
			}
			if got := ok && c.whole(); got != valid {
				t.Errorf("%q in pieces of %d: %v", text, size, got)
			}
		}
	}
}
