package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/google/renameio/v2"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/flock"
)

// cache keeps .debs by SHA256 and name, and per image the list of packages last
// resolved. One process at a time uses it: see lockCache.
type cache struct {
	dir  string
	lock *os.File
}

// lockCache opens the cache at dir, waiting until no other build has it or ctx
// ends; wait is called once when that is needed. What killed builds left behind is
// removed. The kernel frees the lock with the process; the caller calls close.
func lockCache(ctx context.Context, dir string, wait func()) (*cache, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	lock, err := flock.Open(filepath.Join(dir, "lock"))
	if err != nil {
		return nil, err
	}
	if err = flock.Try(lock, flock.Exclusive); errors.Is(err, flock.ErrLocked) {
		wait()
		err = flock.Wait(ctx, lock, flock.Exclusive)
	}
	c := &cache{dir: dir, lock: lock}
	if err == nil {
		err = c.sweep()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", dir, err), lock.Close())
	}
	return c, nil
}

func (c *cache) close() error { return c.lock.Close() }

// temp makes a private directory on the cache's file system. The caller removes
// it; when it cannot, the next build does.
func (c *cache) temp() (string, error) { return os.MkdirTemp(c.dir, "tmp-") }

// files lists what is in the cache with this beginning and end of its name.
func (c *cache) files(prefix, suffix string) ([]string, error) {
	entries, err := os.ReadDir(c.dir)
	if err != nil {
		return nil, err
	}
	var list []string
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), prefix) && strings.HasSuffix(e.Name(), suffix) {
			list = append(list, filepath.Join(c.dir, e.Name()))
		}
	}
	return list, nil
}

// sweep removes what killed builds left.
func (c *cache) sweep() error {
	left, err := c.files("tmp-", "")
	if err != nil {
		return err
	}
	var errs []error
	for _, p := range left {
		errs = append(errs, os.RemoveAll(p))
	}
	return errors.Join(errs...)
}

// path is where the .deb of p is kept.
func (c *cache) path(p pkg) string { return filepath.Join(c.dir, p.SHA256+"-"+p.File) }

// missing lists the packages that are not in the cache with the right content.
func (c *cache) missing(pkgs []pkg) ([]pkg, error) {
	var list []pkg
	for _, p := range pkgs {
		ok, err := holds(c.path(p), p)
		if err != nil {
			return nil, err
		}
		if !ok {
			list = append(list, p)
		}
	}
	return list, nil
}

// holds reports whether file is exactly p's .deb.
func holds(file string, p pkg) (bool, error) {
	f, err := os.Open(file)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	h := sha256.New()
	n, err := io.Copy(h, f)
	if err := errors.Join(err, f.Close()); err != nil {
		return false, err
	}
	return n == p.Size && hex.EncodeToString(h.Sum(nil)) == p.SHA256, nil
}

// fetch brings what is missing of pkgs into the cache by download, which puts
// each package's File into a directory.
func (c *cache) fetch(ctx context.Context, pkgs []pkg, note func(string), download func(ctx context.Context, dir string, pkgs []pkg) error) (err error) {
	need, err := c.missing(pkgs)
	if err != nil || len(need) == 0 {
		return err
	}
	var bytes int64
	for _, p := range need {
		bytes += p.Size
	}
	note(fmt.Sprintf("fetching %d packages (%.1f MiB)", len(need), float64(bytes)/(1<<20)))
	dir, err := c.temp()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	fetchErr := download(ctx, dir, need)
	for _, p := range need { // also after an error: what came is kept
		file := filepath.Join(dir, p.File)
		if ok, err := holds(file, p); err != nil || !ok {
			continue
		}
		if err := os.Rename(file, c.path(p)); err != nil {
			return err
		}
	}
	still, err := c.missing(need)
	if err != nil || len(still) == 0 {
		return err
	}
	if fetchErr == nil {
		fetchErr = errors.New("what arrived is not what the index says")
	}
	return fmt.Errorf("%w: %w", errIncomplete(still), fetchErr)
}

// errIncomplete names the packages that are neither cached nor to be had.
func errIncomplete(pkgs []pkg) error {
	return fmt.Errorf("missing in the cache and not to be fetched: %s; go online, or copy the cache of a host that has them", strings.Join(exact(pkgs), " "))
}

const planExt = ".plan.json"

func (c *cache) planFile(image string) string { return filepath.Join(c.dir, image+planExt) }

// savePlan keeps the resolved packages of an image for hosts that lose their
// package lists.
func (c *cache) savePlan(image string, pkgs []pkg) error {
	data, err := json.MarshalIndent(pkgs, "", "  ")
	if err != nil {
		return err
	}
	return renameio.WriteFile(c.planFile(image), append(data, '\n'), 0o600)
}

// prune removes the .debs that no saved plan names: older versions.
func (c *cache) prune() error {
	plans, err := c.files("", planExt)
	if err != nil {
		return err
	}
	wanted := map[string]bool{}
	for _, file := range plans {
		pkgs, err := c.plan(strings.TrimSuffix(filepath.Base(file), planExt))
		if err != nil {
			return err
		}
		for _, p := range pkgs {
			wanted[c.path(p)] = true
		}
	}
	debs, err := c.files("", ".deb")
	if err != nil {
		return err
	}
	var errs []error
	for _, file := range debs {
		if !wanted[file] {
			errs = append(errs, os.Remove(file))
		}
	}
	return errors.Join(errs...)
}

// plan returns the packages saved last, or nil when there are none.
func (c *cache) plan(image string) ([]pkg, error) {
	data, err := os.ReadFile(c.planFile(image))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var pkgs []pkg
	if err := json.Unmarshal(data, &pkgs); err != nil {
		return nil, fmt.Errorf("%s: %w: remove it", c.planFile(image), err)
	}
	return pkgs, nil
}
