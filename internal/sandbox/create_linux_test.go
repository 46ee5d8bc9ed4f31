package sandbox_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/catalog"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/egress"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/sandbox"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/vmtest"
)

// Semantics 12 #8, #9, #10, and the order of DESIGN 4: shape, slot, image, caps,
// network, pull.
func TestCreate_ChecksInOrder(t *testing.T) {
	t.Parallel()
	images := catalog.Config{
		Custom:  map[string]string{"app": "127.0.0.1:1/app:1", "unlisted": "127.0.0.1:1/unlisted:1", "tiny": "127.0.0.1:1/tiny:1"},
		Allowed: []string{"python", "node", "app", "ghost", "tiny"},
		Caps: map[string]catalog.Cap{
			"python": {CPUs: new(uint32(2))}, "app": {MemoryMiB: new(uint32(128))}, "tiny": {CPUs: new(uint32(0)), MemoryMiB: new(uint32(0))},
		},
	}
	full := func(c *sandbox.Config) { c.MaxSandboxes = 0 }
	for _, tt := range []struct {
		name   string
		change func(*sandbox.Config)
		req    sandbox.CreateRequest
		code   fault.Code
		words  []string
	}{
		{"no cpus", full, sandbox.CreateRequest{Image: "ghost", CPUs: new(uint32(0))}, fault.S001, []string{"cpus"}},
		{"too many cpus", nil, sandbox.CreateRequest{Image: "python", CPUs: new(uint32(256))}, fault.S001, []string{"cpus"}},
		{"63 MiB", full, sandbox.CreateRequest{Image: "ghost", MemoryMiB: new(uint32(63))}, fault.S001, []string{"memory_mb"}},
		{"4 PiB", nil, sandbox.CreateRequest{Image: "python", MemoryMiB: new(^uint32(0))}, fault.S001, []string{"memory_mb"}},
		{"long name", nil, sandbox.CreateRequest{Image: "python", Name: new(strings.Repeat("x", 5000))}, fault.S001, []string{"name"}},
		{"bad keys", full, sandbox.CreateRequest{Image: "ghost", Env: sandbox.Env{Map: map[string]string{"a-b": "", "": "", "1x": "", "ok_1": ""}}}, fault.S001, []string{`"a-b"`, `"1x"`, `""`, "[A-Za-z_][A-Za-z0-9_]*"}},
		{"NUL in env", nil, sandbox.CreateRequest{Image: "python", Env: sandbox.Env{List: []string{"A=\x00"}}}, fault.S001, []string{"NUL"}},
		{"huge env", nil, sandbox.CreateRequest{Image: "python", Env: sandbox.Env{List: []string{"A=" + strings.Repeat("x", bootspec.MaxEnv)}}}, fault.S001, []string{"env"}},
		{"full before image", full, sandbox.CreateRequest{Image: "ghost"}, fault.S400, []string{"max_concurrent_sandboxes"}},
		{"unknown", nil, sandbox.CreateRequest{Image: "docker.io/iiidev/python:latest"}, fault.S100, []string{"python, node, app"}},
		{"allowed but unknown", nil, sandbox.CreateRequest{Image: "ghost"}, fault.S100, nil},
		{"known but not allowed", nil, sandbox.CreateRequest{Image: "unlisted"}, fault.S100, nil},
		{"other case", nil, sandbox.CreateRequest{Image: "Python"}, fault.S100, nil},
		{"image before caps", nil, sandbox.CreateRequest{Image: "unlisted", CPUs: new(uint32(64))}, fault.S100, nil},
		{"cpu cap before network", nil, sandbox.CreateRequest{Image: "python", CPUs: new(uint32(3)), Network: true}, fault.S400, []string{"cpus is 3", "2 at most"}},
		{"memory cap and the default", nil, sandbox.CreateRequest{Image: "app"}, fault.S400, []string{"memory_mb is 512", "128 at most"}},
		{"cpus before memory", nil, sandbox.CreateRequest{Image: "tiny"}, fault.S400, []string{"cpus"}},
		{"policy without network", nil, sandbox.CreateRequest{Image: "python", Policy: &egress.Policy{Mode: egress.Open}}, fault.S001, []string{"network_policy", "network:true"}},
		{"ports without network", nil, sandbox.CreateRequest{Image: "python", Publish: []sandbox.PublishedPort{{Guest: 80}}}, fault.S001, []string{"publish", "network:true"}},
		{"policy of another mode", full, sandbox.CreateRequest{Image: "ghost", Network: true, Policy: &egress.Policy{Mode: "ajar"}}, fault.S001, []string{"network_policy.mode"}},
		{"policy is off", nil, sandbox.CreateRequest{Image: "python", Network: true, Policy: &egress.Policy{Mode: egress.Off}}, fault.S001, []string{"network_policy.mode", "leave the network out"}},
		{"policy of nonsense", nil, sandbox.CreateRequest{Image: "python", Network: true, Policy: &egress.Policy{Mode: egress.Restricted, Allow: []egress.Rule{{CIDR: "10.0.0.1/8"}}}}, fault.S001, []string{"network_policy.allow[0].cidr", "10.0.0.0/8"}},
		{"port 0 of the guest", nil, sandbox.CreateRequest{Image: "python", Network: true, Publish: []sandbox.PublishedPort{{Host: 80}}}, fault.S001, []string{"publish[0].guest"}},
		{"not pulled", func(c *sandbox.Config) { c.AutoInstall = false }, sandbox.CreateRequest{Image: "node"}, fault.S101, []string{"node", "auto_install"}},
		{"caps before pull", func(c *sandbox.Config) { c.AutoInstall = false }, sandbox.CreateRequest{Image: "app"}, fault.S400, nil},
		{"pull fails", nil, sandbox.CreateRequest{Image: "app", MemoryMiB: new(uint32(64))}, fault.S102, []string{"app", "127.0.0.1:1"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			h := newHost(t, &vmtest.Fake{}, func(c *sandbox.Config) {
				c.Catalog = policy(t, images)
				if tt.change != nil {
					tt.change(c)
				}
			})
			_, err := h.Create(t.Context(), tt.req)
			wantCode(t, err, tt.code, tt.words...)
		})
	}
}

func TestCreate_EmptyAllowListDeniesEverything(t *testing.T) {
	t.Parallel()
	h := newHost(t, &vmtest.Fake{}, func(c *sandbox.Config) { c.Catalog = policy(t, catalog.Config{Allowed: []string{}}) })
	_, err := h.Create(t.Context(), sandbox.CreateRequest{Image: "python"})
	wantCode(t, err, fault.S100, "python")
	if list := h.Catalog(); len(list) != 2 { // 12 #40
		t.Errorf("the catalog hides what is not allowed: %+v", list)
	}
}

// A refusal at any point gives the slot back: with one slot, each refused create
// is followed by one that is admitted.
func TestCreate_RefusalsFreeTheirSlot(t *testing.T) {
	t.Parallel()
	h := newHost(t, &vmtest.Fake{}, func(c *sandbox.Config) {
		c.MaxSandboxes, c.AutoInstall = 1, false
	})
	for _, req := range []sandbox.CreateRequest{
		{Image: "ghost"}, {Image: "python", CPUs: new(uint32(0))}, {Image: "python", Publish: []sandbox.PublishedPort{{Guest: 1}}}, {Image: "node"},
	} {
		if _, err := h.Create(t.Context(), req); err == nil || errors.Is(err, fault.S400) {
			t.Errorf("%+v: %v", req, err)
		}
	}
	create(t, h.Manager)
	_, err := h.Create(t.Context(), sandbox.CreateRequest{Image: "python"})
	wantCode(t, err, fault.S400)
}

func TestCreate_ReservesItsSlotBeforeItBoots(t *testing.T) {
	t.Parallel()
	const slots, callers = 3, 12
	release := make(chan struct{})
	booting := make(chan struct{}, callers)
	h := newHost(t, &vmtest.Fake{StepHook: func(ctx context.Context, step vmtest.Step) *bootspec.End {
		if step == vmtest.StepStart {
			booting <- struct{}{}
			select {
			case <-release:
			case <-ctx.Done():
			}
		}
		return nil
	}}, func(c *sandbox.Config) { c.MaxSandboxes = slots })
	results := make(chan error, callers)
	for range callers {
		go func() {
			_, err := h.Create(context.Background(), sandbox.CreateRequest{Image: "python"})
			results <- err
		}()
	}
	for range callers - slots {
		wantCode(t, <-results, fault.S400)
	}
	for range slots {
		<-booting
	}
	if list := h.List(); len(list) != 0 {
		t.Errorf("booting sandboxes are listed: %+v", list)
	}
	close(release)
	for range slots {
		if err := <-results; err != nil {
			t.Error(err)
		}
	}
	if list := h.List(); len(list) != slots {
		t.Errorf("%d sandboxes, want %d", len(list), slots)
	}
}

// Whatever the boot dies of, and whoever gives up: nothing is left, and the slot
// is free.
func TestCreate_FailedBootLeavesNothing(t *testing.T) {
	t.Parallel()
	for _, at := range vmtest.Steps() {
		for _, how := range []string{"crash", "caller leaves"} {
			t.Run(fmt.Sprint(at, " ", how), func(t *testing.T) {
				t.Parallel()
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				var once sync.Once
				h := newHost(t, &vmtest.Fake{StepHook: func(ctx context.Context, step vmtest.Step) (end *bootspec.End) {
					if step != at {
						return nil
					}
					once.Do(func() {
						if how == "crash" {
							end = &bootspec.End{Class: bootspec.EndCrashed, Message: "the machine is on fire", ExitCode: 3}
							return
						}
						cancel()
						<-ctx.Done()
					})
					return end
				}}, func(c *sandbox.Config) { c.MaxSandboxes = 1 })
				_, err := h.Create(ctx, sandbox.CreateRequest{Image: "python"})
				words := []string{"fake: " + string(at)} // the console's end
				if how == "crash" {
					words = append(words, "on fire")
				}
				wantCode(t, err, fault.S300, words...)
				h.CheckEmpty(t)
				create(t, h.Manager)
			})
		}
	}
}

func TestCreate_EnvironmentHasLayers(t *testing.T) {
	t.Parallel()
	h := newHost(t, &vmtest.Fake{}, nil)
	for _, tt := range []struct {
		create, exec sandbox.Env
		want         string
	}{
		{sandbox.Env{}, sandbox.Env{}, "yes|image||"},
		{sandbox.Env{List: []string{"LAYER=create", "A=1", "nothing", "=x", "A=2=2"}}, sandbox.Env{}, "yes|create|2=2|"},
		{sandbox.Env{Map: map[string]string{"LAYER": "create", "a": "small"}}, sandbox.Env{Map: map[string]string{"LAYER": "exec", "A": ""}}, "yes|exec||small"},
		{sandbox.Env{List: []string{"A=create"}}, sandbox.Env{List: []string{"a=exec", "nothing"}}, "yes|image|create|exec"},
	} {
		made, err := h.Create(t.Context(), sandbox.CreateRequest{Image: "python", Env: tt.create})
		if err != nil {
			t.Fatal(err)
		}
		req := shell(made.SandboxID, `printf %s "$FROM_IMAGE|$LAYER|$A|$a"`)
		req.Env = tt.exec
		if got, err := h.Exec(t.Context(), req); err != nil || got.Stdout != tt.want {
			t.Errorf("%+v: %q %v, want %q", tt, got.Stdout, err, tt.want)
		}
	}
}

func TestClose_EndsWhatIsBooting(t *testing.T) {
	t.Parallel()
	booting := make(chan struct{})
	h := newHost(t, &vmtest.Fake{StepHook: func(ctx context.Context, step vmtest.Step) *bootspec.End {
		if step == vmtest.StepLink {
			close(booting)
			<-ctx.Done()
		}
		return nil
	}}, nil)
	failed := make(chan error, 1)
	go func() {
		_, err := h.Create(context.Background(), sandbox.CreateRequest{Image: "python"})
		failed <- err
	}()
	h.Await(t, booting, "the boot")
	if err := h.Close(t.Context()); err != nil {
		t.Error(err)
	}
	wantCode(t, <-failed, fault.S300, "shutting down")
	_, err := h.Create(t.Context(), sandbox.CreateRequest{Image: "python"})
	wantCode(t, err, fault.S300, "shutting down")
}
