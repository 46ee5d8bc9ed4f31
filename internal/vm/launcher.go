package vm

import (
	"log/slog"
	"runtime"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/egress"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
)

// Defaults of Config. An emulated CPU boots in 2 to 4 s alone, and several
// times that with every core busy.
const (
	bootTimeout         = 30 * time.Second
	bootTimeoutEmulated = 120 * time.Second
)

// Config is what a Launcher works with. Driver, Roots and Log are required.
type Config struct {
	// Driver starts the VMs.
	Driver Driver
	// Roots is where machine directories, sockets and locks go. All launchers
	// of one user share them.
	Roots layout.Roots
	// Log gets what no caller is told: slow stops, collected garbage.
	Log *slog.Logger
	// BootTimeout bounds one boot, from the end of its preparation to the agent's
	// answer; 0 means 30 s, or 120 s where the CPU is emulated.
	BootTimeout time.Duration
	// MaxBoots is how many boots may go on at one time, over all processes that
	// share Roots.Run; 0 means two per core.
	MaxBoots int
	// Version names this build to shims and agents.
	Version string
}

// Launcher boots VMs and finds those kept by earlier processes. Its methods may
// be called concurrently, and by any number of processes on the same roots.
type Launcher struct {
	driver      Driver
	roots       layout.Roots
	log         *slog.Logger
	bootTimeout time.Duration
	version     string
	slots       *slots
}

// New returns a launcher. It touches nothing on the host.
func New(cfg Config) *Launcher {
	if cfg.MaxBoots <= 0 {
		cfg.MaxBoots = 2 * runtime.NumCPU()
	}
	return &Launcher{
		driver:      cfg.Driver,
		roots:       cfg.Roots,
		log:         cfg.Log,
		bootTimeout: cfg.BootTimeout,
		version:     cfg.Version,
		slots:       newSlots(cfg.Roots.BootSlot, cfg.MaxBoots),
	}
}

func (l *Launcher) timeout(vmm string) time.Duration {
	switch {
	case l.bootTimeout > 0:
		return l.bootTimeout
	case vmm == bootspec.QEMU:
		return bootTimeoutEmulated
	}
	return bootTimeout
}

// PublishedPort is a port of the host that leads into a guest.
type PublishedPort = bootspec.PublishedPort

// Network is what a VM's network is good for.
type Network struct {
	// Policy says what the guest reaches; its mode is not egress.Off.
	Policy egress.Policy
	// Publish are ports of the host's 127.0.0.1 that lead into the guest.
	Publish []PublishedPort
}

// Request describes the VM to launch.
type Request struct {
	// ID names the VM (layout.ValidID); empty lets Launch choose one.
	ID string
	// VMM is bootspec.QEMU or bootspec.Libkrun; empty or "auto" leaves it to the
	// driver.
	VMM string
	// CPUs and MemoryMiB size it; 0 means 1 CPU and 512 MiB.
	CPUs, MemoryMiB int
	// Lower is the absolute path of the read-only EROFS image.
	Lower string
	// Upper, where set, is the absolute path of a writable disk that outlives
	// the VM and is made at first use. Empty: the VM gets a fresh one that goes
	// with it.
	Upper string
	// Env is the environment of every program in the guest, KEY=value.
	Env []string
	// Hostname is the guest's host name; empty means "sandbox".
	Hostname string
	// NoFile is the guest's limit on open files; 0 means 65536.
	NoFile uint64
	// Network is nil for a VM that has no network at all.
	Network *Network
	// Lifetime is bootspec.Tied (also when empty) or bootspec.Detached.
	Lifetime string
	// IdleTimeout ends a released VM that gets no call for so long; 0 means
	// never.
	IdleTimeout time.Duration
}
