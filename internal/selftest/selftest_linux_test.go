package selftest_test

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/selftest"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/vmtest"
)

func run(t *testing.T, fake *vmtest.Fake) (dir string, result selftest.Result, err error) {
	t.Helper()
	fake.Log = vmtest.Logger(t)
	dir = filepath.Join(t.TempDir(), "made")
	launcher := vm.New(vm.Config{Driver: fake, Roots: vmtest.Roots(t), Log: fake.Log})
	result, err = selftest.Run(t.Context(), launcher, dir)
	if left, globErr := filepath.Glob(dir + "/*"); globErr != nil || len(left) > 1 {
		t.Errorf("left behind: %v, %v", left, globErr)
	}
	return dir, result, err
}

func TestRun(t *testing.T) {
	t.Parallel()
	if _, result, err := run(t, &vmtest.Fake{}); err != nil || result.Boot <= 0 || result.In <= 0 || result.Out <= 0 {
		t.Errorf("%+v, %v", result, err)
	}
}

// What is kept of a boot that failed can be booted again.
func TestRunThatFailsCanBeReplayed(t *testing.T) {
	t.Parallel()
	_, _, err := run(t, &vmtest.Fake{StepHook: func(context.Context, vmtest.Step) *bootspec.End {
		return &bootspec.End{Class: bootspec.EndCrashed, Message: "it crashed"}
	}})
	var boot *vm.BootError
	if !errors.As(err, &boot) {
		t.Fatalf("error is %v", err)
	}
	body, err := os.ReadFile(boot.SpecFile)
	if err != nil {
		t.Fatal(err)
	}
	var spec bootspec.Spec
	if err := json.Unmarshal(body, &spec); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(spec.Lower.Path); err != nil {
		t.Error(err)
	}
}
