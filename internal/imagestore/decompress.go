package imagestore

import (
	"bufio"
	"bytes"
	"errors"
	"io"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
)

// zstdWindow is the largest window of a zstd layer, in bytes; a decoder needs about
// twice as much memory. Compressors use 8 MiB unless told otherwise.
const zstdWindow = 32 << 20

// compressionOf names the compression that a stream with these first bytes has:
// "gzip", "zstd" or "" for none. A tar begins with a file name, and none of
// these is one.
func compressionOf(head []byte) string {
	switch {
	case bytes.HasPrefix(head, []byte{0x1f, 0x8b}):
		return "gzip"
	case bytes.HasPrefix(head, []byte{0x28, 0xb5, 0x2f, 0xfd}):
		return "zstd"
	case len(head) >= 4 && head[0]&0xf0 == 0x50 && bytes.Equal(head[1:4], []byte{0x2a, 0x4d, 0x18}):
		return "zstd" // a skippable frame comes first
	}
	return ""
}

// decompress returns the plain content of r. The caller calls done when finished;
// it does not close r.
func decompress(r io.Reader) (plain io.Reader, done func(), err error) {
	buffered := bufio.NewReaderSize(r, 128<<10)
	head, err := buffered.Peek(4)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, nil, err
	}
	switch compressionOf(head) {
	case "gzip":
		z, err := gzip.NewReader(buffered)
		return z, func() {}, err
	case "zstd":
		z, err := zstd.NewReader(buffered, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true),
			zstd.WithDecoderMaxWindow(zstdWindow))
		if err != nil {
			return nil, nil, err
		}
		return z, z.Close, nil
	}
	return buffered, func() {}, nil
}
