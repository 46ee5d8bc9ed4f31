// Package nodesdk runs Node programs that use the iii-sdk of npm, at the versions
// of package-lock.json: real clients, for tests of the engine in memory, of our
// own client and of the adapter.
package nodesdk

import (
	"bytes"
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/flock"
)

//go:embed package.json
var manifest []byte

//go:embed package-lock.json
var lockfile []byte

//go:embed worker.mjs
var workerScript string

// installTimeout bounds the download of the packages.
const installTimeout = 5 * time.Minute

// require is the variable that makes it a failure, where it is "1", when the
// packages cannot be installed or there is no Node.
const require = "III_TEST_NODE"

// Install is Prepare for a test, which it skips where Prepare fails.
func Install(t testing.TB) string {
	t.Helper()
	dir, err := Prepare(t.Context())
	if err != nil {
		if os.Getenv(require) == "1" {
			t.Fatalf("%s=1, but: %v", require, err)
		}
		t.Skipf("SKIPPED: the iii-sdk of npm: %v", err)
	}
	return dir
}

// Prepare returns a directory whose node_modules has the packages, downloaded once
// into .cache/node of the project. It fails without node or npm, and when the
// download does.
func Prepare(ctx context.Context) (string, error) {
	for _, program := range []string{"node", "npm"} {
		if _, err := exec.LookPath(program); err != nil {
			return "", fmt.Errorf("%s is not installed", program)
		}
	}
	top, err := topDir()
	if err != nil {
		return "", err
	}
	cache := filepath.Join(top, ".cache", "node")
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return "", err
	}
	sum := sha256.Sum256(lockfile)
	dir := filepath.Join(cache, hex.EncodeToString(sum[:8]))
	ctx, cancel := context.WithTimeout(ctx, installTimeout)
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
	return dir, download(ctx, dir, filepath.Join(cache, "npm"))
}

// download fills dir, which appears whole or not at all.
func download(ctx context.Context, dir, npmCache string) error {
	part := dir + ".part"
	if err := os.RemoveAll(part); err != nil {
		return err
	}
	if err := os.Mkdir(part, 0o755); err != nil {
		return err
	}
	for name, text := range map[string][]byte{"package.json": manifest, "package-lock.json": lockfile} {
		if err := os.WriteFile(filepath.Join(part, name), text, 0o644); err != nil {
			return err
		}
	}
	npm := exec.CommandContext(ctx, "npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--cache", npmCache)
	npm.Dir = part
	if out, err := npm.CombinedOutput(); err != nil {
		return fmt.Errorf("npm ci: %w\n%s", err, out)
	}
	return os.Rename(part, dir)
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

// Command makes a Node program of the text of a module, which may import the
// packages of dir. Its environment is PATH, HOME and env. The caller starts it.
func Command(dir, script string, env ...string) *exec.Cmd {
	cmd := exec.Command("node", "--input-type=module", "--eval", script)
	cmd.Dir = dir
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + dir}, env...)
	return cmd
}

// Worker makes the program of StartWorker. It ends when its standard input does.
func Worker(dir, url, name string) *exec.Cmd {
	return Command(dir, workerScript, "III_URL="+url, "III_WORKER_NAME="+name)
}

// Run runs a program of Command to its end, at the latest that of ctx. What it
// prints goes to the test's log; the test fails when the program does.
func Run(ctx context.Context, t testing.TB, script string, env ...string) {
	t.Helper()
	cmd := Command(Install(t), script, env...)
	cmd.Stdout, cmd.Stderr = t.Output(), t.Output()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })()
	if err := cmd.Wait(); err != nil {
		t.Errorf("the node program: %v", errors.Join(err, ctx.Err()))
	}
}

// StartWorker starts a Node process that connects to the engine at url as the
// worker called name. It offers the functions that worker.mjs describes, each
// below name: "NAME::call" calls any function as Node sees it, "NAME::push" and
// "NAME::pull" do so with a channel for an upload or a download. It ends with the
// test, which fails if it ended before. What it prints goes to the test's log.
func StartWorker(t testing.TB, url, name string) {
	t.Helper()
	cmd := Worker(Install(t), url, name)
	output := &lockedBuffer{}
	cmd.Stdout, cmd.Stderr = output, output
	// It ends when its standard input does: with this process, at the latest.
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var exit error
	ended := make(chan struct{})
	go func() {
		exit = cmd.Wait()
		close(ended)
	}()
	t.Cleanup(func() {
		defer func() { t.Logf("node worker %s:\n%s", name, output) }()
		select {
		case <-ended:
			t.Errorf("the node worker %s ended early: %v", name, exit)
			return
		default:
		}
		_ = stdin.Close()
		select {
		case <-ended:
			if exit != nil {
				t.Errorf("node worker %s: %v", name, exit)
			}
		case <-time.After(10 * time.Second):
			_ = cmd.Process.Signal(syscall.SIGKILL)
			<-ended
			t.Errorf("the node worker %s did not end", name)
		}
	})
}

// A lockedBuffer collects what a process prints.
type lockedBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

var _ io.Writer = (*lockedBuffer)(nil)

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return strings.TrimSpace(b.text.String())
}
