package sandbox

import (
	"context"
	"errors"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/catalog"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/cleanup"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/imagestore"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
)

// bootable is a VM as long as boot may have to take it back.
type bootable interface{ Kill() error }

// boot gets the image and launches a VM on it. The request's image and
// environment are filled in here: req.Env is laid over the image's. On error
// nothing is left.
func boot[M bootable](ctx context.Context, images *imagestore.Store, from catalog.Image, opts imagestore.EnsureOptions,
	launch func(context.Context, vm.Request) (M, error), req vm.Request,
) (_ M, err error) {
	var none M
	var undo cleanup.Stack
	defer func() { err = undo.RunOnError(err) }()

	opts.Name = from.Name
	image, err := images.Ensure(ctx, from.Ref, opts)
	if errors.Is(err, imagestore.ErrNotCached) && !opts.PullMissing {
		return none, fault.ImageNotPulled(from.Name)
	}
	if err != nil {
		return none, fault.PullFailed(from.Name, err)
	}
	undo.Add(image.Close)
	req.Lower = image.Lower
	req.Env = append(imageEnv(image.Config.Env), req.Env...)
	req.Hostname = "sandbox-" + req.ID[:8]
	machine, err := launch(ctx, req)
	if err != nil {
		return none, fault.BootFailed(err)
	}
	undo.Add(machine.Kill)
	// The shim has a lock of its own on the lower now.
	if err := image.Close(); err != nil {
		return none, fault.BootFailed(err)
	}
	return machine, nil
}

// imageEnv leaves out of an image's environment what is not KEY=value in UTF-8:
// other runtimes let it pass, and no program could read it.
func imageEnv(env []string) []string {
	return slices.DeleteFunc(slices.Clone(env), func(kv string) bool {
		key, _, ok := strings.Cut(kv, "=")
		return !ok || key == "" || strings.ContainsRune(kv, 0) || !utf8.ValidString(kv)
	})
}
