// Package pythonsdk runs Python programs that use the iii-sdk of PyPI, at the
// versions of requirements.txt: real clients, for tests of the adapter.
package pythonsdk

import (
	"context"
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/test/sdk"
)

//go:embed requirements.txt
var requirements []byte

// Install is Prepare for a test, which it skips where Prepare fails, or with
// III_TEST_SDKS=1 lets fail.
func Install(t testing.TB) string {
	t.Helper()
	return sdk.Install(t, "Python", Prepare)
}

// Prepare returns a directory with the packages, downloaded once into .cache/python
// of the project for each version of Python. It fails without python3 or pip, and
// when the download does.
func Prepare(ctx context.Context) (string, error) {
	// Compiled modules are for one version and kind of machine.
	tag, err := exec.CommandContext(ctx, "python3", "-c", "import pip, sys, sysconfig; print(sys.implementation.cache_tag, sysconfig.get_platform())").Output()
	if err != nil {
		return "", fmt.Errorf("python3 with pip is not installed: %w", err)
	}
	return sdk.Dir(ctx, "python", download, requirements, tag)
}

// download fills dir. Nothing of the packages runs: they are unpacked alone.
func download(ctx context.Context, dir string) error {
	list := filepath.Join(dir, "requirements.txt")
	if err := os.WriteFile(list, requirements, 0o644); err != nil {
		return err
	}
	pip := exec.CommandContext(ctx, "python3", "-m", "pip", "install", "--no-deps", "--only-binary", ":all:",
		"--disable-pip-version-check", "--no-input", "--target", dir, "--requirement", list)
	if out, err := pip.CombinedOutput(); err != nil {
		return fmt.Errorf("pip install: %w\n%s", err, out)
	}
	return nil
}

// Command makes a Python program of its text, which may import the packages of
// dir. Its environment is PATH, HOME and env. The caller starts it.
func Command(dir, script string, env ...string) *exec.Cmd {
	cmd := exec.Command("python3", "-c", script)
	cmd.Dir = dir
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + dir}, env...)
	return cmd
}
