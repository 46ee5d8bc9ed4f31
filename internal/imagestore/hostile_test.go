package imagestore_test

import (
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/zstd"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/imagestore"
)

// zeros is an endless stream of zero bytes.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// bomb is a small blob that becomes n bytes, behind a tar's end.
func bomb(t *testing.T, n int64) blobLayer {
	t.Helper()
	var buf bytes.Buffer
	w := gzip.NewWriter(&buf)
	if _, err := w.Write(files{"a": "1"}.tar(t)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.CopyN(w, zeros{}, n); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return blobLayer{blob: buf.Bytes(), mediaType: types.OCILayer, diffID: hashOf(nil)}
}

func TestHostileLayersLeaveNothing(t *testing.T) {
	t.Parallel()
	opts := quick()
	opts.Limits = imagestore.Limits{Unpacked: 1 << 20, FileSize: 1 << 19, Entries: 100}
	good := files{"a": strings.Repeat("x", 3000)}.tar(t)
	garbage := gzipLayer(t, good)
	garbage.blob = append(bytes.Clone(garbage.blob), "trailing garbage"...)
	var window bytes.Buffer
	zw, err := zstd.NewWriter(&window, zstd.WithWindowSize(64<<20))
	if err != nil {
		t.Fatal(err)
	}
	// Larger than the window, so that the frame says so.
	if _, err := io.Copy(zw, io.MultiReader(bytes.NewReader(good), io.LimitReader(zeros{}, 1<<20))); err != nil {
		t.Fatal(err)
	}
	if err := zw.Close(); err != nil {
		t.Fatal(err)
	}
	many := files{}
	for k := range 101 {
		many[strings.Repeat("n", k+1)] = ""
	}
	isLimit := func(err error) bool { var e *imagestore.LimitError; return errors.As(err, &e) }
	isEntry := func(err error) bool { var e *imagestore.EntryError; return errors.As(err, &e) }
	anyError := func(err error) bool { return err != nil }
	for name, test := range map[string]struct {
		layer blobLayer
		want  func(error) bool
	}{
		"gzip bomb":             {bomb(t, 64<<20), isLimit},
		"too large a file":      {gzipLayer(t, files{"a": strings.Repeat("x", 1<<19+1)}.tar(t)), isLimit},
		"too many entries":      {gzipLayer(t, many.tar(t)), isLimit},
		"way out":               {gzipLayer(t, files{"../a": ""}.tar(t)), isEntry},
		"no tar":                {plainLayer([]byte(strings.Repeat("hello world.", 100))), anyError},
		"cut gzip":              {compressedLayer(good, gzipLayer(t, good).blob[:40], types.OCILayer), anyError},
		"garbage behind gzip":   {garbage, anyError},
		"wide zstd window":      {compressedLayer(good, window.Bytes(), types.OCILayerZStd), anyError},
		"empty blob":            {compressedLayer(good, nil, types.OCILayer), anyError},
		"gzip of an empty tar":  {gzipLayer(t, files{}.tar(t)), nil},
		"nothing, uncompressed": {plainLayer(nil), nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir, store := filepath.Join(t.TempDir(), "img"), t.TempDir()
			writeLayout(t, dir, map[string]v1.Image{"": imageOf(t, "linux/"+arch, test.layer)})
			img, err := openStore(t, store, opts).Ensure(t.Context(), "oci:"+dir, pull)
			if test.want == nil {
				if err != nil {
					t.Fatal(err)
				}
				closeImage(t, img)
				return
			}
			if !test.want(err) {
				t.Errorf("error is %T: %v", err, err)
			}
			wantClean(t, store, 0)
		})
	}
}

// smallDisk mounts a file system of mib MiB, or skips.
func smallDisk(t *testing.T, mib string) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("not root: no small file system can be mounted")
	}
	dir := t.TempDir()
	if out, err := exec.Command("mount", "-t", "tmpfs", "-o", "mode=700,size="+mib+"m", "tmpfs", dir).CombinedOutput(); err != nil {
		t.Skipf("no tmpfs can be mounted here: %s", out)
	}
	t.Cleanup(func() {
		if out, err := exec.Command("umount", "-l", dir).CombinedOutput(); err != nil {
			t.Errorf("umount: %s", out)
		}
	})
	return dir
}

func TestFullDisk(t *testing.T) {
	t.Parallel()
	big := imageOf(t, "linux/"+arch, plainLayer(files{"big": noise(6 << 20)}.tar(t)), gzipLayer(t, files{"small": "1"}.tar(t)))
	srv := newServer(t)
	layout := filepath.Join(t.TempDir(), "img")
	writeLayout(t, layout, map[string]v1.Image{"": big})
	for name, ref := range map[string]string{"download": srv.push(t, "big:1", big), "unpack": "oci:" + layout} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			disk := smallDisk(t, "4")
			s := openStore(t, disk, quick())
			_, err := s.Ensure(t.Context(), ref, pull)
			var full *imagestore.NoSpaceError
			if !errors.As(err, &full) || full.Dir != disk || full.Need < 6<<20 || !strings.Contains(err.Error(), "III_SANDBOX_CACHE_DIR") {
				t.Errorf("error is %T %v, want a NoSpaceError", err, err)
			}
			wantClean(t, disk, 0)
			small := filepath.Join(t.TempDir(), "img")
			writeLayout(t, small, map[string]v1.Image{"": simple(t, "1")})
			closeImage(t, ensure(t, s, "oci:"+small, pull))
		})
	}
}

// noise is n bytes that do not compress and are not zero.
func noise(n int) string {
	b := make([]byte, n)
	x := uint64(88172645463325252)
	for i := range b {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		b[i] = byte(x) | 1
	}
	return string(b)
}
