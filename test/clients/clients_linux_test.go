package clients_test

import (
	"bufio"
	"bytes"
	"context"
	_ "embed"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/vmtest"
	"github.com/iii-hq/workers/sandbox-libkrun/test/nodesdk"
	"github.com/iii-hq/workers/sandbox-libkrun/test/pythonsdk"
	"github.com/iii-hq/workers/sandbox-libkrun/test/rustsdk"
	"github.com/iii-hq/workers/sandbox-libkrun/test/sdk"
)

//go:embed functions.mjs
var nodeScript string

//go:embed functions.py
var pythonScript string

// patience bounds each step: a build, a client's run.
const patience = 5 * time.Minute

// configuration is the adapter's entry. Two sandboxes and one program in each
// make the limits easy to meet.
const configuration = `{
	"image_allowlist": ["busybox"],
	"custom_images": {"busybox": "registry.invalid/busybox:1"},
	"max_concurrent_sandboxes": 2,
	"max_concurrent_exec_per_sandbox": 1,
	"default_memory_mb": 256
}`

// TestClientsUseEveryFunction has clients of one language after the other use the
// same adapter. The last ends with a sandbox still there, which has to go with it.
func TestClientsUseEveryFunction(t *testing.T) {
	t.Parallel()
	machine := vmtest.QEMU(t)
	dir := t.TempDir()
	build(t, dir, "./cmd/adapter", "./test/cmd/engine")
	entry := filepath.Join(dir, "configuration.json")
	if err := os.WriteFile(entry, []byte(configuration), 0o600); err != nil {
		t.Fatal(err)
	}
	mark := "mark-" + uuid.NewString()

	engine := start(t, filepath.Join(dir, "engine"), os.Environ(), "--verbose", "--port", "0", "--config", "sandbox-libkrun="+entry)
	line, err := bufio.NewReader(engine.stdout).ReadString('\n')
	if err != nil {
		t.Fatalf("%v: %s", err, &engine.stderr)
	}
	url := strings.TrimPrefix(strings.TrimSpace(line), "listening on ")
	roots := machine.Roots(t)
	adapter := start(t, filepath.Join(dir, "adapter"), environment(t, machine, roots, url), "serve", "--verbose")
	awaitRegistered(t, url, adapter)

	variables := []string{"III_URL=" + url, "IMAGE=busybox", "MARK=" + mark}
	t.Run("python", func(t *testing.T) {
		run(t, pythonsdk.Command(pythonsdk.Install(t), pythonScript, variables...))
	})
	t.Run("rust", func(t *testing.T) {
		run(t, rustsdk.Command(rustsdk.Install(t), variables...))
	})
	t.Run("node", func(t *testing.T) {
		run(t, nodesdk.Command(nodesdk.Install(t), nodeScript, variables...))
	})

	adapter.end(t)
	engine.end(t)
	(&vmtest.Env{Roots: roots}).CheckEmpty(t)
	for name, log := range map[string]string{"adapter": adapter.stderr.String(), "engine": engine.stderr.String()} {
		if strings.Contains(log, mark) {
			t.Errorf("the log of the %s has what a call carried", name)
		}
	}
	if !strings.Contains(adapter.stderr.String(), "function=sandbox-libkrun::fs::write") {
		t.Errorf("the adapter did not log its calls: %s", &adapter.stderr)
	}
}

// run runs a client to its end.
func run(t *testing.T, client *exec.Cmd) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	sdk.Run(ctx, t, client)
}

// environment is the adapter's.
func environment(t *testing.T, machine *vmtest.Host, roots layout.Roots, url string) []string {
	t.Helper()
	user, err := layout.FromEnvironment(os.Getenv)
	if err != nil {
		t.Fatal(err)
	}
	layouts := os.Getenv("III_SANDBOX_IMAGE_DIR")
	if layouts == "" {
		layouts = user.ImageLayouts()
	}
	return append(os.Environ(), "III_URL="+url, "III_SANDBOX_VMM=qemu", "III_SANDBOX_IMAGE_DIR="+layouts,
		"III_KRUN_SHIM="+machine.Shim, "III_GUEST_AGENT="+machine.Agent, "III_SANDBOX_CACHE_DIR="+roots.Cache,
		"III_SANDBOX_DATA_DIR="+roots.Data, "III_SANDBOX_STATE_DIR="+roots.State, "III_SANDBOX_RUN_DIR="+roots.Run)
}

// build makes programs of this tree.
func build(t *testing.T, dir string, packages ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, "go", append([]string{"build", "-tags", "grpcnotrace", "-o", dir + "/"}, packages...)...)
	cmd.Dir = "../.."
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

// awaitRegistered waits until the adapter answers a call. Calls of what is not
// there yet are refused at once.
func awaitRegistered(t *testing.T, url string, adapter *process) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	client, err := iii.Open(iii.Options{URL: url, Name: "waits", Log: vmtest.Logger(t)})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = client.Close(ctx) }()
	vmtest.Eventually(t, time.Minute, "the adapter's functions", func() bool {
		select {
		case <-adapter.done:
			t.Fatalf("the adapter ended: %s", &adapter.stderr)
		default:
		}
		_, err = client.Invoke(ctx, iii.Request{Function: "sandbox-libkrun::adapter::info"})
		return err == nil
	})
}

// process is a program that runs until end, or at the latest the test's end.
type process struct {
	cmd    *exec.Cmd
	stdout *os.File
	stderr buffer
	done   chan struct{}
	err    error // of its end, valid once done is closed
}

func start(t *testing.T, program string, env []string, args ...string) *process {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	p := &process{cmd: exec.Command(program, args...), stdout: r, done: make(chan struct{})}
	p.cmd.Env, p.cmd.Stdout, p.cmd.Stderr = env, w, &p.stderr
	err = p.cmd.Start()
	_ = w.Close()
	if err != nil {
		_ = r.Close()
		t.Fatal(err)
	}
	go func() {
		p.err = p.cmd.Wait()
		close(p.done)
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		<-p.done
		_ = r.Close()
		if t.Failed() {
			t.Logf("%s:\n%s", filepath.Base(program), &p.stderr)
		}
	})
	return p
}

// end asks the program to end, as Compose does, which gives it ten seconds.
func (p *process) end(t *testing.T) {
	t.Helper()
	began := time.Now()
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Error(err)
	}
	select {
	case <-p.done:
	case <-time.After(time.Minute):
		t.Fatalf("%s does not end: %s", p.cmd.Path, &p.stderr)
	}
	t.Logf("%s ended within %v", filepath.Base(p.cmd.Path), time.Since(began).Round(time.Millisecond))
	if p.err != nil {
		t.Errorf("%s: %v", p.cmd.Path, p.err)
	}
}

// buffer collects what a program prints.
type buffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}
