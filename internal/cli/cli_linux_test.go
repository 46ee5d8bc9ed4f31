package cli_test

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/cli"
	roots "github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/proc"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/vmtest"
)

// host is a user's machine with the command line on it; its VMs are fakes, which
// run programs here.
type host struct {
	t   *testing.T
	dir string
	env map[string]string
}

func newHost(t *testing.T) *host {
	t.Helper()
	dir := vmtest.ShortDir(t)
	h := &host{t: t, dir: dir, env: map[string]string{
		"III_SANDBOX_CACHE_DIR": dir + "/c", "III_SANDBOX_DATA_DIR": dir + "/d",
		"III_SANDBOX_STATE_DIR": dir + "/s", "III_SANDBOX_RUN_DIR": dir + "/r",
		"HOME": dir,
	}}
	h.addImage("python")
	return h
}

// addImage puts a tiny image into the folder of layouts.
func (h *host) addImage(name string) {
	h.t.Helper()
	var content bytes.Buffer
	w := tar.NewWriter(&content)
	if err := w.WriteHeader(&tar.Header{Name: "etc/", Typeflag: tar.TypeDir, Mode: 0o755}); err != nil {
		h.t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		h.t.Fatal(err)
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(content.Bytes())), nil
	})
	if err != nil {
		h.t.Fatal(err)
	}
	image, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		h.t.Fatal(err)
	}
	image, err = mutate.ConfigFile(image, &v1.ConfigFile{
		Architecture: "amd64", OS: "linux", RootFS: mustConfig(h.t, image).RootFS,
		Config: v1.Config{Env: []string{"FROM_IMAGE=yes", "not an entry", "=no key", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}},
	})
	if err != nil {
		h.t.Fatal(err)
	}
	path, err := layout.Write(filepath.Join(h.dir, "d", "images", name), empty.Index)
	if err != nil {
		h.t.Fatal(err)
	}
	if err := path.AppendImage(image, layout.WithPlatform(v1.Platform{OS: "linux", Architecture: "amd64"})); err != nil {
		h.t.Fatal(err)
	}
}

func mustConfig(t *testing.T, image v1.Image) *v1.ConfigFile {
	t.Helper()
	config, err := image.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	return config
}

// result is what one command line left.
type result struct {
	code           int
	stdout, stderr string
}

// buffer is a bytes.Buffer for several goroutines.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// adapter runs one command line with stdin as standard input.
func (h *host) adapter(stdin string, args ...string) result {
	h.t.Helper()
	in := filepath.Join(h.t.TempDir(), "stdin")
	if err := os.WriteFile(in, []byte(stdin), 0o600); err != nil {
		h.t.Fatal(err)
	}
	file, err := os.Open(in)
	if err != nil {
		h.t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	var stdout, stderr buffer
	app := &cli.App{
		Version: "test", Stdin: file, Stdout: &stdout, Stderr: &stderr,
		Terminal: func(any) bool { return false },
		Getenv:   func(key string) string { return h.env[key] },
		NewDriver: func(vmm string, _ roots.Roots, log *slog.Logger) (vm.Driver, error) {
			return &vmtest.Fake{Log: log}, nil
		},
	}
	code := app.Execute(context.Background(), args)
	return result{code, stdout.String(), stderr.String()}
}

// want checks a result; stderr need only contain its part.
func (r result) want(t *testing.T, code int, stdout, stderr string) {
	t.Helper()
	if r.code != code || r.stdout != stdout || !strings.Contains(r.stderr, stderr) {
		t.Errorf("exit %d, stdout %q, stderr %q; want %d, %q, %q", r.code, r.stdout, r.stderr, code, stdout, stderr)
	}
}

// empty checks that no machine is left.
func (h *host) empty() {
	h.t.Helper()
	for _, pattern := range []string{"s/machines/*", "r/*.sock"} {
		left, err := filepath.Glob(filepath.Join(h.dir, pattern))
		if err != nil || len(left) > 0 {
			h.t.Errorf("left behind: %v (%v)", left, err)
		}
	}
}

func TestRun_CommandOfTheImage(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	defer h.empty()
	for _, test := range []struct {
		name, script   string
		code           int
		stdout, stderr string
	}{
		{"output and code", "echo out; echo err >&2; exit 7", 7, "out\n", "err\n"},
		{"stdin", "cat", 0, "given\n", ""},
		{"signal", "kill -9 $$", 137, "", ""},
		{"environment", "echo $FROM_IMAGE $FROM_FLAG $MINE", 0, "yes flag mine\n", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			h.env["MINE"] = "mine"
			r := h.adapter("given\n", "run", "--image", "python", "-e", "FROM_FLAG=flag", "-e", "MINE", "-e", "NOT_SET", "--", "sh", "-c", test.script)
			r.want(t, test.code, test.stdout, test.stderr)
		})
	}
	h.adapter("", "run", "--image", "python", "--", "/no/such/program").want(t, 127, "", "exec: /no/such/program: not found\n")
	h.adapter("", "run", "--image", "python", "--", "/etc/passwd").want(t, 126, "", "exec: /etc/passwd: permission denied\n")
	script := filepath.Join(h.dir, "script")
	if err := proc.WriteProgram(script, []byte("echo no first line")); err != nil {
		t.Fatal(err)
	}
	h.adapter("", "run", "--image", "python", "--", script).want(t, 125, "", "adapter: the program was not started: ")
	h.adapter("", "run", "--image", "python", "--timeout", "200ms", "--", "sleep", "60").want(t, 124, "", "time limit of 200 ms")
}

// The code's path in the guest is fixed, and the fake's guest is this host: one
// test alone writes there.
func TestRun_Code(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	defer h.empty()
	file := filepath.Join(t.TempDir(), "hello.sh")
	if err := os.WriteFile(file, []byte("echo file $1 $2; cat"), 0o600); err != nil {
		t.Fatal(err)
	}
	h.adapter("in", "run", "--image", "python", "--lang", "sh", "-c", "echo code $1; cat", "one").want(t, 0, "code one\nin", "")
	h.adapter("in", "run", "--image", "python", file, "a", "--b").want(t, 0, "file a --b\nin", "")
	h.adapter("echo stdin; cat", "run", "--image", "python", "--lang", "shell").want(t, 0, "stdin\n", "")
	h.adapter("echo dash $1", "run", "--image", "python", "--lang", "shell", "-", "x").want(t, 0, "dash x\n", "")

	r := h.adapter("", "run", "--image", "python", "--lang", "sh", "--json", "-c", `printf 'a\377b'; echo e >&2; exit 3`)
	var reply map[string]any
	if err := json.Unmarshal([]byte(r.stdout), &reply); err != nil {
		t.Fatalf("%v in %q", err, r.stdout)
	}
	for key, want := range map[string]any{
		"stdout": "a\uFFFDb", "stderr": "e\n", "exit_code": 3.0, "success": false, "timed_out": false,
		"stdout_truncated": false, "stderr_truncated": false,
	} {
		if reply[key] != want {
			t.Errorf("%s is %v, want %v", key, reply[key], want)
		}
	}
	if _, ok := reply["duration_ms"].(float64); !ok || r.code != 3 || r.stderr != "" {
		t.Errorf("reply %v, code %d, stderr %q", reply, r.code, r.stderr)
	}
}

func TestRun_JSONOfAnErrorIsTheEnvelope(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	defer h.empty()
	for _, test := range []struct {
		args       []string
		exit       int
		code, step string
	}{
		{[]string{"--image", "nope", "-c", "x"}, 125, "S100", "create"},
		{[]string{"--image", "python", "--memory", "3", "-c", "x"}, 125, "S001", "create"},
		{[]string{"--image", "python", "--keep", "--name", "a\nb", "-c", "x"}, 125, "S001", "create"},
		{[]string{"--image", "python", "/no/such/file.py"}, 125, "S300", "create"},
		{[]string{"--image", "python", "--timeout", "100ms", "--", "sleep", "60"}, 124, "S200", "exec"},
	} {
		r := h.adapter("", append([]string{"run", "--json"}, test.args...)...)
		var envelope struct {
			Code string
			Fix  map[string]string
		}
		if err := json.Unmarshal([]byte(r.stdout), &envelope); err != nil {
			t.Fatalf("%v in %q", err, r.stdout)
		}
		if r.code != test.exit || envelope.Code != test.code || envelope.Fix["context"] != "during sandbox::run step `"+test.step+"`" {
			t.Errorf("%v: exit %d, %+v", test.args, r.code, envelope)
		}
	}
}

func TestKeep_ExecLsStop(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	defer h.empty()
	h.adapter("", "run", "--image", "python", "--keep", "--name", "one", "--", "sh", "-c", "echo hi; exit 4").want(t, 4, "hi\n", "is kept")
	var kept []vm.Record
	if r := h.adapter("", "ls", "--json"); r.code != 0 || json.Unmarshal([]byte(r.stdout), &kept) != nil || len(kept) != 1 {
		t.Fatalf("ls: %+v", r)
	}
	id := kept[0].ID
	if r := h.adapter("", "ls"); !strings.Contains(r.stdout, id) || !strings.Contains(r.stdout, "one") || !strings.Contains(r.stdout, "512 MiB") {
		t.Errorf("ls prints %q", r.stdout)
	}
	h.adapter("", "ls", "-q").want(t, 0, id+"\n", "")
	for _, key := range []string{id, id[:6], "one"} {
		h.adapter("text", "exec", "-e", "A=b", "-w", "/etc", key, "sh", "-c", "echo $A $PWD; cat; exit 9").want(t, 9, "b /etc\ntext", "")
	}
	h.adapter("", "exec", "one", "--", "echo", "-n", "dashes").want(t, 0, "dashes", "")
	h.adapter("", "exec", "--timeout", "200ms", "one", "sleep", "60").want(t, 124, "", "time limit")
	h.adapter("", "exec", "two", "true").want(t, 125, "", "two")
	h.adapter("", "stop", "two", "one").want(t, 1, "one\n", "stop two: ")
	h.adapter("", "stop", "one").want(t, 1, "", "S002")
	h.adapter("", "ls", "--json").want(t, 0, "[]\n", "")
	h.adapter("", "stop", "--all").want(t, 0, "", "")
}

func TestUsage(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	defer h.empty()
	for _, test := range []struct {
		args   []string
		code   int
		stderr string
	}{
		{[]string{"bogus"}, 2, `unknown command "bogus"`},
		{[]string{"runn"}, 2, "did you mean run?"},
		{[]string{"image", "bogus"}, 2, `unknown command "bogus": see adapter image --help`},
		{[]string{"vmm", "set-up"}, 2, "did you mean setup?"},
		{[]string{"completion", "bogus"}, 2, `unknown command "bogus"`},
		{[]string{"run", "--image", "python", "--cpus", "0", "-c", "x"}, 2, "at least 1"},
		{[]string{"run", "-c", "x"}, 2, "--image is missing"},
		{[]string{"--vmm", "bogus", "ls"}, 2, "use auto, libkrun or qemu"},
		{[]string{"image", "rm", "bogus.example/x"}, 1, "see adapter image ls"},
		{[]string{"run", "--image", "python", "--bogus"}, 2, "unknown flag: --bogus"},
		{[]string{"run", "--image", "python", "--memory", "1k", "-c", "x"}, 2, "write MiB as in 512"},
		{[]string{"run", "--image", "python", "--memory", "99999999g", "-c", "x"}, 2, "is not a size"},
		{[]string{"run", "--image", "python", "--timeout", "-1s", "-c", "x"}, 2, "is not a time above 0"},
		{[]string{"run", "--image", "python", "--env", "=x", "-c", "x"}, 2, "write KEY=value"},
		{[]string{"run", "--image", "python", "--cpus", "0x", "-c", "x"}, 2, "invalid argument"},
		{[]string{"run", "--image", "python", "--cpus", "300", "-c", "x"}, 125, "cpus is 300"},
		{[]string{"run", "--image", "python", "--memory", "9999g", "-c", "x"}, 125, "(S001)"},
		{[]string{"run", "--image", "python", "--name", "n", "-c", "x"}, 2, "add --keep"},
		{[]string{"run", "--image", "python", "--json", "--tty", "-c", "x"}, 2, "exclude each other"},
		{[]string{"run", "--image", "python", "-c", "x", "--", "ls"}, 2, "exclude each other"},
		{[]string{"run", "--image", "python", "--"}, 2, "no command after --"},
		{[]string{"run", "--image", "python", "/no/such/file.py"}, 125, "no such file or directory: give code with -c"},
		{[]string{"run", "--image", "oci:/no/layout", "-c", "x"}, 2, "--lang"},
		{[]string{"run", "--image", "oci:/no/layout", "--lang", "sh", "-c", "x"}, 125, "/no/layout"},
		{[]string{"run", "--image", "ubuntu", "-c", "x"}, 125, "allowed are python, node"},
		{[]string{"run", "--image", "python", "-t", "--", "ls"}, 2, "needs a terminal"},
		{[]string{"run", "--image", "python", "--allow", "10.0.0.1/8", "-c", "x"}, 2, "write 10.0.0.0/8"},
		{[]string{"run", "--image", "python", "--allow", "example.com:http", "-c", "x"}, 2, `"http" is not a port`},
		{[]string{"run", "--image", "python", "--allow", "127.0.0.1", "-c", "x"}, 2, "III_SANDBOX_HOST_PORTS"},
		{[]string{"run", "--image", "python", "--allow", "example.com:", "-c", "x"}, 2, `"" is not a port`},
		{[]string{"run", "--image", "python", "--allow", "[2001:db8::1]:", "-c", "x"}, 2, `"" is not a port`},
		{[]string{"run", "--image", "python", "--allow", "[2001:db8::1", "-c", "x"}, 2, "not a DNS name"},
		{[]string{"run", "--image", "python", "--allow", "[2001:db8::1]443", "-c", "x"}, 2, "not a DNS name"},
		{[]string{"run", "--image", "python", "--allow", "[2001:db8::1]:x", "-c", "x"}, 2, `"x" is not a port`},
		{[]string{"run", "--image", "python", "--publish", "x:80", "-c", "x"}, 2, "8080:80"},
		{[]string{"run", "--image", "python", "--publish", "80:", "-c", "x"}, 2, "8080:80"},
		{[]string{"exec", "-t", "x", "ls"}, 2, "needs a terminal"},
		{[]string{"exec", "x"}, 2, "name a sandbox and a command"},
		{[]string{"stop"}, 2, "--all"},
		{[]string{"stop", "x", "--all"}, 2, "--all"},
		{[]string{"ls", "x"}, 2, "takes no arguments"},
		{[]string{"image", "pull"}, 2, "name an image"},
		{[]string{"image", "rm", "python"}, 1, "python"},
	} {
		h.adapter("", test.args...).want(t, test.code, "", test.stderr)
	}
}

func TestImage_PullLsRmGC(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	pulled := h.adapter("", "image", "pull", "python")
	digest := strings.TrimSpace(pulled.stdout)
	if pulled.code != 0 || !strings.HasPrefix(digest, "sha256:") {
		t.Fatalf("pull: %+v", pulled)
	}
	if r := h.adapter("", "image", "ls"); !strings.Contains(r.stdout, digest[:19]) || !strings.Contains(r.stdout, "\npython  oci:") || r.code != 0 {
		t.Errorf("ls: %+v", r)
	}
	h.adapter("", "image", "gc").want(t, 0, "removed 0 images, freed 0.0 MiB\n", "")
	// A child that another test forks holds our locks until it runs its program.
	vmtest.Eventually(t, patience, "removal", func() bool { return h.adapter("", "image", "rm", digest).code == 0 })
	if r := h.adapter("", "image", "pull", "python"); r.code != 0 {
		t.Fatalf("pull: %+v", r)
	}
	vmtest.Eventually(t, patience, "removal by name", func() bool { return h.adapter("", "image", "rm", "python").code == 0 })
	h.adapter("", "image", "ls", "--json").want(t, 0, "[]\n", "")
}

func TestLocalLayoutIsAnImage(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	defer h.empty()
	h.addImage("tools")
	h.adapter("", "run", "--image", "tools", "--", "echo", "hi").want(t, 0, "hi\n", "")
	h.adapter("", "run", "--image", "oci:"+h.dir+"/d/images/tools", "--", "echo", "hi").want(t, 0, "hi\n", "")
}

func TestCompletion(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.addImage("tools")
	if r := h.adapter("", "__complete", "run", "--image", ""); !strings.Contains(r.stdout, "python\nnode\ntools\n") {
		t.Errorf("images: %q", r.stdout)
	}
	if r := h.adapter("", "completion", "bash"); r.code != 0 || !strings.Contains(r.stdout, "adapter") {
		t.Errorf("completion: exit %d", r.code)
	}
}

func TestDoctor_FailsWhereNothingCanBoot(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	r := h.adapter("", "doctor")
	if r.code != 1 || !strings.Contains(r.stdout, "FAIL  guest kernel: ") || !strings.Contains(r.stdout, "adapter vmm setup") {
		t.Errorf("%+v", r)
	}
	h.env["III_SANDBOX_VMM"] = "bogus"
	if r := h.adapter("", "doctor"); r.code != 1 || !strings.Contains(r.stdout, `FAIL  III_SANDBOX_VMM: "bogus" is unknown`) {
		t.Errorf("%+v", r)
	}
	delete(h.env, "III_SANDBOX_VMM")
	var findings []map[string]any
	if r := h.adapter("", "doctor", "--json"); json.Unmarshal([]byte(r.stdout), &findings) != nil || len(findings) < 5 {
		t.Errorf("%+v", r)
	}
}

func TestDoctor_BootsAVM(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	if r := h.adapter("", "doctor", "--boot"); !strings.Contains(r.stdout, "\nok    boot: a VM was up after ") {
		t.Errorf("a VM that boots: %+v", r)
	}
	h.empty()
	// Directories that cannot be made: there can be no VM.
	h.env["III_SANDBOX_RUN_DIR"] = "/proc/none"
	r := h.adapter("", "doctor", "--boot")
	if r.code != 1 || !strings.Contains(r.stdout, "\nFAIL  boot: ") || !strings.Contains(r.stdout, "/proc/none") {
		t.Errorf("a VM that cannot be: %+v", r)
	}
}

func TestRun_Network(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	defer h.empty()
	h.env["III_SANDBOX_HOST_PORTS"] = "8000, 5432"
	const show = "echo $U"
	for _, flag := range []string{"--network", "--net", "--allow=example.com:443", "--publish=80"} {
		h.adapter("", "run", "--image", "python", flag, "-e", "U=http://localhost:8000", "--", "sh", "-c", show).want(t, 0, "http://198.18.0.1:8000\n", "")
	}
	h.adapter("", "run", "--image", "python", "-e", "U=http://localhost:8000", "--", "sh", "-c", show).want(t, 0, "http://localhost:8000\n", "")
	h.adapter("", "run", "--image", "python", "--publish", "80", "--", "true").want(t, 0, "", "leads to port 80 of the sandbox")
	for _, rule := range []string{"10.0.0.0/8", "10.0.0.0/8:443", "203.0.113.7:80-90", "[2001:db8::/32]:443", "2001:db8::1", "*.example.com", "example.com:8000-8100"} {
		h.adapter("", "run", "--image", "python", "--allow", rule, "--", "true").want(t, 0, "", "")
	}
	h.env["III_SANDBOX_HOST_PORTS"] = "http"
	h.adapter("", "run", "--image", "python", "--net", "--", "true").want(t, 125, "", "III_SANDBOX_HOST_PORTS")
}
