package archtest

import (
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
)

// loaded are the libraries that the shim may need: the C library, also by the
// names of what older ones had apart. libkrun is loaded by name, if at all.
func loaded() []string { return []string{"libc.so.6", "libdl.so.2", "libpthread.so.0"} }

// The adapter runs on any host, the agent in any guest; the shim on any host with
// glibc, which libkrun needs.
func TestProgramsNeedNoLibraries(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("SKIPPED: looks at ELF files")
	}
	for _, program := range []struct {
		name, cgo string
		libraries []string
	}{
		{"adapter", "0", nil},
		{"guest-agent", "0", nil},
		{"krun-shim", "1", loaded()},
	} {
		t.Run(program.name, func(t *testing.T) {
			t.Parallel()
			if _, err := exec.LookPath("cc"); err != nil && program.cgo == "1" {
				t.Skipf("SKIPPED: %v", err)
			}
			path := filepath.Join(t.TempDir(), program.name)
			build := exec.CommandContext(t.Context(), "go", "build", "-tags", "grpcnotrace", "-o", path, "./cmd/"+program.name)
			build.Dir = topDir(t)
			build.Env = append(os.Environ(), "CGO_ENABLED="+program.cgo)
			if out, err := build.CombinedOutput(); err != nil {
				t.Fatalf("build: %v\n%s", err, out)
			}
			image, err := elf.Open(path)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = image.Close() }()
			needed, err := image.ImportedLibraries()
			if err != nil {
				t.Fatal(err)
			}
			for _, library := range needed {
				if !slices.Contains(program.libraries, library) {
					t.Errorf("it needs %s", library)
				}
			}
			interpreted := slices.ContainsFunc(image.Progs, func(p *elf.Prog) bool { return p.Type == elf.PT_INTERP })
			if dynamic := program.libraries != nil; interpreted != dynamic {
				t.Errorf("it wants a loader: %t, want %t", interpreted, dynamic)
			}
		})
	}
}
