package vmassets_test

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/vmassets"
)

// await waits for a file to appear.
func await(t *testing.T, path string) {
	t.Helper()
	deadline := time.After(30 * time.Second)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		if _, err := os.Stat(path); err == nil {
			return
		}
		select {
		case <-deadline:
			t.Fatalf("%s does not appear", path)
		case <-tick.C:
		}
	}
}

func TestSetupEndsWithItsContext(t *testing.T) {
	t.Parallel()
	a, dir := newArchive(t), privateDir(t)
	a.put("hang", "")
	ctx, cancel := context.WithCancelCause(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := vmassets.Setup(ctx, a.options(dir))
		done <- err
	}()
	await(t, filepath.Join(a.dir, "hanging"))
	// A second one waits for the first, and can be ended too.
	waiting, stop := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer stop()
	if _, err := vmassets.Setup(waiting, a.options(dir)); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the waiting setup: %v", err)
	}
	why := errors.New("the user said so")
	cancel(why)
	if err := <-done; !errors.Is(err, why) {
		t.Errorf("the error is %v", err)
	}
	pid := strings.TrimSpace(string(readFile(t, filepath.Join(a.dir, "hanging"))))
	if _, err := os.Stat("/proc/" + pid + "/exe"); err == nil {
		t.Errorf("process %s still runs", pid)
	}
	noTemporaries(t, filepath.Join(dir, "kernels"))
}

// TestSetupProcess is not a test: it is the process that the next one kills.
func TestSetupProcess(t *testing.T) {
	dir, path := os.Getenv("VMASSETS_TEST_DIR"), os.Getenv("VMASSETS_TEST_PATH")
	if dir == "" {
		t.Skip("SKIP: only run by TestSetupAfterAKilledOne")
	}
	_, err := vmassets.Setup(t.Context(), vmassets.Options{Dir: dir, Log: slog.New(slog.DiscardHandler), Getenv: env("PATH", path)})
	t.Fatal("it ended by itself:", err)
}

func TestSetupAfterAKilledOne(t *testing.T) {
	t.Parallel()
	a, dir := newArchive(t), privateDir(t)
	a.put("hang", "")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	victim := exec.CommandContext(t.Context(), self, "-test.run=^TestSetupProcess$")
	victim.Env = append(os.Environ(), "VMASSETS_TEST_DIR="+dir, "VMASSETS_TEST_PATH="+filepath.Join(a.dir, "bin"))
	if err := victim.Start(); err != nil {
		t.Fatal(err)
	}
	await(t, filepath.Join(a.dir, "hanging"))
	if err := victim.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := victim.Wait(); err == nil {
		t.Fatal("the killed process ended well")
	}
	orphan := strings.TrimSpace(string(readFile(t, filepath.Join(a.dir, "hanging"))))
	t.Cleanup(func() {
		if err := exec.Command("kill", "-9", orphan).Run(); err != nil {
			t.Log("end the orphaned download:", err)
		}
	})
	left, err := filepath.Glob(filepath.Join(dir, "kernels", ".tmp-*"))
	if err != nil || len(left) == 0 {
		t.Fatalf("the killed process left nothing to clean up: %v", err)
	}
	if err := os.Remove(filepath.Join(a.dir, "hang")); err != nil {
		t.Fatal(err)
	}
	if k, err := a.setup(dir); err != nil || k.Version != "6.9.1-1" {
		t.Errorf("%v, %v", k, err)
	}
	noTemporaries(t, filepath.Join(dir, "kernels"))
}
