package vm

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/google/renameio/v2"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/cleanup"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/guest"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
)

// Lifetimes of a VM, see Request.Lifetime.
const (
	Tied     = bootspec.Tied
	Detached = bootspec.Detached
)

// Defaults of a Request.
const (
	defaultCPUs      = 1
	defaultMemoryMiB = 512
	defaultHostname  = "sandbox"
)

// keptSpecs is how many specs of failed boots are kept.
const keptSpecs = 10

// killWait bounds the wait for a killed VM to be gone.
const killWait = 10 * time.Second

// Launch boots a VM and returns when its agent has answered. It first waits for
// a boot slot and has the driver prepare the boot, which may make or wait for
// files that later VMs share; the boot time-out runs from then on. ctx bounds the
// call alone: the VM lives on after it.
//
// On error nothing of the VM is left on the host, except the spec of a boot that
// was begun, which is kept for a replay (layout.Roots.FailedSpec). The error is
// a *BootError once the VM's process was started; it ends with what the VM
// printed last.
func (l *Launcher) Launch(ctx context.Context, req Request) (_ *Machine, err error) {
	var undo cleanup.Stack
	defer func() { err = undo.RunOnError(err) }()

	if err := l.prepareRun(); err != nil {
		return nil, err
	}
	release, err := l.slots.acquire(ctx)
	if err != nil {
		return nil, err
	}
	defer release()

	dir, err := l.claim(ctx, req.ID)
	if err != nil {
		return nil, err
	}
	undo.Add(dir.remove)
	spec, err := newSpec(dir, req)
	if err != nil {
		return nil, err
	}
	if err := l.driver.Prepare(ctx, spec); err != nil {
		return nil, fmt.Errorf("prepare vm: %w", err)
	}
	if err := spec.Validate(); err != nil {
		return nil, fmt.Errorf("vm request: %w", err)
	}
	// Neither whole nor on the disk for sure: a part goes with the directory.
	if err := writeSpec(dir.Spec(), spec, os.WriteFile); err != nil {
		return nil, err
	}

	timeout := l.timeout(spec.VMM)
	caller := ctx
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, fmt.Errorf("%w (%v)", ErrBootTimeout, timeout))
	defer cancel()
	_, m, err := newMachine(l, dir)
	if err != nil {
		return nil, err
	}
	m.spec = spec
	m.process, err = l.driver.Start(ctx, spec, dir.lock)
	if err != nil {
		cause := contextCause(ctx, err)
		return nil, errors.Join(l.bootError(caller, spec, cause, ReadTails(dir.Machine)), m.conn.Close())
	}
	// From here on the machine removes the directory when the process ends.
	undo.Release()
	go m.watch()
	if m.info, err = m.awaitHello(ctx); err != nil {
		return nil, m.giveUp(caller, err)
	}
	for _, warning := range m.info.Warnings {
		l.log.Warn("a guest booted with a fault", "vm_id", dir.id, "fault", warning)
	}
	return m, nil
}

// giveUp ends a VM that did not come up because of cause.
func (m *Machine) giveUp(caller context.Context, cause error) error {
	err := m.end()
	tails := ReadTails(m.dir.Machine)
	if ended := (*EndError)(nil); errors.As(m.End(), &ended) {
		tails = ended.Tails // everything that was on its way, and the files are gone
	}
	if ended := (*EndError)(nil); errors.As(cause, &ended) {
		cause = ended.End
	}
	boot := m.launcher.bootError(caller, m.spec, cause, tails)
	if err != nil {
		return errors.Join(err, boot)
	}
	return boot
}

// prepareRun makes the directory of slots and sockets.
func (l *Launcher) prepareRun() error { return layout.MakePrivate(l.roots.Run) }

// contextCause puts the cause of ctx's end in the place of an error that only
// says that ctx ended.
func contextCause(ctx context.Context, err error) error {
	if ctx.Err() != nil && errors.Is(err, ctx.Err()) {
		return context.Cause(ctx)
	}
	return err
}

// newSpec builds the one document that describes the VM; the driver adds what
// its VMM needs.
func newSpec(dir *machineDir, req Request) (*bootspec.Spec, error) {
	var token [16]byte
	if _, err := rand.Read(token[:]); err != nil {
		return nil, err
	}
	spec := &bootspec.Spec{
		Version:   bootspec.Version,
		ID:        dir.id,
		VMM:       req.VMM,
		Lifetime:  cmp.Or(req.Lifetime, Tied),
		Dir:       dir.Dir,
		Socket:    dir.Socket,
		CPUs:      cmp.Or(req.CPUs, defaultCPUs),
		MemoryMiB: cmp.Or(req.MemoryMiB, defaultMemoryMiB),
		Lower:     bootspec.Disk{Path: req.Lower, ReadOnly: true},
		Upper:     bootspec.Disk{Path: dir.Upper()},
		Guest: bootspec.Guest{
			Version:  bootspec.Version,
			Token:    hex.EncodeToString(token[:]),
			Hostname: cmp.Or(req.Hostname, defaultHostname),
			Env:      slices.Clone(req.Env),
			NoFile:   req.NoFile,
		},
	}
	if n := req.Network; n != nil {
		spec.Network = &bootspec.Network{Policy: n.Policy, Publish: slices.Clone(n.Publish)}
		spec.Guest.Interface = bootspec.NewInterface(bootspec.DefaultMTU, len(n.Policy.HostPorts) > 0)
	}
	if req.Upper != "" {
		spec.Upper = bootspec.Disk{Path: req.Upper, Durable: true}
	}
	if spec.Lifetime == Detached {
		spec.IdleTimeoutMs = req.IdleTimeout.Milliseconds()
	}
	if spec.VMM == "auto" {
		spec.VMM = ""
	}
	return spec, nil
}

func writeSpec(path string, spec *bootspec.Spec, write func(string, []byte, os.FileMode) error) error {
	body, err := json.MarshalIndent(spec.Redacted(), "", "  ")
	if err != nil {
		return err
	}
	return write(path, append(body, '\n'), 0o600)
}

// bootError describes a boot that failed, and keeps its spec unless the caller
// cancelled it: nobody will want to replay that one.
func (l *Launcher) bootError(caller context.Context, spec *bootspec.Spec, cause error, tails Tails) *BootError {
	e := &BootError{ID: spec.ID, Cause: cause, Tails: tails}
	if errors.Is(caller.Err(), context.Canceled) {
		return e
	}
	if q := spec.QEMU; q != nil && q.Snapshot != "" {
		// It may be the cause; a new one costs a second or two.
		if err := os.Remove(q.Snapshot); err != nil && !errors.Is(err, fs.ErrNotExist) {
			l.log.Warn("remove the snapshot of a failed boot", "vm_id", spec.ID, "error", err)
		}
	}
	path, err := l.keepSpec(spec)
	if err != nil {
		l.log.Warn("keep the spec of a failed boot", "vm_id", spec.ID, "error", err)
		return e
	}
	e.SpecFile = path
	return e
}

// keepSpec saves the spec of a failed boot and removes the oldest ones.
func (l *Launcher) keepSpec(spec *bootspec.Spec) (string, error) {
	dir := l.roots.FailedSpecs()
	if err := layout.MakePrivate(dir); err != nil {
		return "", err
	}
	path := l.roots.FailedSpec(spec.ID)
	err := writeSpec(path, spec, func(path string, body []byte, mode os.FileMode) error {
		return renameio.WriteFile(path, body, mode)
	})
	if err != nil {
		return "", err
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) <= keptSpecs {
		return path, err
	}
	modified := func(e os.DirEntry) time.Time {
		info, err := e.Info()
		if err != nil {
			return time.Time{} // another launcher removed it
		}
		return info.ModTime()
	}
	slices.SortFunc(entries, func(a, b os.DirEntry) int { return modified(a).Compare(modified(b)) })
	for _, old := range entries[:len(entries)-keptSpecs] {
		_ = os.Remove(filepath.Join(dir, old.Name())) // another launcher may be faster
	}
	return path, nil
}

// awaitHello waits for the agent's answer, the end of the VM, or ctx.
func (m *Machine) awaitHello(ctx context.Context) (guest.Info, error) {
	type answer struct {
		info guest.Info
		err  error
	}
	answers := make(chan answer, 1)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		info, err := m.guest.Hello(ctx, m.launcher.version)
		answers <- answer{info, err}
	}()
	select {
	case a := <-answers:
		return a.info, a.err
	case <-m.done:
		return guest.Info{}, m.endErr
	case <-ctx.Done():
		return guest.Info{}, context.Cause(ctx)
	}
}
