package main

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/zstd"
)

// fileLayer is a zstd layer in a file. It implements v1.Layer.
type fileLayer struct {
	path           string
	size           int64
	digest, diffID v1.Hash
}

// writeLayer writes t's tar, compressed, to path. The bytes depend on the tree
// and on the compressor's version in go.mod alone: one thread, one level.
func writeLayer(t *tree, path string) (*fileLayer, error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return nil, err
	}
	layer, err := compress(t, f)
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, fmt.Errorf("write layer: %w", err)
	}
	layer.path = path
	return layer, nil
}

func compress(t *tree, f io.Writer) (*fileLayer, error) {
	packed, plain, size := sha256.New(), sha256.New(), &byteCount{}
	zw, err := zstd.NewWriter(io.MultiWriter(f, packed, size),
		zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(zstd.SpeedBetterCompression))
	if err != nil {
		return nil, err
	}
	buffered := bufio.NewWriterSize(io.MultiWriter(zw, plain), 1<<20)
	err = t.writeTar(buffered)
	if err == nil {
		err = buffered.Flush()
	}
	if err := errors.Join(err, zw.Close()); err != nil {
		return nil, err
	}
	return &fileLayer{
		size:   size.n,
		digest: v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(packed.Sum(nil))},
		diffID: v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(plain.Sum(nil))},
	}, nil
}

type byteCount struct{ n int64 }

// Write counts p.
func (c *byteCount) Write(p []byte) (int, error) {
	c.n += int64(len(p))
	return len(p), nil
}

// Digest is the hash of the compressed bytes.
func (l *fileLayer) Digest() (v1.Hash, error) { return l.digest, nil }

// DiffID is the hash of the tar.
func (l *fileLayer) DiffID() (v1.Hash, error) { return l.diffID, nil }

// Size is the number of compressed bytes.
func (l *fileLayer) Size() (int64, error) { return l.size, nil }

// MediaType is the OCI type of a zstd layer.
func (l *fileLayer) MediaType() (types.MediaType, error) { return types.OCILayerZStd, nil }

// Compressed opens the file; the caller closes it.
func (l *fileLayer) Compressed() (io.ReadCloser, error) { return os.Open(l.path) }

// Uncompressed opens the tar; the caller closes it.
func (l *fileLayer) Uncompressed() (io.ReadCloser, error) {
	f, err := os.Open(l.path)
	if err != nil {
		return nil, err
	}
	zr, err := zstd.NewReader(f)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &zstdFile{Decoder: zr, file: f}, nil
}

type zstdFile struct {
	*zstd.Decoder
	file *os.File
}

// Close frees the decoder and closes the file under it.
func (z *zstdFile) Close() error {
	z.Decoder.Close()
	return z.file.Close()
}
