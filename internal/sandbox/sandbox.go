// Package sandbox creates and uses sandboxes: a fresh VM from an image, programs
// and files in it, and its end.
package sandbox

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"syscall"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/google/uuid"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/catalog"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/cleanup"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/guest"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/imagestore"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
)

// Defaults and limits of a sandbox (contract: create).
const (
	DefaultCPUs        = 1
	DefaultMemoryMiB   = 512
	MinMemoryMiB       = 64
	MaxMemoryMiB       = 1 << 20
	MaxCPUs            = 255
	DefaultIdleTimeout = 300 * time.Second
)

// maxName bounds a sandbox's name, in bytes.
const maxName = 255

// stopGrace is the time programs have between SIGTERM and SIGKILL when their
// sandbox stops; stopTimeout bounds the whole stop.
const (
	stopGrace   = 200 * time.Millisecond
	stopTimeout = 15 * time.Second
)

// Config is what a Manager works with; all fields are required.
type Config struct {
	Launcher *vm.Launcher
	Images   *imagestore.Store
}

// Manager makes sandboxes and finds kept ones. It is safe for concurrent use.
type Manager struct {
	cfg Config
}

// New returns a Manager; it starts nothing.
func New(cfg Config) *Manager { return &Manager{cfg: cfg} }

// CreateRequest asks for a sandbox.
type CreateRequest struct {
	Image catalog.Image
	// CPUs and MemoryMiB are the VM's size; 0 takes the default.
	CPUs, MemoryMiB int
	// Name is a free label, for people, of at most 255 bytes and without control
	// characters; it need not be unique.
	Name string
	// Env is laid over the image's environment, KEY=value.
	Env []string
	// Keep allows Sandbox.Keep: the sandbox may outlive this process.
	Keep bool
	// IdleTimeout ends a kept sandbox after that time without a call; 0 takes
	// the default.
	IdleTimeout time.Duration
	// Progress is told about a pull, when the image is not there yet; may be nil.
	Progress func(imagestore.Progress)
}

func (r *CreateRequest) applyDefaults() error {
	if r.CPUs == 0 {
		r.CPUs = DefaultCPUs
	}
	if r.MemoryMiB == 0 {
		r.MemoryMiB = DefaultMemoryMiB
	}
	if r.IdleTimeout == 0 {
		r.IdleTimeout = DefaultIdleTimeout
	}
	switch {
	case r.CPUs < 1 || r.CPUs > MaxCPUs:
		return fault.InvalidRequest("cpus is %d, must be 1 to %d", r.CPUs, MaxCPUs)
	case r.MemoryMiB < MinMemoryMiB:
		return fault.InvalidRequest("memory_mb is %d, must be at least %d", r.MemoryMiB, MinMemoryMiB)
	case r.MemoryMiB > MaxMemoryMiB:
		return fault.InvalidRequest("memory_mb is %d, must be at most %d", r.MemoryMiB, MaxMemoryMiB)
	case r.IdleTimeout < 0:
		return fault.InvalidRequest("the idle timeout is negative")
	}
	if len(r.Name) > maxName || strings.ContainsFunc(r.Name, unicode.IsControl) {
		return fault.InvalidRequest("the name has control characters or more than %d bytes", maxName)
	}
	for _, kv := range r.Env {
		if key, _, ok := strings.Cut(kv, "="); !ok || key == "" {
			return fault.InvalidRequest("environment entry %q is not KEY=value", key)
		}
	}
	return nil
}

// Sandbox is a running VM. Its methods may be called concurrently. Whoever made
// or opened it ends with Stop, or with Close after Keep.
type Sandbox struct {
	ID, Name, Image string
	machine         *vm.Machine
}

// Create pulls the image where it is missing, boots a VM and returns once its
// agent has answered. On error nothing is left of it.
func (m *Manager) Create(ctx context.Context, req CreateRequest) (_ *Sandbox, err error) {
	var undo cleanup.Stack
	defer func() { err = undo.RunOnError(err) }()
	if err := req.applyDefaults(); err != nil {
		return nil, err
	}
	image, err := m.cfg.Images.Ensure(ctx, req.Image.Ref, imagestore.EnsureOptions{
		Name: req.Image.Name, PullMissing: true, Progress: req.Progress,
	})
	if err != nil {
		return nil, fault.PullFailed(req.Image.Name, err)
	}
	// The shim holds its own lock on the lower once the launch has returned.
	defer func() { err = errors.Join(err, image.Close()) }()

	id := uuid.NewString()
	lifetime := vm.Tied
	if req.Keep {
		lifetime = vm.Detached
	}
	machine, err := m.cfg.Launcher.Launch(ctx, vm.Request{
		ID: id, CPUs: req.CPUs, MemoryMiB: req.MemoryMiB, Lower: image.Lower,
		Env: append(imageEnv(image.Config.Env), req.Env...), Hostname: "sandbox-" + id[:8],
		Lifetime: lifetime, IdleTimeout: req.IdleTimeout,
	})
	if err != nil {
		return nil, fault.BootFailed(err)
	}
	return &Sandbox{ID: id, Name: req.Name, Image: req.Image.Name, machine: machine}, nil
}

// Exec runs a program and returns when it has ended, see guest.Client.Exec. One
// that is not there or may not be executed is a result, not an error: exit code
// 127 or 126 with a line on stderr. One that cannot be started for another reason
// is S300 (contract: exec).
func (s *Sandbox) Exec(ctx context.Context, cmd guest.Command, streams guest.IO) (guest.Result, error) {
	result, err := s.machine.Guest().Exec(ctx, cmd, streams)
	var local *guest.StreamError
	if errors.As(err, &local) {
		return result, local
	}
	if err != nil {
		return result, fault.GuestFailed(err)
	}
	if result.TimedOut {
		return result, fault.ExecTimedOut(cmd.Timeout)
	}
	if result.SpawnError != nil {
		return s.unstarted(cmd, streams, result)
	}
	return result, nil
}

// unstarted renders a spawn error as the contract has it: a shell's words on
// stderr for a missing or forbidden program, an error for anything else.
func (s *Sandbox) unstarted(cmd guest.Command, streams guest.IO, result guest.Result) (guest.Result, error) {
	var reason string
	switch result.SpawnError.Errno {
	case syscall.ENOENT, syscall.ENOTDIR:
		reason = "not found"
	case syscall.EACCES:
		reason = "permission denied"
	default:
		return result, fault.StartFailed(result.SpawnError)
	}
	if streams.Stderr != nil {
		if _, err := fmt.Fprintf(streams.Stderr, "exec: %s: %s\n", cmd.Argv[0], reason); err != nil {
			return result, err
		}
	}
	return result, nil
}

// imageEnv leaves out of an image's environment what is not KEY=value in UTF-8:
// other runtimes let it pass, and no program could read it.
func imageEnv(env []string) []string {
	return slices.DeleteFunc(slices.Clone(env), func(kv string) bool {
		key, _, ok := strings.Cut(kv, "=")
		return !ok || key == "" || strings.ContainsRune(kv, 0) || !utf8.ValidString(kv)
	})
}

// StepError tells at which step of a Run it failed, in the contract's words.
type StepError struct {
	Step string
	Err  error
}

func (e *StepError) Error() string { return e.Err.Error() }

// Unwrap returns the step's error.
func (e *StepError) Unwrap() error { return e.Err }

// Run writes a program into the sandbox and runs it (contract: run). cmd's Argv
// is filled in; its other fields hold. Errors are of type *StepError.
func (s *Sandbox) Run(ctx context.Context, p Program, cmd guest.Command, streams guest.IO) (guest.Result, error) {
	interpreter, path := Interpreter(p.Lang)
	for _, f := range p.Files {
		if err := s.WriteFile(ctx, f.Path, bytes.NewReader(f.Content)); err != nil {
			return guest.Result{}, &StepError{"fs::write (sibling file)", err}
		}
	}
	if err := s.WriteFile(ctx, path, bytes.NewReader(p.Code)); err != nil {
		return guest.Result{}, &StepError{"fs::write (code)", err}
	}
	cmd.Argv = append([]string{interpreter, path}, p.Args...)
	result, err := s.Exec(ctx, cmd, streams)
	if err != nil {
		return result, &StepError{"exec", err}
	}
	return result, nil
}

// WriteFile replaces a file of the guest, mode 0644, making its parents.
func (s *Sandbox) WriteFile(ctx context.Context, path string, content io.Reader) error {
	if !strings.HasPrefix(path, "/") {
		path = "/" + path
	}
	_, err := s.machine.Guest().WriteFile(ctx, path, guest.WriteOptions{Mode: 0o644, Parents: true}, content)
	return err
}

// Keep lets the sandbox outlive this process: later commands find it by id or
// name until it is stopped or idle for its time. Only for one created with Keep.
func (s *Sandbox) Keep() error {
	return s.machine.Release(vm.Label{Name: s.Name, Image: s.Image})
}

// Close lets go of the sandbox without ending it, if it was kept; one that was
// not dies with this process.
func (s *Sandbox) Close() error { return s.machine.Close() }

// Stop ends the sandbox and removes all of it. It is bounded, works after ctx
// has ended, and may be called again.
func (s *Sandbox) Stop(ctx context.Context) error {
	ctx, cancel := cleanup.Context(ctx, stopTimeout)
	defer cancel()
	return s.machine.Stop(ctx, stopGrace)
}

// Info describes a kept sandbox.
type Info = vm.Record

// List returns the kept sandboxes of this user that are alive, oldest first.
func (m *Manager) List(ctx context.Context) ([]Info, error) {
	return m.cfg.Launcher.List(ctx)
}

// Open finds a kept sandbox by its id, an unambiguous beginning of it, or its
// name, and connects to it.
func (m *Manager) Open(ctx context.Context, key string) (*Sandbox, error) {
	match, err := m.find(ctx, key)
	if err != nil {
		return nil, err
	}
	machine, err := m.cfg.Launcher.Attach(ctx, match.ID)
	if err != nil {
		return nil, keptFault(key, err)
	}
	return &Sandbox{ID: match.ID, Name: match.Name, Image: match.Image, machine: machine}, nil
}

// Stop finds a kept sandbox as Open does and ends it as Sandbox.Stop does, also
// one that does not answer any more.
func (m *Manager) Stop(ctx context.Context, key string) error {
	match, err := m.find(ctx, key)
	if err != nil {
		return err
	}
	ctx, cancel := cleanup.Context(ctx, stopTimeout)
	defer cancel()
	if err := m.cfg.Launcher.Stop(ctx, match.ID, stopGrace); err != nil {
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

func (m *Manager) find(ctx context.Context, key string) (Info, error) {
	kept, err := m.cfg.Launcher.List(ctx)
	if err != nil {
		return Info{}, err
	}
	return pick(kept, key)
}

func pick(kept []Info, key string) (Info, error) {
	var byName, byPrefix []Info
	for _, k := range kept {
		switch {
		case k.ID == key:
			return k, nil
		case k.Name != "" && k.Name == key:
			byName = append(byName, k)
		case key != "" && strings.HasPrefix(k.ID, key):
			byPrefix = append(byPrefix, k)
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
