// Package shim is what every shim does whatever its VMM: it checks the boot
// spec and locks the disks, serves the control API (shim.v1) on a unix socket,
// passes guest.v1 through to the agent, watches its launcher, and reports how
// the VM ended.
//
// Nothing here changes the process: limits, umask, signals, working directory
// and exit belong to cmd/krun-shim, so that a test can run many shims in one
// process. What differs between VMMs is behind [Hypervisor].
package shim

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/cleanup"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/flock"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
)

// Hypervisor runs one VM.
type Hypervisor interface {
	// Check looks for what the VMM needs, without starting anything, and names
	// each fault with its cure. A bootspec.End in the error gives the class of
	// the end; without one it is bootspec.EndRefused.
	Check(spec *bootspec.Spec) error

	// Run boots the VM and returns when it is gone with all its processes and
	// threads; ctx's end cuts its power. It is called once, and takes over the
	// files of dev: none is open any more when it returns. A VMM that cannot
	// return, because it ends its process, belongs into a child process.
	//
	// The result's Message says in a few words how the VMM ended; what VMM and
	// guest said last is added by the caller. Class is bootspec.EndGuest when
	// the VMM ended as if the guest had powered off, EndKilled when ctx or
	// somebody outside ended it, EndRefused when nothing was started, and
	// EndCrashed otherwise.
	Run(ctx context.Context, spec *bootspec.Spec, dev Devices) bootspec.End
}

// Devices are the VM's ends of what connects it to the shim.
type Devices struct {
	// Env is the socket behind the console port iii.env. The shim writes one
	// env frame (package agentlink) and keeps its end open.
	Env *os.File
	// Link is the socket behind the port iii.agent. A VMM whose guests dial the
	// host instead closes it and uses Offer.
	Link *os.File
	// Console is the socket behind the guest's first console.
	Console *os.File
	// Log is a pipe that takes what the VMM itself prints.
	Log *os.File
	// Network is the stream socket behind the network device, each frame after its
	// length as four bytes, big-endian; nil where the spec has no network.
	Network *os.File
	// Started tells the process id of the VMM, for Status and Stats.
	Started func(pid int)
	// Offer gives the shim a connection that came from the guest. The shim
	// closes it, at once when there is a link already.
	Offer func(c net.Conn)
}

// Options are what a shim needs beside the spec. Hypervisor and Log are
// required.
type Options struct {
	Hypervisor Hypervisor
	// Log gets the shim's own events; no environment, token or guest data.
	Log *slog.Logger
	// VMMLog gets what the VMM prints, the first 64 KiB of it; nil drops it.
	VMMLog io.Writer
	// Console gets a copy of all that the guest's console prints; nil drops it.
	// The guest waits while Write does.
	Console io.Writer
	// Lifeline is the read end of a pipe from the launcher; nil for none. See
	// package shimdriver for what it means. Run closes it.
	Lifeline *os.File
	// Ready gets one byte once the socket listens, and is closed then or at the
	// end; nil for none.
	Ready io.WriteCloser
	// Lock is the machine directory's lock file, inherited from the launcher
	// who locked it; nil makes Run take it. Run closes it last.
	Lock *os.File
	// Version names this build.
	Version string
	// ClockMoved tells that the host's clock has moved, besides what Run notices by
	// itself; nil for none.
	ClockMoved <-chan struct{}
}

// Run checks spec, boots the VM and returns when it has ended and everybody who
// asked has been told, at most a few seconds later. ctx's end kills the VM; its
// cause may be a bootspec.End.
//
// The end is also written to the machine directory. Directory and socket are
// left to the launcher, except when it is gone or has released the VM: then Run
// removes them. Killed with -9 at any point, the process leaves a directory
// whose lock is free, and with the lifeline's reader the VMM is gone too.
func Run(ctx context.Context, spec *bootspec.Spec, opts Options) bootspec.End {
	ctx, kill := context.WithCancelCause(ctx)
	defer kill(nil)
	r := newRun(spec, opts, kill)
	var undo cleanup.Stack
	undo.Add(r.closeOptions)
	if err := r.prepare(ctx, &undo); err != nil {
		end := endOf(err, bootspec.EndRefused)
		r.log.Error("the VM was not started", "class", end.Class, "cause", end.Message)
		r.report(end)
		r.logError("clean up", undo.Run())
		return end
	}
	end := r.boot(ctx)
	r.logError("clean up", undo.Run())
	return end
}

// run is one call of Run.
type run struct {
	spec  *bootspec.Spec
	opts  Options
	log   *slog.Logger
	files layout.Machine

	state  *state
	link   *link
	owner  *owner
	server *server
	wires  *wires
	// network is nil for a VM without one.
	network *network
	// env is the payload of the env frame.
	env []byte
	// locked tells that the machine directory is this run's.
	locked bool
}

func newRun(spec *bootspec.Spec, opts Options, kill context.CancelCauseFunc) *run {
	log := opts.Log.With("vm_id", spec.ID)
	state := newState(spec, opts.Version)
	return &run{
		spec: spec, opts: opts, log: log,
		files: layout.Machine{Dir: spec.Dir, Socket: spec.Socket},
		state: state,
		link:  newLink(log, state, spec.Guest.Token),
		owner: newOwner(log, state, spec, kill),
	}
}

// prepare does all that can fail before anything runs.
func (r *run) prepare(ctx context.Context, undo *cleanup.Stack) error {
	env, specErr := checkSpec(r.spec)
	// First, because only its holder may report into the directory.
	if checkDir(r.spec.Dir) == nil {
		if err := r.lockMachine(undo); err != nil {
			return err
		}
	}
	if specErr != nil {
		return bootspec.End{Class: bootspec.EndBadSpec, Message: oneLine(specErr.Error())}
	}
	r.env = env
	var err error
	if err := r.opts.Hypervisor.Check(r.spec); err != nil {
		return err
	}
	for _, disk := range []bootspec.Disk{r.spec.Lower, r.spec.Upper} {
		lock, err := lockDisk(ctx, disk)
		if err != nil {
			return err
		}
		undo.Add(lock.Close)
	}
	if r.wires, err = openWires(r.files.Console(), r.opts); err != nil {
		return err
	}
	undo.Add(r.wires.close)
	if r.spec.Network != nil {
		if r.network, err = openNetwork(r.log, r.spec); err != nil {
			return err
		}
		undo.Add(r.network.close)
		r.owner.network = r.network
	}
	listener, err := listen(ctx, r.spec.Socket)
	if err != nil {
		return err
	}
	r.server = newServer(listener, r.state, r.link, r.owner, r.network, r.spec.Upper.Path)
	undo.Add(r.server.close)
	return nil
}

// lockMachine makes sure that nobody else holds the machine directory.
func (r *run) lockMachine(undo *cleanup.Stack) error {
	lock := r.opts.Lock
	if lock == nil {
		var err error
		if lock, err = flock.Open(r.files.Lock()); err != nil {
			return bootspec.End{Class: bootspec.EndBadSpec, Message: oneLine(err.Error())}
		}
		undo.Add(lock.Close)
	}
	// On the launcher's own open file this changes nothing.
	err := flock.Try(lock, flock.Exclusive)
	if errors.Is(err, flock.ErrLocked) {
		return bootspec.End{
			Class:   bootspec.EndBadSpec,
			Message: fmt.Sprintf("machine directory %s belongs to a VM that runs: stop it, or give the spec another id, dir and socket", r.spec.Dir),
		}
	}
	r.locked = err == nil
	return err
}

// boot runs the VM. Whatever fails from here on is the VM's end.
func (r *run) boot(ctx context.Context) bootspec.End {
	var work sync.WaitGroup
	defer work.Wait()
	// The clients are served a little longer than the VM lives.
	serving, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()

	work.Go(r.server.serve)
	work.Go(func() { r.wires.sendEnv(r.env, r.log) })
	work.Go(func() { r.link.serveSerial(serving, r.wires.link) })
	work.Go(func() { r.owner.watchLifeline(r.opts.Lifeline) })
	work.Go(func() { r.owner.watchIdle(serving) })
	work.Go(func() { r.followClock(serving) })
	var guestNetwork *os.File
	if r.network != nil {
		work.Go(func() { r.network.watch(ctx, r.log) })
		guestNetwork = r.network.guest
	}
	r.tellReady()

	end := r.opts.Hypervisor.Run(ctx, r.spec, Devices{
		Network: guestNetwork,
		Env:     r.wires.guestEnv, Link: r.wires.guestLink, Console: r.wires.guestConsole, Log: r.wires.vmmLog,
		Started: r.state.started,
		Offer:   func(c net.Conn) { work.Go(func() { r.link.offer(serving, c) }) },
	})
	end = r.explain(end, context.Cause(ctx))
	r.log.Info("the VM ended", "class", end.Class, "cause", end.Message)
	r.report(end)
	r.state.end(end)
	r.server.drain(tellTimeout)
	stop()
	// Checked last: a launcher may die while the end is being told.
	if r.owner.gone() {
		r.logError("remove the machine directory", r.removeFiles())
	}
	if r.opts.Lifeline != nil {
		_ = r.opts.Lifeline.Close() // ends watchLifeline; there is nothing to lose
	}
	return end
}

// tellTimeout bounds how long an ended shim waits for its clients to take the
// news.
const tellTimeout = 2 * time.Second

func (r *run) tellReady() {
	if r.opts.Ready == nil {
		return
	}
	_, err := r.opts.Ready.Write([]byte("R"))
	r.logError("tell the launcher that the socket listens", errors.Join(err, r.opts.Ready.Close()))
}

// closeOptions closes what the caller handed over, the lock last.
func (r *run) closeOptions() error {
	var err error
	if r.opts.Ready != nil {
		err = r.opts.Ready.Close()
	}
	for _, f := range []*os.File{r.opts.Lifeline, r.opts.Lock} {
		if f != nil {
			err = errors.Join(err, f.Close())
		}
	}
	if errors.Is(err, os.ErrClosed) {
		return nil
	}
	return err
}

// removeFiles removes what the launcher would have removed. The caller holds
// the lock.
func (r *run) removeFiles() error {
	err := os.Remove(r.files.Socket)
	if errors.Is(err, os.ErrNotExist) {
		err = nil
	}
	return errors.Join(err, os.RemoveAll(r.files.Dir))
}

func (r *run) logError(what string, err error) {
	if err != nil {
		r.log.Warn("it went on without this", "what", what, "error", err)
	}
}
