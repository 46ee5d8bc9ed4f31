// Package sdk is what the real SDKs of iii have in common for tests: each is
// fetched once into .cache of the project, and its programs run to their end.
package sdk

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/flock"
)

// fetchTimeout bounds one fetch.
const fetchTimeout = 10 * time.Minute

// require is the variable that makes it a failure, where it is "1", when an SDK
// cannot be fetched or run.
const require = "III_TEST_SDKS"

// Dir returns the directory .cache/NAME/KEY of the project, KEY being a hash of
// what decides its contents. The first call has fill make it: in a directory that
// takes the name when fill is done, so that it appears whole or not at all.
// Others wait meanwhile, those of other processes too.
func Dir(ctx context.Context, name string, fill func(ctx context.Context, dir string) error, decides ...[]byte) (string, error) {
	top, err := topDir()
	if err != nil {
		return "", err
	}
	cache := filepath.Join(top, ".cache", name)
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return "", err
	}
	hash := sha256.New()
	for _, text := range decides {
		sum := sha256.Sum256(text)
		_, _ = hash.Write(sum[:])
	}
	dir := filepath.Join(cache, hex.EncodeToString(hash.Sum(nil)[:8]))
	ctx, cancel := context.WithTimeout(ctx, fetchTimeout)
	defer cancel()
	lock, err := flock.Open(filepath.Join(cache, "lock"))
	if err != nil {
		return "", err
	}
	defer func() { _ = flock.Unlock(lock) }()
	if err := flock.Wait(ctx, lock, flock.Exclusive); err != nil {
		return "", err
	}
	if _, err := os.Stat(dir); err == nil {
		return dir, nil
	}
	part := dir + ".part"
	if err := os.RemoveAll(part); err != nil {
		return "", err
	}
	if err := os.Mkdir(part, 0o755); err != nil {
		return "", err
	}
	if err := fill(ctx, part); err != nil {
		return "", err
	}
	return dir, os.Rename(part, dir)
}

// topDir is the directory of go.mod.
func topDir() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", errors.New("not inside the project")
		}
		dir = parent
	}
}

// Install is prepare for a test, which it skips where prepare fails: with the name
// of the SDK and the error as the reason. With III_TEST_SDKS=1 the test fails
// instead.
func Install(t testing.TB, name string, prepare func(context.Context) (string, error)) string {
	t.Helper()
	dir, err := prepare(t.Context())
	if err != nil {
		if os.Getenv(require) == "1" {
			t.Fatalf("%s=1, but: the iii-sdk of %s: %v", require, name, err)
		}
		t.Skipf("SKIPPED: the iii-sdk of %s: %v", name, err)
	}
	return dir
}

// Run runs a program to its end, at the latest that of ctx. What it prints goes to
// the test's log; the test fails when the program does.
func Run(ctx context.Context, t testing.TB, cmd *exec.Cmd) {
	t.Helper()
	cmd.Stdout, cmd.Stderr = t.Output(), t.Output()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })()
	if err := cmd.Wait(); err != nil {
		t.Errorf("%s: %v", filepath.Base(cmd.Path), errors.Join(err, ctx.Err()))
	}
}
