package imagestore_test

import (
	"archive/tar"
	"bufio"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"hash"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/zstd"
)

// TestMemoryIsFlat pulls an image with one large layer in a process of its own and
// compares the most memory it had with what it had before. IMAGESTORE_TEST_MIB is
// the size of the layer in MiB, 48 without it; the limit is the same for every
// size.
func TestMemoryIsFlat(t *testing.T) {
	t.Parallel()
	mib := 48
	if s := os.Getenv("IMAGESTORE_TEST_MIB"); s != "" {
		var err error
		if mib, err = strconv.Atoi(s); err != nil {
			t.Fatal(err)
		}
	}
	if peakKiB() == 0 {
		t.Skip("this system does not tell a process' peak memory")
	}
	for _, compression := range []string{"gzip", "zstd", "plain"} {
		dir := filepath.Join(t.TempDir(), compression)
		writeLargeLayout(t, dir, mib, compression)
		p := startPuller(t, t.TempDir(), "oci:"+dir)
		var idle, peak int
		if _, err := fmt.Sscan(p.until("idle"), &idle); err != nil {
			t.Fatal(err)
		}
		if _, err := fmt.Sscan(p.until("peak"), &peak); err != nil {
			t.Fatal(err)
		}
		p.finish()
		t.Logf("%s, %d MiB: %d MiB idle, %d MiB peak", compression, mib, idle>>10, peak>>10)
		if peak-idle > 96<<10 {
			t.Errorf("%s: %d MiB more than idle, want at most 96", compression, (peak-idle)>>10)
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
	}
}

// hashingFile counts and hashes what is written to a file.
type hashingFile struct {
	*os.File
	hash.Hash
	n int64
}

func (f *hashingFile) Write(p []byte) (int, error) {
	f.n += int64(len(p))
	_, _ = f.Hash.Write(p)
	return f.File.Write(p)
}

func (f *hashingFile) digest() v1.Hash {
	return v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(f.Sum(nil))}
}

type nopCloser struct{ io.Writer }

func (nopCloser) Close() error { return nil }

// writeLargeLayout writes an OCI layout with one layer of mib MiB: 2000 small files
// and large ones, without ever having it in memory.
func writeLargeLayout(t *testing.T, dir string, mib int, compression string) {
	t.Helper()
	blobs := filepath.Join(dir, "blobs", "sha256")
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.MkdirAll(blobs, 0o700))
	file, err := os.Create(filepath.Join(blobs, "layer"))
	must(err)
	blob := &hashingFile{File: file, Hash: sha256.New()}
	var compressor io.WriteCloser = nopCloser{blob}
	mediaType := types.OCIUncompressedLayer
	switch compression {
	case "gzip":
		mediaType = types.OCILayer
		compressor, err = gzip.NewWriterLevel(blob, gzip.BestSpeed)
	case "zstd":
		mediaType = types.OCILayerZStd
		compressor, err = zstd.NewWriter(blob, zstd.WithEncoderLevel(zstd.SpeedFastest))
	}
	must(err)
	plain := sha256.New()
	buffered := bufio.NewWriterSize(io.MultiWriter(compressor, plain), 1<<20)
	w := tar.NewWriter(buffered)
	for k := range 2000 {
		must(w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: fmt.Sprintf("small/%d", k), Mode: 0o644, Size: 3000}))
		_, err := w.Write([]byte(noise(3000)))
		must(err)
	}
	chunk := []byte(noise(1 << 20))
	for k := 0; k < mib; k += 64 {
		must(w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: fmt.Sprintf("large/%d", k), Mode: 0o644, Size: int64(min(64, mib-k)) << 20}))
		for range min(64, mib-k) {
			_, err := w.Write(chunk)
			must(err)
		}
	}
	must(w.Close())
	must(buffered.Flush())
	must(compressor.Close())
	must(file.Close())
	must(os.Rename(file.Name(), filepath.Join(blobs, blob.digest().Hex)))

	put := func(v any) v1.Descriptor {
		raw, err := json.Marshal(v)
		must(err)
		d := v1.Descriptor{Size: int64(len(raw)), Digest: hashOf(raw)}
		must(os.WriteFile(filepath.Join(blobs, d.Digest.Hex), raw, 0o600))
		return d
	}
	diffID := v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(plain.Sum(nil))}
	config := put(v1.ConfigFile{OS: "linux", Architecture: arch, RootFS: v1.RootFS{Type: "layers", DiffIDs: []v1.Hash{diffID}}})
	config.MediaType = types.OCIConfigJSON
	manifest := put(v1.Manifest{
		SchemaVersion: 2, MediaType: types.OCIManifestSchema1, Config: config,
		Layers: []v1.Descriptor{{MediaType: mediaType, Size: blob.n, Digest: blob.digest()}},
	})
	manifest.MediaType = types.OCIManifestSchema1
	index, err := json.Marshal(v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex, Manifests: []v1.Descriptor{manifest}})
	must(err)
	must(os.WriteFile(filepath.Join(dir, "index.json"), index, 0o600))
}
