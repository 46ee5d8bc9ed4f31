package vmassets

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"time"
)

// keepOwn is how many kernels of the user's own are kept; a package's kernel is
// kept until the next but one.
const keepOwn = 4

// Options say how to set up a kernel.
type Options struct {
	// Dir is layout.Roots.VMM(). It is created when missing.
	Dir string
	// Log gets what was decided; nil is not allowed.
	Log *slog.Logger
	// Progress gets one line per step for a person; nil is silent.
	Progress io.Writer
	// Getenv looks up III_VM_KERNEL, III_VM_MODULES and what the package client
	// needs (PATH, HOME, proxies); usually os.Getenv.
	Getenv func(string) string
	// Update asks the package lists for a newer kernel even when one is there.
	Update bool
}

// say tells a person what is going on. Progress is a courtesy: that it cannot
// be written does not stop the work.
func (o *Options) say(format string, args ...any) {
	if o.Progress != nil {
		fmt.Fprintf(o.Progress, format+"\n", args...) //nolint:errcheck // see above
	}
}

// note logs the kernel that Setup ends with.
func (o *Options) note(k *Kernel) {
	o.Log.Info("guest kernel ready", "release", k.Release, "version", k.Version)
	if k.Indirect != "" {
		o.Log.Warn("the guest kernel starts slower than it could", "release", k.Release, "reason", k.Indirect)
	}
}

// Setup makes sure that this host has a guest kernel and returns it. With one
// there already it touches neither network nor package lists, unless o.Update.
//
// With III_VM_KERNEL set it unpacks that kernel. Otherwise it fetches Debian's
// linux-image-cloud-<arch> with apt-get download, which needs no root and
// installs nothing; apt checks the package against its signed index. Missing or
// outdated package lists are brought up to date once when running as root, else
// the error asks for it. Concurrent calls, also of other processes, do the work
// once. ctx ends it at any point.
func Setup(ctx context.Context, o Options) (*Kernel, error) {
	if own := o.Getenv(envKernel); own != "" {
		k, err := setupOwn(ctx, o.Dir, own, o.Getenv(envModules), o.say)
		if err != nil {
			return nil, err
		}
		o.note(k)
		return k, nil
	}
	if !o.Update {
		if k, err := current(o.Dir); err == nil {
			return k, nil
		}
	}
	lock, err := lockDir(ctx, filepath.Join(o.Dir, kernelsDir), func() {
		o.say("kernel: waiting for another setup to end")
	})
	if err != nil {
		return nil, fmt.Errorf("set up the guest kernel: %w", err)
	}
	defer lock.Close() //nolint:errcheck // only a lock
	if !o.Update {
		if k, err := current(o.Dir); err == nil {
			return k, nil
		}
	}
	k, err := fetch(ctx, &o)
	if err != nil {
		return nil, fmt.Errorf("set up the guest kernel: %w", err)
	}
	return k, nil
}

// fetch gets the newest packaged kernel and makes it the current one. The
// caller holds the lock.
func fetch(ctx context.Context, o *Options) (k *Kernel, err error) {
	a, err := newApt(o)
	if err != nil {
		return nil, err
	}
	old, err := current(o.Dir)
	if err != nil && !errors.Is(err, ErrNoKernel) {
		return nil, err
	}
	var have string
	if old != nil {
		have = old.Version
	}
	tmp, err := os.MkdirTemp(filepath.Join(o.Dir, kernelsDir), tempPrefix)
	if err != nil {
		return nil, err
	}
	// It goes in any case: what counts has then left it.
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()

	unpacked, version, err := a.fetch(ctx, "linux-image-cloud-"+runtime.GOARCH, have, tmp)
	if err != nil {
		return nil, err
	}
	if unpacked == "" {
		o.say("kernel: %s (%s) is the newest", old.Release, old.Version)
		return old, nil
	}
	if k, err = buildPackaged(ctx, o, tmp, unpacked, version); err != nil {
		return nil, err
	}
	if err := makeCurrent(o.Dir, k, old); err != nil {
		return nil, err
	}
	o.say("kernel: %s (%s) is ready, %d modules", k.Release, k.Version, len(k.Modules))
	o.note(k)
	return k, nil
}

// buildPackaged turns the unpacked files of a kernel package into a kernel.
func buildPackaged(ctx context.Context, o *Options, tmp, unpacked, version string) (*Kernel, error) {
	image, err := oneMatch(filepath.Join(unpacked, "boot", "vmlinuz-*"))
	if err != nil {
		return nil, err
	}
	o.say("kernel: unpacking %s", filepath.Base(image))
	made := filepath.Join(tmp, "made")
	if err := os.Mkdir(made, 0o700); err != nil {
		return nil, err
	}
	m := manifest{Version: version}
	err = build(ctx, made, image, func(release string) string {
		// Debian 13 moved everything below /usr.
		modules := filepath.Join(unpacked, "usr", "lib", "modules", release)
		if _, err := os.Stat(modules); err != nil {
			modules = filepath.Join(unpacked, "lib", "modules", release)
		}
		return modules
	}, &m)
	if err != nil {
		return nil, err
	}
	return publish(o.Dir, made, &m)
}

func oneMatch(pattern string) (string, error) {
	found, err := filepath.Glob(pattern)
	if err != nil {
		return "", err
	}
	if len(found) != 1 {
		return "", fmt.Errorf("the kernel package has %d files %s instead of one", len(found), filepath.Base(pattern))
	}
	return found[0], nil
}

// makeCurrent points Find at k and removes the kernels that came from packages
// before old. old stays: a VM may be about to start from it.
func makeCurrent(root string, k, old *Kernel) error {
	dir := filepath.Join(root, kernelsDir)
	if err := writeSynced(dir, currentName, []byte(filepath.Base(k.dir))); err != nil {
		return err
	}
	if err := syncDir(dir); err != nil {
		return err
	}
	return eachKernel(root, func(name string, m *manifest, _ time.Time) error {
		if name == filepath.Base(k.dir) || old != nil && name == filepath.Base(old.dir) {
			return nil
		}
		if m != nil && m.Version == ownVersion {
			return nil
		}
		return os.RemoveAll(filepath.Join(dir, name))
	})
}

// eachKernel calls visit with every kernel directory; its manifest is nil where
// it cannot be used. used is when it was last made or asked for.
func eachKernel(root string, visit func(name string, m *manifest, used time.Time) error) error {
	entries, err := os.ReadDir(filepath.Join(root, kernelsDir))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil || !e.IsDir() || !validName(e.Name()) {
			continue
		}
		_, m, err := load(root, e.Name())
		if err != nil {
			m = nil
		}
		if err := visit(e.Name(), m, info.ModTime()); err != nil {
			return err
		}
	}
	return nil
}
