// Package rustsdk has a Rust program that uses the iii-sdk of crates.io, at the
// versions of Cargo.lock: a real client, for tests of the adapter.
package rustsdk

import (
	"context"
	"embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/test/sdk"
)

//go:embed Cargo.toml Cargo.lock functions.rs
var sources embed.FS

// minor is the oldest Rust, 1.minor, that builds the crates.
const minor = 85

// Install is Prepare for a test, which it skips where there is no cargo that is new
// enough: it is not asked for, since it is large. Where there is, it is an SDK like
// the others.
func Install(t testing.TB) string {
	t.Helper()
	version, err := cargoVersion(t.Context())
	if err != nil {
		t.Skipf("SKIPPED: the iii-sdk of Rust: %v", err)
	}
	return sdk.Install(t, "Rust", func(ctx context.Context) (string, error) { return prepare(ctx, version) })
}

// cargoVersion fails where there is no cargo, or one that is too old.
func cargoVersion(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "cargo", "--version").Output()
	if err != nil {
		return "", fmt.Errorf("there is no cargo that runs (on Debian: package cargo-web): %w", err)
	}
	words := strings.FieldsFunc(string(out), func(r rune) bool { return r == ' ' || r == '.' })
	if len(words) < 3 {
		return "", fmt.Errorf("cargo --version says %q", out)
	}
	if n, err := strconv.Atoi(words[2]); err != nil || words[1] == "1" && n < minor {
		return "", fmt.Errorf("%s is older than 1.%d (on Debian: package cargo-web)", strings.TrimSpace(string(out)), minor)
	}
	return string(out), nil
}

// prepare returns a directory with the program functions, built once into
// .cache/rust of the project.
func prepare(ctx context.Context, version string) (string, error) {
	var decides [][]byte
	for _, name := range []string{"Cargo.toml", "Cargo.lock", "functions.rs"} {
		text, err := sources.ReadFile(name)
		if err != nil {
			return "", err
		}
		decides = append(decides, text)
	}
	build := func(ctx context.Context, dir string) error {
		if err := os.CopyFS(dir, sources); err != nil {
			return err
		}
		target := filepath.Join(dir, "target")
		cargo := exec.CommandContext(ctx, "cargo", "build", "--locked", "--quiet", "--target-dir", target)
		cargo.Dir = dir
		if out, err := cargo.CombinedOutput(); err != nil {
			return fmt.Errorf("cargo build: %w\n%s", err, out)
		}
		if err := os.Rename(filepath.Join(target, "debug", "functions"), filepath.Join(dir, "functions")); err != nil {
			return err
		}
		// What it was built from takes hundreds of megabytes.
		return os.RemoveAll(target)
	}
	return sdk.Dir(ctx, "rust", build, slices.Concat(decides, [][]byte{[]byte(version)})...)
}

// Command makes the program of dir. Its environment is env. The caller starts it.
func Command(dir string, env ...string) *exec.Cmd {
	cmd := exec.Command(filepath.Join(dir, "functions"))
	cmd.Dir = dir
	cmd.Env = env
	return cmd
}
