package boot

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/agentlink"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
)

// DefaultPath and DefaultHome are in the environment of a guest whose spec has
// none.
const (
	DefaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	DefaultHome = "/root"
)

const (
	// deviceWait bounds the wait for a disk or port to appear; an emulated CPU
	// on a busy host may take seconds.
	deviceWait = 10 * time.Second
	// frameWait bounds the wait for the frame on iii.env.
	frameWait = 15 * time.Second
	// linkWait bounds the wait for the shim's first answer on the link: less than
	// the launcher waits under emulation, so that the console tells why it fails.
	linkWait = time.Minute
)

// Guest is a booted guest.
type Guest struct {
	// Env is the environment of every program.
	Env []string
	// Warnings are what went wrong without ending the boot, one sentence each.
	Warnings []string
	// Kernel is the time from the kernel's start to the arrival of the boot spec,
	// Agent from there until the link was open, both by the guest's clock.
	Kernel, Agent time.Duration
	// Listener yields the link's sessions, one at a time.
	Listener net.Listener

	log  *slog.Logger
	spec *bootspec.Guest
	// env is never closed: the host may treat that as the guest's end, and some
	// VMMs crash when a port is opened again.
	env *port
	// old is the root before the switch, where the disks are mounted. It is open
	// from the start to the end.
	old     *os.File
	modules modules
}

// Boot does all of PID 1's work up to the open link and returns with "/" being
// the guest's file system. An error is the end of
// the VM: the caller passes it to Fatal.
//
// Until the boot spec is there nothing depends on this VM: the VMM may save a
// guest that waits for it and resume the copy for other VMs (see package
// shim/qemu). Those share what was random until then, so the first thing that
// is done with the spec is to seed the kernel's generator anew.
func Boot(ctx context.Context, log *slog.Logger) (*Guest, error) {
	g := &Guest{log: log}
	unix.Umask(0o022)
	var err error
	if g.old, err = os.Open("/"); err != nil {
		return nil, fmt.Errorf("open the first root: %w", err)
	}
	if err := g.tellStatus(agentlink.StatusNoAgent); err != nil {
		g.warn("status of a VM whose agent dies", err)
	}
	if err := mountEarly(); err != nil {
		return nil, err
	}
	if err := calmMonitor(); err != nil {
		g.warn("runtime monitor", err)
	}
	if g.modules, err = findModules("/" + modulesDir); err != nil {
		return nil, err
	}
	if err := g.modules.load(aboutEveryVM); err != nil {
		return nil, err
	}
	if err := loopbackUp(); err != nil {
		g.warn("interface lo", err)
	}
	if err := g.readSpec(ctx); err != nil {
		return nil, err
	}
	arrived := time.Now()
	g.Kernel = uptime()
	if err := reseed(g.spec.Token); err != nil {
		return nil, err
	}
	if err := g.modules.load(aboutThisVM); err != nil {
		return nil, err
	}
	if err := g.connect(ctx); err != nil {
		return nil, fmt.Errorf("network: %w", err)
	}
	way, err := openLink(ctx)
	if err != nil {
		return nil, fmt.Errorf("link to the shim: %w", err)
	}
	// The shim's answers and the mounts do not wait for one another.
	listener := listen(way, g.spec.Token, log)
	if err := g.switchRoot(ctx); err != nil {
		return nil, err
	}
	if err := mountAll(kernelFileSystems()); err != nil {
		return nil, err
	}
	g.settle()
	ctx, cancel := context.WithTimeout(ctx, linkWait)
	defer cancel()
	if err := listener.first(ctx); err != nil {
		return nil, fmt.Errorf("link to the shim: %w", err)
	}
	g.Listener = listener
	g.Agent = time.Since(arrived)
	return g, nil
}

// connect leaves the guest with lo and its interface, if it has one.
func (g *Guest) connect(ctx context.Context) error {
	wanted := 1
	if g.spec.Interface != nil {
		wanted = 2
		if err := configureInterface(ctx, g.spec.Interface); err != nil {
			return err
		}
	}
	if err := dropSpare("/sys/class/net", wanted); err != nil {
		g.warn("spare interfaces", err)
	}
	return nil
}

// libkrunEnv is what libkrun's init leaves in the environment of the program that
// it becomes; no other VMM's guests have it.
const libkrunEnv = "KRUN_INIT_PID1"

// openLink finds the way to the shim that this VMM has.
func openLink(ctx context.Context) (link, error) {
	if os.Getenv(libkrunEnv) != "" {
		return vsockLink{}, nil
	}
	port, err := openPort(ctx, agentlink.AgentPort)
	return &serialLink{port: port}, err
}

func (g *Guest) readSpec(ctx context.Context) error {
	var err error
	if g.env, err = openPort(ctx, agentlink.EnvPort); err != nil {
		return fmt.Errorf("boot spec: %w", err)
	}
	if err := g.env.SetDeadline(time.Now().Add(frameWait)); err != nil {
		return fmt.Errorf("boot spec: %w", err)
	}
	payload, err := agentlink.ReadEnv(g.env)
	if err != nil {
		return fmt.Errorf("boot spec on %s: %w: was it written, and does the shim keep its end open?", agentlink.EnvPort, err)
	}
	if g.spec, err = bootspec.ParseGuest(payload); err != nil {
		return err
	}
	g.Env = environment(g.spec.Env)
	return nil
}

// environment adds what every program expects.
func environment(env []string) []string {
	out := append([]string(nil), env...)
	for _, kv := range []string{"PATH=" + DefaultPath, "HOME=" + DefaultHome} {
		key, _, _ := strings.Cut(kv, "=")
		if !hasKey(env, key) {
			out = append(out, kv)
		}
	}
	return out
}

func hasKey(env []string, key string) bool {
	for _, kv := range env {
		if k, _, _ := strings.Cut(kv, "="); k == key {
			return true
		}
	}
	return false
}

// settle does what a program may expect and can do without: each failure is a
// warning.
func (g *Guest) settle() {
	for _, step := range []struct {
		what string
		do   func() error
	}{
		{"device links", func() error { return linkDevices("/dev") }},
		{"device nodes", func() error { return hideDevices("/dev") }},
		{"/tmp", func() error { return ensureDir("/tmp", 0o1777, true) }},
		{"host name", func() error { return unix.Sethostname([]byte(g.spec.Hostname)) }},
		{"/etc", func() error { return writeEtc("/etc", g.spec) }},
		{"limit on open files", func() error { return limitFiles(g.spec.NoFile) }},
	} {
		if err := step.do(); err != nil {
			g.warn(step.what, err)
		}
	}
}

func (g *Guest) warn(what string, err error) {
	g.Warnings = append(g.Warnings, fmt.Sprintf("%s: %v", what, err))
}

// mountEarly makes devices and modules usable.
func mountEarly() error {
	for _, m := range []mount{
		{"devtmpfs", "/dev", "devtmpfs", unix.MS_NOSUID, "mode=0755"},
		{"proc", "/proc", "proc", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC, ""},
		{"sysfs", "/sys", "sysfs", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC, ""},
	} {
		if err := ensureDir(m.target, 0o755, false); err != nil {
			return fmt.Errorf("mount %s: %w", m.target, err)
		}
		if err := m.do(); err != nil {
			return err
		}
	}
	return nil
}

// limitFiles sets the limit that every program inherits.
func limitFiles(n uint64) error {
	if n == 0 {
		n = 65536
	}
	limit := unix.Rlimit{Cur: n, Max: n}
	err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit)
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("%d is more than the kernel's fs.nr_open", n)
	}
	return err
}

func uptime() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return 0
	}
	return time.Duration(ts.Nano())
}

// SetClock sets the wall clock.
func SetClock(to time.Time) error {
	ts := unix.NsecToTimespec(to.UnixNano())
	return unix.ClockSettime(unix.CLOCK_REALTIME, &ts)
}

// notThere tells whether err is the absence of a file, for which a wait helps.
func notThere(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENODEV)
}
