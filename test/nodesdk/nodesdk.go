// Package nodesdk runs Node programs that use the iii-sdk of npm, at the versions
// of package-lock.json: real clients, for tests of the engine in memory, of our
// own client and of the adapter.
package nodesdk

import (
	"bytes"
	"context"
	_ "embed"
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

	"github.com/iii-hq/workers/sandbox-libkrun/test/sdk"
)

//go:embed package.json
var manifest []byte

//go:embed package-lock.json
var lockfile []byte

//go:embed worker.mjs
var workerScript string

// Install is Prepare for a test, which it skips where Prepare fails, or with
// III_TEST_SDKS=1 lets fail.
func Install(t testing.TB) string {
	t.Helper()
	return sdk.Install(t, "Node", Prepare)
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
	return sdk.Dir(ctx, "node", download, lockfile)
}

// download fills dir.
func download(ctx context.Context, dir string) error {
	for name, text := range map[string][]byte{"package.json": manifest, "package-lock.json": lockfile} {
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o644); err != nil {
			return err
		}
	}
	npm := exec.CommandContext(ctx, "npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--cache", filepath.Join(filepath.Dir(dir), "npm"))
	npm.Dir = dir
	if out, err := npm.CombinedOutput(); err != nil {
		return fmt.Errorf("npm ci: %w\n%s", err, out)
	}
	return nil
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
