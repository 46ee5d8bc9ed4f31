package shimdriver_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	ocilayout "github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/guest"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/imagestore"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/vmtest"
)

func TestShimOfAnotherVersion(t *testing.T) {
	host := vmtest.QEMU(t)
	shim := vmtest.Skewed(t, "./cmd/krun-shim", "internal/bootspec/bootspec.go", "const Version = 2", "const Version = 77")
	e := qemuEnv(t, host, map[string]string{"III_KRUN_SHIM": shim})
	_, err := e.Launcher(t).Launch(e.Context(t), e.Request())
	var end bootspec.End
	if !errors.As(err, &end) || end.Class != bootspec.EndBadSpec {
		t.Fatalf("error is %v", err)
	}
	for _, word := range []string{"version is 2", "reads 77", "one build"} {
		if !strings.Contains(end.Message, word) {
			t.Errorf("%q lacks %q", end.Message, word)
		}
	}
	e.CheckEmpty(t)
}

func TestAgentOfAnotherVersion(t *testing.T) {
	host := vmtest.QEMU(t)
	agent := vmtest.Skewed(t, "./cmd/guest-agent", "internal/agentlink/agentlink.go", "const ProtocolVersion = 1", "const ProtocolVersion = 77")
	e := qemuEnv(t, host, map[string]string{"III_GUEST_AGENT": agent})
	_, err := e.Launcher(t).Launch(e.Context(t), e.Request())
	var boot *vm.BootError
	if !errors.As(err, &boot) {
		t.Fatalf("error is %v", err)
	}
	for _, word := range []string{"version 1", "77", "one build"} {
		if !strings.Contains(boot.Cause.Error(), word) {
			t.Errorf("%q lacks %q: %v", boot.Cause, word, err)
		}
	}
	e.CheckEmpty(t)
}

func TestFullDisk(t *testing.T) {
	host := vmtest.QEMU(t)
	e := qemuEnv(t, host, nil)
	if err := os.MkdirAll(e.Roots.State, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("none", e.Roots.State, "tmpfs", 0, "size=8m,mode=700"); err != nil {
		t.Skipf("no small file system can be mounted here: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(e.Roots.State, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	_, err := e.Launcher(t).Launch(e.Context(t), e.Request())
	if err == nil || !strings.Contains(err.Error(), "MiB are free") || !strings.Contains(err.Error(), "III_SANDBOX_STATE_DIR") {
		t.Errorf("error is %v", err)
	}
	e.CheckEmpty(t)
}

// An image needs no shell, no libraries and no directories: the agent makes
// what it mounts, and static programs run.
func TestImageOfOneStaticProgram(t *testing.T) {
	host := vmtest.QEMU(t)
	e := qemuEnv(t, host, nil)
	e.Lower = oneProgramImage(t, host.Agent)
	m := e.Launch(t, e.Launcher(t), e.Request())
	var stdout bytes.Buffer
	result, err := m.Guest().Exec(e.Context(t), guest.Command{Argv: []string{"/program", "--version"}}, guest.IO{Stdout: &stdout})
	if err != nil || result.ExitCode != 0 || !strings.HasPrefix(stdout.String(), "guest-agent ") {
		t.Errorf("%+v %q %v", result, &stdout, err)
	}
	result, err = m.Guest().Exec(e.Context(t), vmtest.Shell("true"), guest.IO{})
	if err != nil || result.ExitCode != 127 || result.SpawnError == nil {
		t.Errorf("a shell: %+v %v", result, err)
	}
	for _, warning := range m.Info().Warnings {
		t.Log("warning:", warning)
	}
}

// oneProgramImage is the EROFS file of an image that has the file alone.
func oneProgramImage(t *testing.T, program string) string {
	t.Helper()
	body, err := os.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	if err := w.WriteHeader(&tar.Header{Name: "program", Mode: 0o755, Size: int64(len(body))}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(body); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(archive.Bytes())), nil })
	if err != nil {
		t.Fatal(err)
	}
	image, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		t.Fatal(err)
	}
	image, err = mutate.ConfigFile(image, configOf(t, image))
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if _, err := ocilayout.Write(filepath.Join(dir, "layout"), mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: image})); err != nil {
		t.Fatal(err)
	}
	store, err := imagestore.Open(filepath.Join(dir, "images"), imagestore.Options{Log: vmtest.Logger(t)})
	if err != nil {
		t.Fatal(err)
	}
	got, err := store.Ensure(t.Context(), "oci:"+filepath.Join(dir, "layout"), imagestore.EnsureOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := got.Close(); err != nil {
			t.Error(err)
		}
	})
	return got.Lower
}

func configOf(t *testing.T, image v1.Image) *v1.ConfigFile {
	t.Helper()
	config, err := image.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	config = config.DeepCopy()
	config.OS, config.Architecture = "linux", runtime.GOARCH
	return config
}
