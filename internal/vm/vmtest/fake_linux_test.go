package vmtest_test

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/vmtest"
)

func open(t *testing.T, fake *vmtest.Fake) *vmtest.Env {
	t.Helper()
	fake.Log = vmtest.Logger(t)
	return &vmtest.Env{
		Driver: fake, Roots: vmtest.Roots(t), Lower: "/etc/passwd",
		Patience: 30 * time.Second, Crowd: 20, Load: fakeLoad(),
	}
}

// fakeLoad is the whole load but for what only takes time here.
func fakeLoad() vmtest.Load {
	load := vmtest.WholeLoad()
	load.Streams = vmtest.SmallLoad().Streams
	return load
}

func TestSuite(t *testing.T) {
	t.Parallel()
	vmtest.RunSuite(t, func(t *testing.T) *vmtest.Env {
		t.Helper()
		return open(t, &vmtest.Fake{})
	})
}

// checkNext fails unless a VM boots where another one failed.
func checkNext(t *testing.T, e *vmtest.Env) {
	t.Helper()
	e.CheckEmpty(t)
	e.Driver = &vmtest.Fake{Log: vmtest.Logger(t)}
	m := e.Launch(t, e.Launcher(t), e.Request())
	if err := m.Stop(e.Context(t), 0); err != nil {
		t.Error(err)
	}
	e.CheckEmpty(t)
}

func TestCrashAtEachStep(t *testing.T) {
	t.Parallel()
	for _, at := range vmtest.Steps() {
		t.Run(string(at), func(t *testing.T) {
			t.Parallel()
			e := open(t, &vmtest.Fake{StepHook: func(_ context.Context, step vmtest.Step) *bootspec.End {
				if step != at {
					return nil
				}
				return &bootspec.End{Class: bootspec.EndCrashed, Message: "the machine is on fire", ExitCode: 3}
			}})
			_, err := e.Launcher(t).Launch(e.Context(t), e.Request())
			var boot *vm.BootError
			var end bootspec.End
			if !errors.As(err, &boot) || !errors.As(err, &end) {
				t.Fatalf("error is %v", err)
			}
			if end.Class != bootspec.EndCrashed || !strings.Contains(end.Message, "on fire") || end.ExitCode != 3 {
				t.Errorf("end is %+v", end)
			}
			if !strings.HasSuffix(err.Error(), "fake: "+string(at)) {
				t.Errorf("the error does not end with the console: %v", err)
			}
			checkNext(t, e)
		})
	}
}

func TestCancelAtEachStep(t *testing.T) {
	t.Parallel()
	for _, at := range vmtest.Steps() {
		t.Run(string(at), func(t *testing.T) {
			t.Parallel()
			cause := errors.New("the user left")
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			e := open(t, &vmtest.Fake{StepHook: func(ctx context.Context, step vmtest.Step) *bootspec.End {
				if step == at {
					cancel(cause)
					<-ctx.Done()
				}
				return nil
			}})
			_, err := e.Launcher(t).Launch(ctx, e.Request())
			if !errors.Is(err, cause) || !strings.Contains(err.Error(), "fake: "+string(at)) {
				t.Errorf("error is %v", err)
			}
			if _, err := os.Stat(e.Roots.FailedSpecs()); err == nil {
				t.Error("the spec of a cancelled boot is kept")
			}
			checkNext(t, e)
		})
	}
}

func TestGuestThatHangsIsGivenUp(t *testing.T) {
	t.Parallel()
	e := open(t, &vmtest.Fake{StepHook: func(ctx context.Context, step vmtest.Step) *bootspec.End {
		if step == vmtest.StepLink {
			<-ctx.Done()
		}
		return nil
	}})
	l := vm.New(vm.Config{Driver: e.Driver, Roots: e.Roots, Log: vmtest.Logger(t), BootTimeout: 2 * time.Second})
	_, err := l.Launch(e.Context(t), e.Request())
	if !errors.Is(err, vm.ErrBootTimeout) || !strings.Contains(err.Error(), "fake: link") {
		t.Errorf("error is %v", err)
	}
	checkNext(t, e)
}

func TestForgedTokenIsRefused(t *testing.T) {
	t.Parallel()
	e := open(t, &vmtest.Fake{Token: strings.Repeat("00", 16)})
	m, err := e.Launcher(t).Launch(e.Context(t), e.Request())
	if err == nil {
		_ = m.Close()
		t.Fatal("an agent with another token was accepted")
	}
	checkNext(t, e)
}
