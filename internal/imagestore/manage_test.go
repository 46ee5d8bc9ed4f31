package imagestore_test

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/imagestore"
)

// twoImages is a store with one image by two layouts' references and another by one.
func twoImages(t *testing.T) (s *imagestore.Store, dir string, refs []string) {
	t.Helper()
	dir = t.TempDir()
	layouts := t.TempDir()
	s = openStore(t, dir, quick())
	for name, body := range map[string]string{"a": "1", "b": "1", "c": "2"} {
		writeLayout(t, filepath.Join(layouts, name), map[string]v1.Image{"": simple(t, body)})
		closeImage(t, ensure(t, s, "oci:"+filepath.Join(layouts, name), pull))
	}
	for _, name := range []string{"a", "b", "c"} {
		refs = append(refs, "oci:"+filepath.Join(layouts, name))
	}
	return s, dir, refs
}

// byRef finds the entry that a reference stands for.
func byRef(t *testing.T, s *imagestore.Store, ref string) (imagestore.Entry, bool) {
	t.Helper()
	entries, err := s.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if slices.Contains(e.Refs, ref) {
			return e, true
		}
	}
	return imagestore.Entry{}, false
}

func TestList(t *testing.T) {
	t.Parallel()
	s, _, refs := twoImages(t)
	entries, err := s.List(t.Context())
	if err != nil || len(entries) != 2 || entries[0].Digest >= entries[1].Digest {
		t.Fatalf("list is %+v, %v; want two images in order", entries, err)
	}
	e, _ := byRef(t, s, refs[0])
	if !reflect.DeepEqual(e.Refs, refs[:2]) || e.Arch != arch || e.Size == 0 || e.Allocated == 0 || e.InUse || time.Since(e.Pulled) > time.Hour || time.Since(e.Used) > time.Hour {
		t.Errorf("entry is %+v", e)
	}
	img := ensure(t, s, refs[0], pull)
	if e, _ := byRef(t, s, refs[0]); !e.InUse {
		t.Error("an open image is not in use")
	}
	closeImage(t, img)
	if e, _ := byRef(t, s, refs[0]); e.InUse {
		t.Error("a closed image is in use")
	}
}

func TestRemove(t *testing.T) {
	t.Parallel()
	s, dir, refs := twoImages(t)
	// One of two references: the image stays.
	if err := s.Remove(t.Context(), refs[0]); err != nil {
		t.Fatal(err)
	}
	wantClean(t, dir, 2)
	if err := s.Remove(t.Context(), refs[0]); !errors.Is(err, imagestore.ErrNotCached) {
		t.Errorf("error is %v, want ErrNotCached", err)
	}
	// The last: it goes, unless it is in use.
	img := ensure(t, s, refs[1], pull)
	var inUse *imagestore.InUseError
	for _, name := range []string{refs[1], img.Digest} {
		if err := s.Remove(t.Context(), name); !errors.As(err, &inUse) || inUse.Digest != img.Digest {
			t.Errorf("error is %v, want an InUseError", err)
		}
	}
	wantFiles(t, img.Lower, files{"etc/": "", "etc/name": "1"})
	if _, ok := byRef(t, s, refs[1]); !ok {
		t.Error("a refused removal forgot the reference")
	}
	closeImage(t, img)
	if err := s.Remove(t.Context(), refs[1]); err != nil {
		t.Fatal(err)
	}
	wantClean(t, dir, 1)
	// By digest, references included.
	e, _ := byRef(t, s, refs[2])
	if err := s.Remove(t.Context(), e.Digest); err != nil {
		t.Fatal(err)
	}
	wantClean(t, dir, 0)
	for _, name := range []string{e.Digest, refs[2], "sha256:" + strings.Repeat("0", 64), "nothing"} {
		if err := s.Remove(t.Context(), name); !errors.Is(err, imagestore.ErrNotCached) {
			t.Errorf("%s: error is %v, want ErrNotCached", name, err)
		}
	}
	closeImage(t, ensure(t, s, refs[2], pull))
}

func TestRemoveByCatalogName(t *testing.T) {
	t.Parallel()
	opts := quick()
	opts.LayoutDir = t.TempDir()
	writeLayout(t, filepath.Join(opts.LayoutDir, "python"), map[string]v1.Image{"": simple(t, "1")})
	dir := t.TempDir()
	s := openStore(t, dir, opts)
	closeImage(t, ensure(t, s, "docker.io/iiidev/python", imagestore.EnsureOptions{Name: "python"}))
	if err := s.Remove(t.Context(), "python"); err != nil {
		t.Fatal(err)
	}
	wantClean(t, dir, 0)
}

func TestPins(t *testing.T) {
	t.Parallel()
	s, dir, refs := twoImages(t)
	e, _ := byRef(t, s, refs[2])
	names := []string{"a name", "/path/of/an upper\n\x00"}
	for _, name := range append(names, names[0]) {
		if err := s.Pin(t.Context(), e.Digest, name); err != nil {
			t.Fatal(err)
		}
	}
	if e, _ := byRef(t, s, refs[2]); len(e.Pins) != 2 {
		t.Errorf("pins are %q, want %q", e.Pins, names)
	}
	var inUse *imagestore.InUseError
	if err := s.Remove(t.Context(), refs[2]); !errors.As(err, &inUse) || !strings.Contains(inUse.By, "a name") {
		t.Errorf("error is %v, want an InUseError that names the pin", err)
	}
	if result, err := s.GC(t.Context(), imagestore.GCOptions{All: true}); err != nil || len(result.Removed) != 1 || result.Kept != 1 {
		t.Errorf("GC: %+v, %v; want the pinned image kept", result, err)
	}
	wantClean(t, dir, 1)
	for _, name := range append(names, "never pinned") {
		if err := s.Unpin(t.Context(), e.Digest, name); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Remove(t.Context(), refs[2]); err != nil {
		t.Fatal(err)
	}
	if err := s.Pin(t.Context(), e.Digest, "x"); !errors.Is(err, imagestore.ErrNotCached) {
		t.Errorf("error is %v, want ErrNotCached", err)
	}
	if err := s.Unpin(t.Context(), e.Digest, "x"); err != nil {
		t.Error(err)
	}
}

func TestGC(t *testing.T) {
	t.Parallel()
	s, dir, refs := twoImages(t)
	if result, err := s.GC(t.Context(), imagestore.GCOptions{}); err != nil || len(result.Removed) != 0 {
		t.Errorf("GC: %+v, %v; want nothing removed that has a reference", result, err)
	}
	if result, err := s.GC(t.Context(), imagestore.GCOptions{All: true, UnusedFor: time.Hour}); err != nil || len(result.Removed) != 0 {
		t.Errorf("GC: %+v, %v; want nothing removed that was just used", result, err)
	}
	img := ensure(t, s, refs[2], pull)
	if result, err := s.GC(t.Context(), imagestore.GCOptions{All: true}); err != nil || len(result.Removed) != 1 || result.Kept != 1 {
		t.Errorf("GC: %+v, %v; want the open image kept", result, err)
	}
	wantClean(t, dir, 1)
	if refs, err := os.ReadDir(filepath.Join(dir, "refs")); err != nil || len(refs) != 1 {
		t.Errorf("%d references are left, %v; want one", len(refs), err)
	}
	if locks, err := os.ReadDir(filepath.Join(dir, "locks")); err != nil || len(locks) != 0 {
		t.Errorf("%d locks are left, %v; want none", len(locks), err)
	}
	wantFiles(t, img.Lower, files{"etc/": "", "etc/name": "2"})
}

func TestDamagedStoreHeals(t *testing.T) {
	t.Parallel()
	for name, damage := range map[string]func(dir string) error{
		"lower is short":    func(dir string) error { return truncate(filepath.Join(dir, "lower.erofs")) },
		"lower is gone":     func(dir string) error { return os.Remove(filepath.Join(dir, "lower.erofs")) },
		"record is gone":    func(dir string) error { return os.Remove(filepath.Join(dir, "image.json")) },
		"record is no JSON": func(dir string) error { return os.WriteFile(filepath.Join(dir, "image.json"), []byte("{"), 0o600) },
		"record is empty":   func(dir string) error { return os.Truncate(filepath.Join(dir, "image.json"), 0) },
		"record of other makers": func(dir string) error {
			return os.WriteFile(filepath.Join(dir, "image.json"), []byte(`{"version":999}`), 0o600)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, dir, refs := twoImages(t)
			img := ensure(t, s, refs[2], pull)
			closeImage(t, img)
			if err := s.Pin(t.Context(), img.Digest, "an upper"); err != nil {
				t.Fatal(err)
			}
			if err := damage(filepath.Dir(img.Lower)); err != nil {
				t.Fatal(err)
			}
			again := ensure(t, s, refs[2], pull)
			wantFiles(t, again.Lower, files{"etc/": "", "etc/name": "2"})
			wantClean(t, dir, 2)
			if e, _ := byRef(t, s, refs[2]); !slices.Equal(e.Pins, []string{"an upper"}) {
				t.Errorf("pins are %q after the damage", e.Pins)
			}
		})
	}
}

// truncate cuts a read-only file in half.
func truncate(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	return errors.Join(os.Chmod(path, 0o600), os.Truncate(path, info.Size()/2))
}

func TestDamagedReferenceRecordIsNotCached(t *testing.T) {
	t.Parallel()
	srv := newServer(t)
	ref := srv.push(t, "app:1", simple(t, "1"))
	dir := t.TempDir()
	s := openStore(t, dir, quick())
	closeImage(t, ensure(t, s, ref, pull))
	files, err := filepath.Glob(filepath.Join(dir, "refs", "*.json"))
	if err != nil || len(files) != 1 {
		t.Fatalf("records are %v, %v", files, err)
	}
	for _, content := range []string{"", "{", `{"ref":"x","digest":"y"}`, `{"ref":"` + ref + `","digest":"sha256:../../.."}`} {
		if err := os.WriteFile(files[0], []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Ensure(t.Context(), ref, imagestore.EnsureOptions{}); !errors.Is(err, imagestore.ErrNotCached) {
			t.Errorf("%q: error is %v, want ErrNotCached", content, err)
		}
		if _, err := s.List(t.Context()); err != nil {
			t.Errorf("%q: list: %v", content, err)
		}
		if _, err := s.GC(t.Context(), imagestore.GCOptions{UnusedFor: time.Hour}); err != nil {
			t.Errorf("%q: gc: %v", content, err)
		}
	}
	closeImage(t, ensure(t, s, ref, pull))
}

func TestOpenRefusesADirectoryOfOthers(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	if _, err := imagestore.Open(dir, quick()); err == nil || !strings.Contains(err.Error(), "chmod") {
		t.Errorf("error is %v, want one that says what to do", err)
	}
}
