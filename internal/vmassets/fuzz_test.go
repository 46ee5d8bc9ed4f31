package vmassets_test

import (
	"encoding/binary"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/vmassets"
)

// FuzzOwnKernel gives any file as a kernel: it is taken or refused, and nothing
// is left of a refused one.
func FuzzOwnKernel(f *testing.F) {
	kernel := vmlinux(true, "text")
	for _, seed := range [][]byte{
		nil, kernel, vmlinux(false, ""), bzImage(payload(f, "lz4", kernel)), bzImage(payload(f, "gzip", kernel)),
		bzImage(payload(f, "zstd", kernel)), pack(f, "gzip", kernel), bzImage([]byte("\x5d\x00\x00 some lzma stream")), zboot(f, kernel),
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, file []byte) {
		dir := privateDir(t)
		image := filepath.Join(t.TempDir(), "vmlinuz")
		writeFile(t, image, file, 0o644)
		k, err := vmassets.Find(dir, env("III_VM_KERNEL", image))
		if err == nil && (k.Release == "" || k.Arch != runtime.GOARCH || len(readFile(t, k.Image)) == 0) {
			t.Errorf("it was taken as %+v", k)
		}
		noTemporaries(t, filepath.Join(dir, "kernels"))
	})
}

// zboot is a compressed kernel with an EFI loader in front, as arm64 has it.
func zboot(t testing.TB, kernel []byte) []byte {
	packed := payload(t, "zstd", kernel)
	head := make([]byte, 128)
	copy(head, "MZ\x00\x00zimg")
	binary.LittleEndian.PutUint32(head[8:], uint32(len(head)))
	binary.LittleEndian.PutUint32(head[12:], uint32(len(packed)))
	copy(head[24:], "zstd")
	return append(head, packed...)
}
