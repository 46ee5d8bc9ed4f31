package sandbox

import (
	"context"
	"errors"
	"strings"
	"time"
	"unicode"

	"github.com/google/uuid"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/catalog"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/cleanup"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/egress"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/imagestore"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
)

// Keeper makes sandboxes for the command line, which has no registry: one is
// this process's alone, or kept by its shim and found again by later processes.
// It is safe for concurrent use.
type Keeper struct {
	launcher  *vm.Launcher
	images    *imagestore.Store
	hostPorts []uint16
}

// NewKeeper returns a Keeper; it starts nothing. hostPorts are the ports of the
// host's loopback that are open to every sandbox with a network.
func NewKeeper(launcher *vm.Launcher, images *imagestore.Store, hostPorts []uint16) *Keeper {
	return &Keeper{launcher: launcher, images: images, hostPorts: hostPorts}
}

// maxKeptName bounds a kept sandbox's name, in bytes.
const maxKeptName = 255

// BootRequest asks a Keeper for a sandbox.
type BootRequest struct {
	Image catalog.Image
	// CPUs and MemoryMiB are the VM's size; 0 takes the default.
	CPUs, MemoryMiB int
	// Name is a free label, for people, of at most 255 bytes and without control
	// characters; it need not be unique.
	Name string
	// Env is laid over the image's environment, KEY=value.
	Env []string
	// Network asks for a network interface; Policy and Publish are as in
	// CreateRequest.
	Network bool
	Policy  *egress.Policy
	Publish []PublishedPort
	// Keep allows Sandbox.Keep: the sandbox may outlive this process.
	Keep bool
	// IdleTimeout ends a kept sandbox after that time without a call; 0 takes
	// the default.
	IdleTimeout time.Duration
	// Progress is told about a pull, when the image is not there yet; may be nil.
	Progress func(imagestore.Progress)
}

func (r *BootRequest) applyDefaults() error {
	if r.CPUs == 0 {
		r.CPUs = DefaultCPUs
	}
	if r.MemoryMiB == 0 {
		r.MemoryMiB = DefaultMemoryMiB
	}
	if r.IdleTimeout == 0 {
		r.IdleTimeout = DefaultIdleTimeout
	}
	if err := checkSize(r.CPUs, r.MemoryMiB); err != nil {
		return err
	}
	if r.IdleTimeout < 0 {
		return fault.InvalidRequest("the idle timeout is negative")
	}
	if len(r.Name) > maxKeptName || strings.ContainsFunc(r.Name, unicode.IsControl) {
		return fault.InvalidRequest("the name has control characters or more than %d bytes", maxKeptName)
	}
	for _, kv := range r.Env {
		if key, _, ok := strings.Cut(kv, "="); !ok || key == "" {
			return fault.InvalidRequest("environment entry %q is not KEY=value", key)
		}
	}
	return nil
}

// Create pulls the image where it is missing, boots a VM and returns once its
// agent has answered. On error nothing is left of it.
func (k *Keeper) Create(ctx context.Context, req BootRequest) (*Sandbox, error) {
	if err := req.applyDefaults(); err != nil {
		return nil, err
	}
	id := uuid.NewString()
	lifetime := vm.Tied
	if req.Keep {
		lifetime = vm.Detached
	}
	request := vm.Request{
		ID: id, CPUs: req.CPUs, MemoryMiB: req.MemoryMiB, Env: req.Env, Lifetime: lifetime, IdleTimeout: req.IdleTimeout,
	}
	if req.Network {
		var err error
		if request.Network, err = network(req.Policy, req.Publish, k.hostPorts); err != nil {
			return nil, err
		}
		request.Env = rewriteLoopback(req.Env, k.hostPorts)
	}
	opts := imagestore.EnsureOptions{PullMissing: true, Progress: req.Progress}
	machine, err := boot(ctx, k.images, req.Image, opts, k.launcher.Launch, request)
	if err != nil {
		return nil, err
	}
	return &Sandbox{ID: id, Name: req.Name, Image: req.Image.Name, machine: machine}, nil
}

// Info describes a kept sandbox.
type Info = vm.Record

// List returns the kept sandboxes of this user that are alive, oldest first.
func (k *Keeper) List(ctx context.Context) ([]Info, error) {
	return k.launcher.List(ctx)
}

// Open finds a kept sandbox by its id, an unambiguous beginning of it, or its
// name, and connects to it.
func (k *Keeper) Open(ctx context.Context, key string) (*Sandbox, error) {
	match, err := k.find(ctx, key)
	if err != nil {
		return nil, err
	}
	machine, err := k.launcher.Attach(ctx, match.ID)
	if err != nil {
		return nil, keptFault(key, err)
	}
	return &Sandbox{ID: match.ID, Name: match.Name, Image: match.Image, machine: machine}, nil
}

// Stop finds a kept sandbox as Open does and ends it as Sandbox.Stop does, also
// one that does not answer any more.
func (k *Keeper) Stop(ctx context.Context, key string) error {
	match, err := k.find(ctx, key)
	if err != nil {
		return err
	}
	ctx, cancel := cleanup.Context(ctx, stopTimeout)
	defer cancel()
	if err := k.launcher.Stop(ctx, match.ID, stopGrace); err != nil {
		return keptFault(key, err)
	}
	return nil
}

// keptFault is what a call to a kept sandbox failed at; it may have ended since
// it was found.
func keptFault(key string, err error) error {
	if errors.Is(err, vm.ErrNotKept) {
		return fault.SandboxNotFound(key)
	}
	return fault.GuestFailed(err)
}

func (k *Keeper) find(ctx context.Context, key string) (Info, error) {
	kept, err := k.launcher.List(ctx)
	if err != nil {
		return Info{}, err
	}
	return pick(kept, key)
}

func pick(kept []Info, key string) (Info, error) {
	var byName, byPrefix []Info
	for _, one := range kept {
		switch {
		case one.ID == key:
			return one, nil
		case one.Name != "" && one.Name == key:
			byName = append(byName, one)
		case key != "" && strings.HasPrefix(one.ID, key):
			byPrefix = append(byPrefix, one)
		}
	}
	for _, found := range [][]Info{byName, byPrefix} {
		switch len(found) {
		case 0:
		case 1:
			return found[0], nil
		default:
			return Info{}, fault.InvalidRequest("%q names %d sandboxes: use one's full id", key, len(found))
		}
	}
	return Info{}, fault.SandboxNotFound(key)
}
