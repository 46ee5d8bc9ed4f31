package shimdriver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/cleanup"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/proc"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vmassets"
)

// What a shim gets (cmd/krun-shim reads it):
//
//	argv    krun-shim __vm-boot
//	env     PATH, and III_SHIM_LANDLOCK where set
//	fd 0    the boot spec, then end of file
//	fd 1, 2 the shim log
//	fd 3    a pipe: the shim writes one byte once its socket listens
//	fd 4    the lifeline: end of file means that the launcher is gone; a 'D'
//	        before it lets a detached VM live on
//	fd 5    the machine directory's lock, held by being open
const shimCommand = "__vm-boot"

// detach is what Release writes on the lifeline.
const detach = 'D'

// Start runs the shim. See vm.Driver.
func (d *Driver) Start(ctx context.Context, spec *bootspec.Spec, lock *os.File) (_ vm.Process, err error) {
	path, err := vmassets.FindShim(d.cfg.Getenv, d.cfg.Roots.VMM())
	if err != nil {
		return nil, err
	}
	files := layout.Machine{Dir: spec.Dir, Socket: spec.Socket}
	var undo cleanup.Stack
	defer func() { err = undo.RunOnError(err) }()
	log, err := os.OpenFile(files.ShimLog(), os.O_RDWR|os.O_APPEND|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	undo.Add(log.Close)
	pipes, err := openPipes()
	if err != nil {
		return nil, err
	}
	defer pipes.close()
	child, err := proc.Start(proc.Command{
		Path: path, Args: []string{shimCommand}, Env: d.environment(),
		Stdin: pipes.specR, Stdout: log, Stderr: log,
		Files: []*os.File{pipes.readyW, pipes.lifelineR, lock},
	})
	if err != nil {
		return nil, fmt.Errorf("%w: %s must be a program for this host", err, path)
	}
	undo.Release() // the process closes the log
	p := &process{child: child, lifeline: pipes.takeLifeline(), files: files, log: log, done: make(chan struct{})}
	go p.wait()
	pipes.closeChildEnds()
	err = d.makeRoot(spec)
	if err == nil {
		err = p.handshake(ctx, spec, pipes)
	}
	if err != nil {
		return nil, errors.Join(err, p.abandon())
	}
	return p, nil
}

// environment is all that a shim gets of ours: nothing secret.
func (d *Driver) environment() []string {
	env := []string{"PATH=" + d.cfg.Getenv("PATH")}
	if value := d.cfg.Getenv(envLandlock); value != "" {
		env = append(env, envLandlock+"="+value)
	}
	return env
}

// envLandlock switches a part of the shim's confinement; see krun-shim --help.
const envLandlock = "III_SHIM_LANDLOCK"

// pipes are the three pipes between us and a shim.
type pipes struct {
	specR, specW, readyR, readyW, lifelineR, lifelineW *os.File
}

func openPipes() (_ *pipes, err error) {
	var p pipes
	for _, ends := range [][2]**os.File{{&p.specR, &p.specW}, {&p.readyR, &p.readyW}, {&p.lifelineR, &p.lifelineW}} {
		if *ends[0], *ends[1], err = os.Pipe(); err != nil {
			p.close()
			return nil, err
		}
	}
	return &p, nil
}

// takeLifeline gives the lifeline's write end to the caller.
func (p *pipes) takeLifeline() *os.File {
	w := p.lifelineW
	p.lifelineW = nil
	return w
}

// closeChildEnds leaves the child the only one to hold its ends, so that its
// end is seen.
func (p *pipes) closeChildEnds() {
	for _, end := range []**os.File{&p.specR, &p.readyW, &p.lifelineR} {
		_ = (*end).Close() // nothing was written to it
		*end = nil
	}
}

func (p *pipes) close() {
	for _, end := range []*os.File{p.specR, p.specW, p.readyR, p.readyW, p.lifelineR, p.lifelineW} {
		if end != nil {
			_ = end.Close() // a pipe has nothing left to lose
		}
	}
}

// handshake gives the shim its spec and waits until it listens, has ended, or
// ctx ends.
func (p *process) handshake(ctx context.Context, spec *bootspec.Spec, pipes *pipes) error {
	var work sync.WaitGroup
	defer work.Wait()
	// Closing the pipes ends both goroutines, whatever the shim does.
	defer pipes.close()
	written := make(chan error, 1)
	work.Go(func() {
		written <- errors.Join(bootspec.Write(pipes.specW, spec), pipes.specW.Close())
	})
	ready := make(chan error, 1)
	work.Go(func() {
		_, err := io.ReadFull(pipes.readyR, make([]byte, 1))
		ready <- err
	})
	select {
	case err := <-ready:
		if err == nil {
			return <-written
		}
		// The shim is about to end, and to say why.
		select {
		case <-p.done:
			return p.End()
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// killWait bounds the wait for a killed shim.
const killWait = 10 * time.Second

// abandon ends a shim that did not come up, and waits for it.
func (p *process) abandon() error {
	err := p.Kill()
	timer := time.NewTimer(killWait)
	defer timer.Stop()
	select {
	case <-p.done:
		return err
	case <-timer.C:
		return errors.Join(fmt.Errorf("the shim (process %d) is still there %v after it was killed", p.PID(), killWait), err)
	}
}
