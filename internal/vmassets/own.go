package vmassets

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// usedMark is how exactly the last use of an own kernel is recorded.
const usedMark = time.Hour

// findOwn returns the kernel that was made of image and modules, and makes it
// now where it was not yet or a file has changed since.
func findOwn(root, image, modules string) (*Kernel, error) {
	return setupOwn(context.Background(), root, image, modules, func(string, ...any) {})
}

// setupOwn is findOwn that can be ended and tells what it does.
func setupOwn(ctx context.Context, root, image, modules string, say func(string, ...any)) (*Kernel, error) {
	image, err := filepath.Abs(image)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", envKernel, err)
	}
	if modules != "" {
		if modules, err = filepath.Abs(modules); err != nil {
			return nil, fmt.Errorf("%s: %w", envModules, err)
		}
	}
	k, err := madeOf(root, image, modules)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", envKernel, err)
	}
	if k != nil {
		return k, nil
	}
	lock, err := lockDir(ctx, filepath.Join(root, kernelsDir), func() { say("kernel: waiting for another setup to end") })
	if err != nil {
		return nil, err
	}
	defer lock.Close() //nolint:errcheck // only a lock
	if k, err := madeOf(root, image, modules); k != nil || err != nil {
		return k, err
	}
	say("kernel: unpacking %s", image)
	if k, err = makeOwn(ctx, root, image, modules, say); err != nil {
		return nil, fmt.Errorf("%s: %w", envKernel, err)
	}
	say("kernel: %s is ready, %d modules", k.Release, len(k.Modules))
	return k, nil
}

// madeOf looks for the kernel made of these files as they are now; nil when
// there is none.
func madeOf(root, image, modules string) (*Kernel, error) {
	now, err := stampFile(image)
	if err != nil {
		return nil, err
	}
	var found *Kernel
	err = eachKernel(root, func(name string, m *manifest, used time.Time) error {
		if found != nil || m == nil || len(m.Sources) == 0 || m.Sources[0] != now || m.ModulesFrom != modules || changed(m.Sources[1:]) {
			return nil
		}
		k, _, err := load(root, name)
		if err != nil {
			return err
		}
		found = k
		// Mark it as used, so that it is not removed; a host that forbids it
		// loses only that.
		if t := time.Now(); t.Sub(used) > usedMark {
			_ = os.Chtimes(k.dir, t, t)
		}
		return nil
	})
	return found, err
}

// changed tells whether any of the files is not what it was.
func changed(sources []source) bool {
	return slices.ContainsFunc(sources, func(s source) bool {
		now, err := stampFile(s.Path)
		return err != nil || now != s
	})
}

// makeOwn makes a kernel of the user's files. The caller holds the lock.
func makeOwn(ctx context.Context, root, image, modules string, say func(string, ...any)) (k *Kernel, err error) {
	tmp, err := os.MkdirTemp(filepath.Join(root, kernelsDir), tempPrefix)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	before, err := stampFile(image)
	if err != nil {
		return nil, err
	}
	m := manifest{Version: ownVersion, ModulesFrom: modules, Sources: []source{before}}
	err = build(ctx, tmp, image, func(release string) string {
		if modules == "" {
			modules = installedModules(release)
		}
		if modules == "" {
			say("kernel: no modules for %s in /lib/modules: every driver must be built in; else set %s", release, envModules)
		}
		return modules
	}, &m)
	if err != nil {
		return nil, err
	}
	if k, err = publish(root, tmp, &m); err != nil {
		return nil, err
	}
	return k, pruneOwn(root)
}

// installedModules returns the directory of release's modules on this host, or
// nothing when there is none.
func installedModules(release string) string {
	dir := filepath.Join("/lib/modules", release)
	if info, err := os.Stat(filepath.Join(dir, "kernel")); err != nil || !info.IsDir() {
		return ""
	}
	return dir
}

// pruneOwn removes kernels of the user's own that were not used for a while,
// except for the last used few.
func pruneOwn(root string) error {
	type own struct {
		name string
		used time.Time
	}
	var all []own
	err := eachKernel(root, func(name string, m *manifest, used time.Time) error {
		if m != nil && m.Version == ownVersion && time.Since(used) > usedMark+time.Hour {
			all = append(all, own{name, used})
		}
		return nil
	})
	if err != nil || len(all) <= keepOwn {
		return err
	}
	slices.SortFunc(all, func(a, b own) int { return b.used.Compare(a.used) })
	var errs []error
	for _, o := range all[keepOwn:] {
		errs = append(errs, os.RemoveAll(filepath.Join(root, kernelsDir, o.name)))
	}
	return errors.Join(errs...)
}
