package sandbox

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/catalog"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/imagestore"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
)

// maxName bounds a sandbox's name, in bytes: listings repeat it.
const maxName = 4096

// admission is a create that may go on. It holds a slot until it is given to an
// entry or released.
type admission struct {
	image  catalog.Image
	cpus   uint32
	memory uint32
	env    []string
	// network is nil for a sandbox without one.
	network *vm.Network
}

// Create implements Functions. The order of its checks is the request's shape
// (S001), the slot (S400), the image (S100), its caps (S400); then come pull (S101, S102) and boot (S300).
func (m *Manager) Create(ctx context.Context, req CreateRequest) (Created, error) {
	a, err := m.admit(req)
	if err != nil {
		return Created{}, err
	}
	e, err := m.bootAdmitted(ctx, a, req)
	if err != nil {
		return Created{}, err
	}
	created := Created{SandboxID: e.id, Image: req.Image}
	if len(req.Publish) > 0 {
		status, err := e.machine.Status(ctx)
		if err != nil {
			m.discard(e)
			return Created{}, fault.GuestFailed(err)
		}
		created.Published = status.Published
	}
	return created, nil
}

// admit makes the checks that need nothing but memory and takes a slot.
func (m *Manager) admit(req CreateRequest) (*admission, error) {
	a := &admission{cpus: m.cfg.DefaultCPUs, memory: m.cfg.DefaultMemoryMiB}
	if req.CPUs != nil {
		a.cpus = *req.CPUs
	}
	if req.MemoryMiB != nil {
		a.memory = *req.MemoryMiB
	}
	if err := checkSize(int(a.cpus), int(a.memory)); err != nil {
		return nil, err
	}
	if req.Name != nil && len(*req.Name) > maxName {
		return nil, fault.InvalidRequest("name has %d bytes, more than %d", len(*req.Name), maxName)
	}
	var err error
	if a.env, err = createEnv(req.Env); err != nil {
		return nil, err
	}
	switch {
	case req.Network:
		if a.network, err = network(req.Policy, req.Publish, m.cfg.HostPorts); err != nil {
			return nil, err
		}
		a.env = rewriteLoopback(a.env, m.cfg.HostPorts)
	case req.Policy != nil:
		return nil, fault.InvalidRequest("network_policy needs a network: add network:true")
	case len(req.Publish) > 0:
		return nil, fault.InvalidRequest("publish needs a network: add network:true")
	}
	if err := m.takeSlot(); err != nil {
		return nil, err
	}
	if err := m.checkPolicy(a, req); err != nil {
		m.freeSlot()
		return nil, err
	}
	return a, nil
}

func checkSize(cpus, memoryMiB int) error {
	switch {
	case cpus < 1 || cpus > MaxCPUs:
		return fault.InvalidRequest("cpus is %d, must be 1 to %d", cpus, MaxCPUs)
	case memoryMiB < MinMemoryMiB:
		return fault.InvalidRequest("memory_mb is %d, must be at least %d", memoryMiB, MinMemoryMiB)
	case memoryMiB > MaxMemoryMiB:
		return fault.InvalidRequest("memory_mb is %d, must be at most %d", memoryMiB, MaxMemoryMiB)
	}
	return nil
}

// createEnv refuses what no VM could be given.
func createEnv(env Env) ([]string, error) {
	entries, err := env.entries()
	if err != nil {
		return nil, err
	}
	size := 0
	for _, kv := range entries {
		size += len(kv) + 1
		if key, _, _ := strings.Cut(kv, "="); strings.ContainsRune(kv, 0) {
			return nil, fault.InvalidRequest("env has a NUL byte in the entry of %q", strings.ReplaceAll(key, "\x00", ""))
		}
	}
	if size > bootspec.MaxEnv {
		return nil, fault.InvalidRequest("env has %d bytes, more than %d: put big data into a file", size, bootspec.MaxEnv)
	}
	return entries, nil
}

// checkPolicy asks what the operator allows.
func (m *Manager) checkPolicy(a *admission, req CreateRequest) (err error) {
	if a.image, err = m.cfg.Catalog.Resolve(req.Image); err != nil {
		return err
	}
	return m.cfg.Catalog.CheckSize(req.Image, a.cpus, a.memory)
}

// takeSlot reserves the place of one sandbox. The caller frees it, or gives it to
// an entry and then calls booted.
func (m *Manager) takeSlot() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return fault.ShuttingDown()
	}
	if m.used >= m.cfg.MaxSandboxes {
		return fault.SandboxLimit(int(m.cfg.MaxSandboxes))
	}
	m.used++
	m.tasks.Add(1)
	return nil
}

func (m *Manager) freeSlot() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.used--
	m.tasks.Done()
}

// bootAdmitted pulls, boots and registers. On error the slot is free again.
func (m *Manager) bootAdmitted(ctx context.Context, a *admission, req CreateRequest) (_ *entry, err error) {
	defer func() {
		if err != nil {
			m.freeSlot()
		} else {
			m.tasks.Done()
		}
	}()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(m.life, func() { cancel(errClosed) })()

	idle := m.cfg.DefaultIdleTimeoutSecs
	if req.IdleTimeoutSecs != nil {
		idle = *req.IdleTimeoutSecs
	}
	e := &entry{
		id: uuid.NewString(), image: req.Image, name: req.Name, idleTimeout: clamped(idle, time.Second),
		networked: a.network != nil,
	}
	opts := imagestore.EnsureOptions{PullMissing: m.cfg.AutoInstall}
	e.machine, err = boot(ctx, m.cfg.Images, a.image, opts, m.launch, vm.Request{
		ID: e.id, CPUs: int(a.cpus), MemoryMiB: int(a.memory), Env: a.env, Network: a.network, Lifetime: vm.Tied,
	})
	if err != nil && m.life.Err() != nil {
		return nil, fault.ShuttingDown()
	}
	if err != nil {
		return nil, err
	}
	if err := m.register(e); err != nil {
		return nil, errors.Join(err, e.machine.Kill())
	}
	m.cfg.Log.Info("sandbox created", "sandbox_id", e.id, "image", req.Image)
	return e, nil
}
