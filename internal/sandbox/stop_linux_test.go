package sandbox_test

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	shimv1 "github.com/iii-hq/workers/sandbox-libkrun/api/shim/v1"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/sandbox"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/vmtest"
)

// kill ends a sandbox's VM behind the Manager's back.
func (h *host) kill(t testing.TB, id string) {
	t.Helper()
	socket := h.Roots.Machine(id).Socket
	conn, err := grpc.NewClient("passthrough:///"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", socket)
		}))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if _, err := shimv1.NewShimServiceClient(conn).Kill(h.Context(t), &shimv1.KillRequest{}); err != nil {
		t.Fatal(err)
	}
}

// Semantics 5.5, 12 #23.
func TestStop(t *testing.T) {
	t.Parallel()
	for _, wait := range []bool{true, false} {
		h := newHost(t, &vmtest.Fake{}, func(c *sandbox.Config) { c.MaxSandboxes = 1 })
		id := create(t, h.Manager)
		release := h.hold(t, id)
		if got, err := h.Stop(t.Context(), id, wait); err != nil || got != id {
			t.Fatalf("wait %v: %q, %v", wait, got, err)
		}
		h.CheckGone(t, id)
		err := release()
		wantCode(t, err, fault.S300, id, "was stopped")
		_, err = h.Stop(t.Context(), id, wait)
		wantCode(t, err, fault.S002)
		_, err = h.Exec(t.Context(), shell(id, "true"))
		wantCode(t, err, fault.S002)
		if list := h.List(); len(list) != 0 {
			t.Errorf("still listed: %+v", list)
		}
		create(t, h.Manager) // its slot is free
	}
}

func TestStop_ManyAtOnce(t *testing.T) {
	t.Parallel()
	h := newHost(t, &vmtest.Fake{}, nil)
	id := create(t, h.Manager)
	var stops sync.WaitGroup
	for i := range 10 {
		stops.Go(func() {
			if _, err := h.Stop(context.Background(), id, i%2 == 0); err != nil && !errors.Is(err, fault.S002) {
				t.Errorf("stop: %v", err)
			}
		})
	}
	stops.Wait()
	h.CheckGone(t, id)
}

func TestVM_ThatEndsByItselfIsNoticed(t *testing.T) {
	t.Parallel()
	h := newHost(t, &vmtest.Fake{}, func(c *sandbox.Config) { c.MaxSandboxes = 1 })
	id := create(t, h.Manager)
	release := h.hold(t, id)
	h.kill(t, id)
	// The call in flight learns why, with the end of the console.
	vmtest.Eventually(t, patience, "the end of the sandbox", func() bool { return len(h.List()) == 0 })
	wantCode(t, release(), fault.S300, "vm "+id+" ended", "killed", "fake: serve")
	h.CheckGone(t, id)
	// So do later calls, though the sandbox is gone like any other.
	for name, call := range map[string]func() error{
		"exec": func() error { _, err := h.Exec(t.Context(), shell(id, "true")); return err },
		"stat": func() error { _, err := h.Stat(t.Context(), id, "/"); return err },
		"stop": func() error { _, err := h.Stop(t.Context(), id, true); return err },
	} {
		err := call()
		wantCode(t, err, fault.S002, id, "killed", "fake: serve")
		if note := fault.Of(err).FixNote; !strings.Contains(note, "create") {
			t.Errorf("%s: note %q", name, note)
		}
	}
	create(t, h.Manager)
}

func TestList_IsByCreation(t *testing.T) {
	t.Parallel()
	h := newHost(t, &vmtest.Fake{}, nil)
	if list := h.List(); list == nil || len(list) != 0 {
		t.Errorf("an empty registry: %#v", list)
	}
	var want []string
	for i := range 5 {
		req := sandbox.CreateRequest{Image: "python"}
		if i == 2 {
			req.Name = new("same\nname")
		}
		made, err := h.Create(t.Context(), req)
		if err != nil || made.Image != "python" {
			t.Fatal(made, err)
		}
		want = append(want, made.SandboxID)
	}
	for i, s := range h.List() {
		if s.SandboxID != want[i] || s.Image != "python" || s.Stopped || s.ExecInFlight != 0 || s.ExecSlotsFree != 4 {
			t.Errorf("%d: %+v", i, s)
		}
		if (s.Name != nil) != (i == 2) || i == 2 && *s.Name != "same\nname" {
			t.Errorf("%d: name %v", i, s.Name)
		}
	}
}
