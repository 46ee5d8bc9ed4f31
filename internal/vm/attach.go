package vm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	shimv1 "github.com/iii-hq/workers/sandbox-libkrun/api/shim/v1"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/flock"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/proc"
)

// attachTimeout bounds an attach: shim and agent run already.
const attachTimeout = 10 * time.Second

// Attach connects to a kept VM and returns when its agent has answered. The
// caller ends with Stop, or with Close, which lets it live on. ErrNotKept when
// there is none of this id.
func (l *Launcher) Attach(ctx context.Context, id string) (*Machine, error) {
	m, err := l.hold(id)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, attachTimeout, errors.New("shim and agent do not answer: stop it, if they never do"))
	defer cancel()
	if m.info, err = m.awaitHello(ctx); err != nil {
		return nil, fmt.Errorf("attach to vm %s: %w", id, errors.Join(err, m.Close()))
	}
	return m, nil
}

// Stop ends a kept VM as Machine.Stop does, also one whose agent or shim does
// not answer any more. ErrNotKept when there is none of this id.
func (l *Launcher) Stop(ctx context.Context, id string, grace time.Duration) error {
	m, err := l.hold(id)
	if err != nil {
		return err
	}
	return errors.Join(m.Stop(ctx, grace), m.Close())
}

// hold makes the handle of a kept VM, without asking it anything.
func (l *Launcher) hold(id string) (*Machine, error) {
	if !layout.ValidID(id) {
		return nil, fmt.Errorf("vm %q: %w", id, ErrNotKept)
	}
	record, err := l.record(id)
	if err != nil {
		return nil, err
	}
	// Whoever owns the directory could have put a socket of theirs there.
	if err := l.prepareRun(); err != nil {
		return nil, err
	}
	watched, m, err := newMachine(l, &machineDir{Machine: l.roots.Machine(id), id: id})
	if err != nil {
		return nil, fmt.Errorf("attach to vm %s: %w", id, err)
	}
	m.kept = true
	process := &foreign{files: m.dir.Machine, identity: record.Shim, shim: m.shim, done: make(chan struct{})}
	m.process = process
	go process.follow(watched)
	go m.watch()
	return m, nil
}

// foreign is the process of a kept VM: no child of ours. Its shim tells on a
// Watch stream how it ends, and the machine directory's lock, free at last,
// that it is gone.
type foreign struct {
	files    layout.Machine
	identity proc.Identity
	shim     shimv1.ShimServiceClient

	killing sync.Once
	done    chan struct{}
	end     bootspec.End // valid once done is closed
}

func (f *foreign) PID() int              { return f.identity.PID }
func (f *foreign) Done() <-chan struct{} { return f.done }
func (f *foreign) End() bootspec.End     { return f.end }
func (f *foreign) Release() error        { return nil }

// follow waits for the end until ctx, the machine's life, ends.
func (f *foreign) follow(ctx context.Context) {
	end, err := f.report(ctx)
	if f.waitGone(ctx) != nil {
		return // let go
	}
	if err != nil {
		end, err = ReadEnd(f.files)
	}
	if err != nil {
		end = bootspec.End{
			Class: bootspec.EndKilled, ExitCode: -1, Booted: true,
			Message: "the shim ended without telling why: somebody killed it",
		}
	}
	f.end = end
	close(f.done)
}

// report waits for what the shim tells about the VM's end.
func (f *foreign) report(ctx context.Context) (bootspec.End, error) {
	stream, err := f.shim.Watch(ctx, &shimv1.WatchRequest{})
	if err != nil {
		return bootspec.End{}, err
	}
	for {
		event, err := stream.Recv()
		if err != nil {
			return bootspec.End{}, err
		}
		if s := event.GetStatus(); s.GetState() == shimv1.State_STATE_ENDED {
			return endOf(s.GetEnd()), nil
		}
	}
}

func endOf(e *shimv1.End) bootspec.End {
	return bootspec.End{
		Class: bootspec.EndClass(e.GetClass()), Message: e.GetMessage(),
		ExitCode: int(e.GetExitCode()), Signal: int(e.GetSignal()), Booted: true,
	}
}

// waitGone waits until nobody holds the machine directory; an error only when
// ctx ends first.
func (f *foreign) waitGone(ctx context.Context) error {
	for {
		lock, err := lockExisting(f.files)
		if err == nil {
			return lock.Close()
		}
		if !errors.Is(err, flock.ErrLocked) {
			return nil
		}
		if err := pause(ctx, lockRetry); err != nil {
			return err
		}
	}
}

// Kill asks the shim, and kills it where it does not answer; the VMM dies with
// its shim.
func (f *foreign) Kill() error {
	f.killing.Do(func() {
		go func() {
			ctx, cancel := context.WithTimeout(context.Background(), killWait/2)
			defer cancel()
			if _, err := f.shim.Kill(ctx, &shimv1.KillRequest{}); err != nil && f.identity.PID != 0 {
				_ = f.identity.Kill() // gone already is as good
			}
		}()
	})
	return nil
}

// ReadEnd reads the shim's report of how the VM ended. fs.ErrNotExist when it
// could not write one.
func ReadEnd(files layout.Machine) (bootspec.End, error) {
	body, err := readSmall(files.End(), maxRecord)
	if err != nil {
		return bootspec.End{}, err
	}
	var end bootspec.End
	if err := json.Unmarshal(body, &end); err != nil {
		return bootspec.End{}, fmt.Errorf("%s: %w", files.End(), err)
	}
	return end, nil
}
