package sandbox

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"sync"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/catalog"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/guest"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/imagestore"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
)

// Config is what a Manager works with. Launcher, Images, Catalog and Log are
// required; the numbers are the configuration entry's, with its meaning of 0.
type Config struct {
	Launcher *vm.Launcher
	Images   *imagestore.Store
	// Catalog knows the images, which of them may boot, and their caps.
	Catalog *catalog.Catalog
	// Log gets what no caller is told. Names of images and ids of sandboxes are
	// all it gets of a request.
	Log *slog.Logger

	// AutoInstall lets Create pull an image that is not on the host; without it
	// that is S101.
	AutoInstall bool
	// MaxSandboxes is how many sandboxes may be there, those included that are
	// booting or ending; 0 refuses every one.
	MaxSandboxes uint32
	// MaxExecs is how many programs a sandbox runs at a time; 0 means 1.
	MaxExecs uint32
	// MaxExecTimeoutMs is the ceiling of every program's time limit; 0 means 1.
	MaxExecTimeoutMs uint64
	// DefaultIdleTimeoutSecs, DefaultCPUs and DefaultMemoryMiB hold where a
	// request has none.
	DefaultIdleTimeoutSecs        uint64
	DefaultCPUs, DefaultMemoryMiB uint32
	// HostPorts are TCP ports of the host's loopback that every sandbox with a
	// network reaches at its gateway.
	HostPorts []uint16
}

// The timing of shutdown. An adapter has 10 s for its whole end.
const (
	// closeGrace is how long VMs may take to end in order.
	closeGrace = 4 * time.Second
	// closeSlack is how long killed VMs may take to be gone.
	closeSlack = 3 * time.Second
)

// errClosed is the cause of what Close cuts short.
var errClosed = errors.New("the adapter is shutting down")

// machine is what Manager needs of a *vm.Machine.
type machine interface {
	Guest() *guest.Client
	Done() <-chan struct{}
	End() error
	Stop(ctx context.Context, grace time.Duration) error
	Kill() error
	Stats(ctx context.Context) (vm.Stats, error)
	Status(ctx context.Context) (vm.Status, error)
}

// Manager holds the sandboxes of one adapter and serves Functions on them. All
// of them are tied to this process: none outlives it, however it ends.
//
// No lock is held while anything outside is waited for, so one slow sandbox
// never slows another call.
type Manager struct {
	cfg    Config
	launch func(context.Context, vm.Request) (machine, error)

	// life ends, with errClosed, when Close begins; orderly when VMs that are
	// still ending are to be killed.
	life    context.Context //nolint:containedctx // the lifetime of the Manager itself
	end     context.CancelCauseFunc
	orderly context.Context //nolint:containedctx // as life
	rush    context.CancelFunc

	// tasks are the reaper, and per sandbox its boot, its watcher, its stop.
	tasks sync.WaitGroup

	mu     sync.Mutex
	closed bool
	// used counts the sandboxes that are there, booting or ending.
	used    uint32
	entries map[string]*entry
	// made counts the sandboxes ever registered.
	made uint64
	lost lost
}

var _ Functions = (*Manager)(nil)

// entry is one sandbox. Its first part never changes, the second is guarded by
// Manager.mu.
type entry struct {
	id, image   string
	name        *string
	number      uint64
	created     time.Time
	idleTimeout time.Duration
	// networked tells that what goes through its network is activity.
	networked bool
	machine   machine
	// gone is closed once the entry is no longer registered.
	gone chan struct{}

	// life ends, with errStopped or the VM's end as its cause, when file operations
	// are to give up: an agent that shuts down would wait for them. Programs get
	// its grace instead.
	life         context.Context //nolint:containedctx // the lifetime of the sandbox itself
	cut          context.CancelCauseFunc
	lastActivity time.Time
	// execs are the programs that run, ops the other calls under way.
	execs, ops uint32
	// ending is set while a stop is under way.
	ending *ending
}

// Start returns a Manager whose idle reaper runs. The caller ends it with Close.
func Start(cfg Config) *Manager {
	return start(cfg, func(ctx context.Context, req vm.Request) (machine, error) { return cfg.Launcher.Launch(ctx, req) })
}

func start(cfg Config, launch func(context.Context, vm.Request) (machine, error)) *Manager {
	if cfg.MaxExecs == 0 {
		cfg.Log.Warn("max_concurrent_exec_per_sandbox is 0, which means 1")
	}
	cfg.MaxExecs = max(cfg.MaxExecs, 1)
	cfg.MaxExecTimeoutMs = max(cfg.MaxExecTimeoutMs, 1)
	m := &Manager{cfg: cfg, launch: launch, entries: map[string]*entry{}}
	m.life, m.end = context.WithCancelCause(context.Background())
	m.orderly, m.rush = context.WithCancel(context.Background())
	m.tasks.Go(m.reapIdle)
	return m
}

// Catalog implements Functions.
func (m *Manager) Catalog() []catalog.Image { return m.cfg.Catalog.Images() }

// Close ends all sandboxes and what is being booted, in order for some seconds
// or until ctx ends, by force after that. From its beginning every call but List
// and Catalog is refused. It returns when nothing is left; an error means that
// some VM is, which then ends with this process.
func (m *Manager) Close(ctx context.Context) error {
	m.mu.Lock()
	m.closed = true
	for _, e := range m.entries {
		m.claimLocked(e, m.inOrder)
	}
	m.mu.Unlock()
	m.end(errClosed)

	idle := make(chan struct{})
	go func() {
		m.tasks.Wait()
		close(idle)
	}()
	grace := time.NewTimer(closeGrace)
	defer grace.Stop()
	defer m.rush()
	select {
	case <-idle:
		return nil
	case <-grace.C:
	case <-ctx.Done():
	}
	m.rush()
	slack := time.NewTimer(closeSlack)
	defer slack.Stop()
	select {
	case <-idle:
		return nil
	case <-slack.C:
		return errors.New("some sandboxes did not end in time: they end with this process")
	}
}

// clamped is n units as a Duration, of at most a century: long enough to never
// end, short enough to be added to others.
func clamped(n uint64, unit time.Duration) time.Duration {
	const century = 100 * 365 * 24 * time.Hour
	if n > math.MaxInt64 || n > uint64(century/unit) {
		return century
	}
	return time.Duration(n) * unit
}
