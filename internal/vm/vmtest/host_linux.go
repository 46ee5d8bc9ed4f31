package vmtest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/imagestore"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vmassets"
)

// requireEnv lists, comma-separated, the VMMs whose tests fail rather than skip
// where they cannot run.
const requireEnv = "VMTEST_REQUIRE"

// probeEnv names netprobe's file, where it cannot be built.
const probeEnv = "VMTEST_PROBE"

// imageName is the catalog name of the suite's image.
const imageName = "busybox"

// Host is what tests on real VMs need of this host, found or built.
type Host struct {
	// Cache is the user's own cache root: kernel and initramfs are shared.
	Cache string
	// Lower is the busybox image.
	Lower string
	// Shim, Agent and Probe are programs built from this tree.
	Shim, Agent, Probe string

	// image keeps the image store from collecting Lower, as long as this
	// process lives.
	image *imagestore.Image
}

// Getenv is os.Getenv with the host's programs in their variables.
func (h *Host) Getenv(key string) string {
	switch key {
	case "III_KRUN_SHIM":
		return h.Shim
	case "III_GUEST_AGENT":
		return h.Agent
	}
	return os.Getenv(key)
}

// Roots are private roots, but for the cache.
func (h *Host) Roots(t testing.TB) layout.Roots {
	roots := Roots(t)
	roots.Cache = h.Cache
	return roots
}

// QEMU returns the host if it can run QEMU's VMs. Otherwise it skips the test
// and says why, or fails it where VMTEST_REQUIRE has qemu.
func QEMU(t testing.TB) *Host {
	t.Helper()
	host, err := qemuHost()
	if err != nil {
		if slices.Contains(strings.Split(os.Getenv(requireEnv), ","), "qemu") {
			t.Fatalf("tests on QEMU are required: %v", err)
		}
		t.Skipf("no tests on QEMU: %v", err)
	}
	return host
}

// Libkrun returns the host if it can run libkrun's VMs. Otherwise it skips the
// test and says why, or fails it where VMTEST_REQUIRE has libkrun.
func Libkrun(t testing.TB) *Host {
	t.Helper()
	host, err := libkrunHost()
	if err != nil {
		if slices.Contains(strings.Split(os.Getenv(requireEnv), ","), "libkrun") {
			t.Fatalf("tests on libkrun are required: %v", err)
		}
		t.Skipf("no tests on libkrun: %v", err)
	}
	return host
}

// libkrunHost is qemuHost for libkrun. The variable is read-only.
//
//nolint:gochecknoglobals // as qemuHost
var libkrunHost = sync.OnceValues(findLibkrunHost)

func findLibkrunHost() (*Host, error) {
	if err := vmassets.HardwareVirtualization(); err != nil {
		return nil, err
	}
	roots, err := layout.FromEnvironment(os.Getenv)
	if err != nil {
		return nil, err
	}
	if _, err := vmassets.FindLibkrun(roots.VMM(), os.Getenv); err != nil {
		return nil, err
	}
	return findImage(roots)
}

// qemuHost looks for the host once per process. The variable is read-only.
//
//nolint:gochecknoglobals // what it finds costs seconds, and cannot change
var qemuHost = sync.OnceValues(findQEMUHost)

func findQEMUHost() (*Host, error) {
	roots, err := layout.FromEnvironment(os.Getenv)
	if err != nil {
		return nil, err
	}
	if _, err := vmassets.FindQEMU(os.Getenv, runtime.GOARCH); err != nil {
		return nil, err
	}
	if _, err := vmassets.Find(roots.VMM(), os.Getenv); err != nil {
		return nil, err
	}
	return findImage(roots)
}

// findImage completes a host that can run VMs.
func findImage(roots layout.Roots) (*Host, error) {
	image, err := openImage(roots, imageName)
	if err != nil {
		return nil, fmt.Errorf("%w: make it with `go run ./build/images %s`", err, imageName)
	}
	h := &Host{Cache: roots.Cache, Lower: image.Lower, image: image}
	return h, h.build()
}

// Image returns the lower of another image, which stays for the test's time. A
// host without it skips the test, or fails it where VMTEST_REQUIRE has qemu.
func (h *Host) Image(t testing.TB, name string) string {
	t.Helper()
	roots, err := layout.FromEnvironment(os.Getenv)
	if err != nil {
		t.Fatal(err)
	}
	image, err := openImage(roots, name)
	if err != nil {
		if slices.Contains(strings.Split(os.Getenv(requireEnv), ","), "qemu") {
			t.Fatalf("%v: make it with `go run ./build/images %s`", err, name)
		}
		t.Skipf("SKIPPED: no image %s: %v: make it with `go run ./build/images %s`", name, err, name)
	}
	t.Cleanup(func() {
		if err := image.Close(); err != nil {
			t.Error(err)
		}
	})
	return image.Lower
}

func openImage(roots layout.Roots, name string) (*imagestore.Image, error) {
	layouts := os.Getenv("III_SANDBOX_IMAGE_DIR")
	if layouts == "" {
		layouts = roots.ImageLayouts()
	}
	store, err := imagestore.Open(roots.Images(), imagestore.Options{Log: Discard(), LayoutDir: layouts})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), imageTimeout)
	defer cancel()
	return store.Ensure(ctx, name, imagestore.EnsureOptions{Name: name})
}

// imageTimeout bounds the conversion of an image, on a busy host.
const imageTimeout = 2 * time.Minute

// build makes shim and agent from this tree, where it does for all test
// processes: go build leaves alone what is up to date. III_KRUN_SHIM and
// III_GUEST_AGENT, together with VMTEST_PROBE, name others.
func (h *Host) build() error {
	h.Shim, h.Agent, h.Probe = os.Getenv("III_KRUN_SHIM"), os.Getenv("III_GUEST_AGENT"), os.Getenv(probeEnv)
	if h.Shim != "" && h.Agent != "" && h.Probe != "" {
		return nil
	}
	root, err := moduleRoot()
	if err != nil {
		return err
	}
	dir := filepath.Join(root, ".cache", "vmtest")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = lock.Close() }()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return err
	}
	h.Shim, h.Agent, h.Probe = filepath.Join(dir, "krun-shim"), filepath.Join(dir, "guest-agent"), filepath.Join(dir, "netprobe")
	return errors.Join(
		goBuild(root, h.Shim, "./cmd/krun-shim", os.Getenv("CGO_ENABLED")),
		goBuild(root, h.Agent, "./cmd/guest-agent", "0"),
		goBuild(root, h.Probe, "./test/netprobe", "0"),
	)
}

// Skewed builds a static program of this tree with one change of its source, as
// another version of it would have: in file, below the module's root, from
// becomes to.
func Skewed(t testing.TB, pkg, file, from, to string) string {
	t.Helper()
	root, err := moduleRoot()
	if err != nil {
		t.Fatal(err)
	}
	source, err := os.ReadFile(filepath.Join(root, file))
	if err != nil {
		t.Fatal(err)
	}
	if strings.Count(string(source), from) != 1 {
		t.Fatalf("%s has not exactly one %q", file, from)
	}
	dir := t.TempDir()
	changed, overlay, out := filepath.Join(dir, "changed.go"), filepath.Join(dir, "overlay.json"), filepath.Join(dir, "program")
	replace, err := json.Marshal(map[string]any{"Replace": map[string]string{filepath.Join(root, file): changed}})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(
		os.WriteFile(changed, []byte(strings.Replace(string(source), from, to, 1)), 0o600),
		os.WriteFile(overlay, replace, 0o600),
		goBuild(root, out, pkg, "0", "-overlay", overlay),
	); err != nil {
		t.Fatal(err)
	}
	return out
}

// goBuild is make build's command, but for the version.
func goBuild(root, out, pkg, cgo string, flags ...string) error {
	args := append([]string{"build", "-trimpath", "-tags", "grpcnotrace", "-ldflags", "-s -w", "-o", out}, flags...)
	cmd := exec.Command("go", append(args, pkg)...)
	cmd.Dir = root
	cmd.Env = os.Environ()
	if cgo != "" {
		cmd.Env = append(cmd.Env, "CGO_ENABLED="+cgo)
	}
	if output, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s: %w\n%s", pkg, err, output)
	}
	return nil
}

// moduleRoot is the directory of go.mod, above the test's.
func moduleRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for ; ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", errors.New("no go.mod above the working directory")
		}
	}
}
