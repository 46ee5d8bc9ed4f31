package erofs_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/erofs"
)

func TestLimits(t *testing.T) {
	t.Parallel()
	big := file("big", strings.Repeat("x", 101))
	manyXattrs := file("x", "")
	manyXattrs.PAXRecords = map[string]string{}
	for k := range 5 {
		manyXattrs.PAXRecords[fmt.Sprintf("SCHILY.xattr.user.%d", k)] = strings.Repeat("v", 30_000)
	}
	longXattr := file("x", "")
	longXattr.PAXRecords = map[string]string{"SCHILY.xattr.user.x": strings.Repeat("v", 1<<16)}
	tests := []struct {
		name, what string
		limits     erofs.Limits
		layers     [][]entry
	}{
		{"unpacked", "bytes unpacked", erofs.Limits{Unpacked: 200}, [][]entry{{big}, {big}}},
		{"one file", "bytes in one file", erofs.Limits{FileSize: 100}, [][]entry{{big}}},
		{"entries", "entries", erofs.Limits{Entries: 2}, [][]entry{{file("a", "")}, {file("a", ""), file("a", "")}}},
		{"implied directories are entries", "entries", erofs.Limits{Entries: 3}, [][]entry{{file("a/b/c/d", "")}}},
		{"depth", "levels of directories", erofs.Limits{}, [][]entry{{file(strings.Repeat("d/", 128)+"f", "")}}},
		{"depth by links", "levels of directories", erofs.Limits{Depth: 3}, [][]entry{{symlink("l", "a/b/c"), file("l/d", "")}}},
		{"path", "bytes in a path", erofs.Limits{}, [][]entry{{file(strings.Repeat("dddddddddddddddddddddddddddddd/", 134)+"f", "")}}},
		{"name", "bytes in a file name", erofs.Limits{}, [][]entry{{file(strings.Repeat("n", 256), "")}}},
		{"name of a parent", "bytes in a file name", erofs.Limits{}, [][]entry{{file(strings.Repeat("n", 256)+"/f", "")}}},
		{"symlink", "bytes in a symbolic link", erofs.Limits{}, [][]entry{{symlink("l", strings.Repeat("x", 4096))}}},
		{"xattr", "bytes in an xattr", erofs.Limits{}, [][]entry{{longXattr}}},
		{"all xattrs", "bytes of xattrs in one file", erofs.Limits{}, [][]entry{{manyXattrs}}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			var layers [][]byte
			for _, entries := range test.layers {
				layers = append(layers, layer(t, entries...))
			}
			_, _, err := tryBuild(t, test.limits, layers...)
			var limit *erofs.LimitError
			if !errors.As(err, &limit) || limit.What != test.what {
				t.Errorf("error is %v, want a LimitError about %s", err, test.what)
			}
		})
	}
}

// zeros is an endless stream of zero bytes: the end of a tar, for ever.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

func TestEndlessPaddingEnds(t *testing.T) {
	t.Parallel()
	image, side := tempFiles(t)
	b := erofs.NewBuilder(image, side, erofs.Limits{Unpacked: 1 << 20, Entries: 10})
	err := b.AddLayer(t.Context(), io.MultiReader(bytes.NewReader(layer(t, file("a", "1"))), zeros{}))
	var limit *erofs.LimitError
	if !errors.As(err, &limit) {
		t.Errorf("error is %v, want a LimitError", err)
	}
}

// huge is a tar whose one file claims to have size bytes, all zeros.
func huge(t *testing.T, size int64) io.Reader {
	t.Helper()
	var buf bytes.Buffer
	h := &tar.Header{Typeflag: tar.TypeReg, Name: "huge", Size: size, Mode: 0o644}
	if err := tar.NewWriter(&buf).WriteHeader(h); err != nil {
		t.Fatal(err)
	}
	return io.MultiReader(&buf, io.LimitReader(zeros{}, size), io.LimitReader(zeros{}, 1024))
}

func TestZerosTakeNoSpace(t *testing.T) {
	t.Parallel()
	image, side := tempFiles(t)
	b := erofs.NewBuilder(image, side, erofs.Limits{})
	if err := b.AddLayer(t.Context(), huge(t, 256<<20)); err != nil {
		t.Fatal(err)
	}
	stats, err := b.Finish()
	if err != nil {
		t.Fatal(err)
	}
	if stats.Size < 256<<20 || stats.Unpacked != 256<<20 {
		t.Errorf("stats are %+v, want 256 MiB", stats)
	}
	if kib := allocatedKiB(t, image.Name()); kib > 1024 {
		t.Errorf("256 MiB of zeros take %d KiB", kib)
	}
}

func allocatedKiB(t *testing.T, path string) int64 {
	t.Helper()
	out, err := exec.Command("du", "-k", path).Output()
	if err != nil {
		t.Fatal(err)
	}
	var kib int64
	if _, err := fmt.Sscan(string(out), &kib); err != nil {
		t.Fatal(err)
	}
	return kib
}

func TestSparseEntries(t *testing.T) {
	t.Parallel()
	gnutar, err := exec.LookPath("tar")
	if err != nil {
		t.Skip("no tar program to make sparse entries with")
	}
	src := filepath.Join(t.TempDir(), "sparse")
	f, err := os.Create(src)
	if err != nil {
		t.Fatal(err)
	}
	_, err1 := f.WriteAt([]byte("begin"), 0)
	_, err2 := f.WriteAt([]byte("middle"), 5_000_000)
	if err := errors.Join(err1, err2, f.Truncate(12_345_678), f.Close()); err != nil {
		t.Fatal(err)
	}
	for _, format := range [][]string{{"--format=gnu"}, {"--format=pax", "--sparse-version=0.1"}, {"--format=pax", "--sparse-version=1.0"}} {
		out, err := exec.Command(gnutar, append(format, "--sparse", "-cf", "-", "-C", filepath.Dir(src), "sparse")...).Output()
		if err != nil {
			t.Skipf("this tar makes no sparse entries: %v", err)
		}
		if len(out) > 1<<20 {
			t.Fatalf("tar %v did not make a sparse entry", format)
		}
		nodes, _ := snapshot(t, build(t, out))
		if n := nodes["sparse"]; n.Size != 12_345_678 || n.Body != hashFile(t, src) {
			t.Errorf("%v: sparse file is %+v", format, n)
		}
	}
}

func TestStreamErrorsAreNamed(t *testing.T) {
	t.Parallel()
	whole := layer(t, file("a", strings.Repeat("x", 5000)), file("b", "1"))
	broken := errors.New("disk fell off")
	tests := []struct {
		name   string
		stream io.Reader
		want   error
	}{
		{"cut in a body", bytes.NewReader(whole[:3000]), io.ErrUnexpectedEOF},
		{"cut in a header", bytes.NewReader(whole[:5700]), io.ErrUnexpectedEOF},
		{"read error in a body", io.MultiReader(bytes.NewReader(whole[:3000]), errorReader{broken}), broken},
		{"read error behind the end", io.MultiReader(bytes.NewReader(whole), errorReader{broken}), broken},
		{"no tar", strings.NewReader(strings.Repeat("not a tar at all", 64)), tar.ErrHeader},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			image, side := tempFiles(t)
			b := erofs.NewBuilder(image, side, erofs.Limits{})
			if err := b.AddLayer(t.Context(), test.stream); !errors.Is(err, test.want) {
				t.Errorf("error is %v, want %v", err, test.want)
			}
			if _, err := b.Finish(); err == nil {
				t.Error("a failed builder finishes")
			}
		})
	}
}

type errorReader struct{ err error }

func (r errorReader) Read([]byte) (int, error) { return 0, r.err }

func TestCancelEndsALayer(t *testing.T) {
	t.Parallel()
	image, side := tempFiles(t)
	b := erofs.NewBuilder(image, side, erofs.Limits{})
	ctx, cancel := context.WithCancelCause(t.Context())
	reason := errors.New("enough")
	stream := io.MultiReader(bytes.NewReader(layer(t, file("a", "1"))[:512]), readFunc(func(p []byte) (int, error) {
		cancel(reason)
		clear(p)
		return len(p), nil
	}), zeros{})
	if err := b.AddLayer(ctx, stream); !errors.Is(err, reason) {
		t.Errorf("error is %v, want the cause of the cancel", err)
	}
}

type readFunc func([]byte) (int, error)

func (f readFunc) Read(p []byte) (int, error) { return f(p) }
