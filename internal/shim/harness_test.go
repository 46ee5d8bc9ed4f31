package shim_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	shimv1 "github.com/iii-hq/workers/sandbox-libkrun/api/shim/v1"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/shim"
)

// patience bounds every wait: far more than a busy host needs.
const patience = 60 * time.Second

const token = "00112233445566778899aabbccddeeff"

// vm is a shim in this process with a fake machine behind it.
type vm struct {
	t        *testing.T
	spec     *bootspec.Spec
	machine  *machine
	log      *lockedBuffer
	lifeline *os.File
	lock     *os.File
	kill     context.CancelCauseFunc
	done     chan struct{}
	end      bootspec.End // valid once done is closed
	console  *lockedBuffer
	// clockMoved is Options.ClockMoved.
	clockMoved <-chan struct{}
}

// newVM makes spec and machine; the test may change them before start.
func newVM(t *testing.T) *vm {
	t.Helper()
	// Not t.TempDir: a socket's path must be short.
	dir, err := os.MkdirTemp("/tmp", "shimtest-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	v := &vm{t: t, log: &lockedBuffer{}, console: &lockedBuffer{}, done: make(chan struct{})}
	v.spec = &bootspec.Spec{
		Version: bootspec.Version, ID: "vm-1", VMM: bootspec.Libkrun, Lifetime: bootspec.Detached,
		Dir: filepath.Join(dir, "machine"), Socket: filepath.Join(dir, "run", "vm-1.sock"),
		CPUs: 1, MemoryMiB: 64,
		Lower: bootspec.Disk{Path: filepath.Join(dir, "lower"), ReadOnly: true},
		Upper: bootspec.Disk{Path: filepath.Join(dir, "upper")},
		Guest: bootspec.Guest{Version: bootspec.Version, Token: token, Hostname: "box", Env: []string{"SECRET=swordfish"}},
	}
	if err := os.Mkdir(v.spec.Dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, disk := range []string{v.spec.Lower.Path, v.spec.Upper.Path} {
		if err := os.WriteFile(disk, make([]byte, 4096), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	v.machine = newMachine()
	return v
}

// start runs the shim and waits until it listens, or has ended.
func (v *vm) start() *vm {
	v.t.Helper()
	lifelineR, lifelineW, err := os.Pipe()
	if err != nil {
		v.t.Fatal(err)
	}
	v.lifeline = lifelineW
	readyR, readyW, err := os.Pipe()
	if err != nil {
		v.t.Fatal(err)
	}
	ctx, kill := context.WithCancelCause(context.Background())
	v.kill = kill
	go func() {
		defer close(v.done)
		v.end = shim.Run(ctx, v.spec, shim.Options{
			Hypervisor: v.machine, Version: "test",
			Log:    slog.New(slog.NewTextHandler(v.log, nil)),
			VMMLog: v.log, Console: v.console,
			Lifeline: lifelineR, Ready: readyW, Lock: v.lock, ClockMoved: v.clockMoved,
		})
	}()
	v.t.Cleanup(func() {
		kill(errors.New("the test is over"))
		v.wait()
		_ = lifelineW.Close()
		_ = readyR.Close()
	})
	if _, err := readyR.Read(make([]byte, 1)); err != nil && !errors.Is(err, io.EOF) {
		v.t.Fatal(err)
	}
	return v
}

// wait waits for the end; v.end is then valid.
func (v *vm) wait() {
	v.t.Helper()
	select {
	case <-v.done:
	case <-time.After(patience):
		v.t.Fatal("the shim did not end")
	}
}

// client is a connection to the socket, closed at the test's end.
func (v *vm) client() *grpc.ClientConn {
	v.t.Helper()
	conn, err := grpc.NewClient("passthrough:///shim",
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", v.spec.Socket)
		}),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		v.t.Fatal(err)
	}
	v.t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func (v *vm) control() shimv1.ShimServiceClient { return shimv1.NewShimServiceClient(v.client()) }

func (v *vm) context() context.Context {
	ctx, cancel := context.WithTimeout(v.t.Context(), patience)
	v.t.Cleanup(cancel)
	return ctx
}

// until polls the status until ok.
func (v *vm) until(what string, ok func(*shimv1.StatusResponse) bool) *shimv1.StatusResponse {
	v.t.Helper()
	control, ctx := v.control(), v.context()
	for {
		status, err := control.Status(ctx, &shimv1.StatusRequest{})
		if err != nil {
			v.t.Fatalf("waiting until %s: %v", what, err)
		}
		if ok(status) {
			return status
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-ctx.Done():
			v.t.Fatalf("waiting until %s: %v", what, status)
		}
	}
}

func running(s *shimv1.StatusResponse) bool { return s.GetState() == shimv1.State_STATE_RUNNING }

func (v *vm) expectEnd(class bootspec.EndClass, message string) {
	v.t.Helper()
	v.wait()
	end := v.end
	if end.Class != class || !strings.Contains(end.Message, message) {
		v.t.Errorf("the end is %v, want %s with %q", end, class, message)
	}
}

// reported is the end as the machine directory has it.
func (v *vm) reported() bootspec.End {
	v.t.Helper()
	body, err := os.ReadFile(filepath.Join(v.spec.Dir, "end.json"))
	if err != nil {
		v.t.Fatal(err)
	}
	var end bootspec.End
	if err := json.Unmarshal(body, &end); err != nil {
		v.t.Fatal(err)
	}
	return end
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// lockedBuffer is a bytes.Buffer for several goroutines.
type lockedBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}
