package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/cleanup"
)

// builder makes images from one cache into one directory of layouts.
type builder struct {
	out      string
	cache    *cache
	progress io.Writer
}

func (b *builder) note(image, text string) {
	// A progress line that nobody can read stops no build.
	_, _ = fmt.Fprintf(b.progress, "%s: %s\n", image, text)
}

// build makes the image of r and its layout.
func (b *builder) build(ctx context.Context, r recipe) (err error) {
	pkgs, err := b.packages(ctx, r)
	if err != nil {
		return err
	}
	b.note(r.name, fmt.Sprintf("unpacking %d packages", len(pkgs)))
	work, err := b.cache.temp()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	img, err := b.assemble(ctx, r, pkgs, work)
	if err != nil {
		return err
	}
	dir := filepath.Join(b.out, r.name)
	wrote, err := publish(img, dir)
	if err != nil {
		return err
	}
	return report(b.progress, r.name, img, dir, wrote)
}

// packages resolves r and sees to it that every .deb is in the cache. On a host
// without package lists it takes what was resolved last, if all of it is there.
func (b *builder) packages(ctx context.Context, r recipe) (pkgs []pkg, err error) {
	work, err := b.cache.temp()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	client, err := newApt(ctx, work)
	if err != nil {
		return nil, err
	}
	note := func(text string) { b.note(r.name, text) }
	if err := client.useDebian(ctx, note); errors.Is(err, errNoIndex) {
		return b.savedPackages(r, err)
	} else if err != nil {
		return nil, err
	}
	pkgs, err = client.resolve(ctx, r)
	if err != nil {
		return nil, err
	}
	if err := b.cache.fetch(ctx, pkgs, note, client.download); err != nil {
		return nil, err
	}
	return pkgs, b.cache.savePlan(r.name, pkgs)
}

func (b *builder) savedPackages(r recipe, cause error) ([]pkg, error) {
	pkgs, err := b.cache.plan(r.name)
	if err != nil {
		return nil, err
	}
	if pkgs == nil {
		return nil, cause
	}
	missing, err := b.cache.missing(pkgs)
	if err != nil {
		return nil, err
	}
	if len(missing) > 0 {
		return nil, fmt.Errorf("%w; %w", cause, errIncomplete(missing))
	}
	b.note(r.name, "no package lists on this host: taking the packages of the last build from the cache")
	return pkgs, nil
}

// assemble turns cached packages into an image whose layer is a file in work.
func (b *builder) assemble(ctx context.Context, r recipe, pkgs []pkg, work string) (img v1.Image, err error) {
	t, err := newTree(work)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, t.close()) }()
	for _, p := range baseFirst(pkgs) {
		if err := unpack(ctx, t, p.Name, b.cache.path(p)); err != nil {
			return nil, err
		}
	}
	run := filepath.Join(work, "run")
	if err := os.Mkdir(run, 0o700); err != nil {
		return nil, err
	}
	for _, do := range r.finish {
		if err := do(ctx, t, run); err != nil {
			return nil, err
		}
	}
	if err := t.write("usr/share/iii-image/packages", 0o644, []byte(packageList(pkgs))); err != nil {
		return nil, err
	}
	layer, err := writeLayer(t, filepath.Join(work, "layer.tar.zst"))
	if err != nil {
		return nil, err
	}
	return image(r, pkgs, runtime.GOARCH, t.newest, layer)
}

// baseFirst orders packages so that base-files sets the modes of the common
// directories; the rest stays in order of name.
func baseFirst(pkgs []pkg) []pkg {
	var first, rest []pkg
	for _, p := range pkgs {
		if p.Name == "base-files" {
			first = append(first, p)
		} else {
			rest = append(rest, p)
		}
	}
	return append(first, rest...)
}

// buildAll makes the images of names into out, one after the other.
func buildAll(ctx context.Context, o options, progress io.Writer) (err error) {
	var undo cleanup.Stack
	defer func() { err = errors.Join(err, undo.Run()) }()
	if o.ifMissing {
		o.recipes = missingImages(o.recipes, o.out)
		if len(o.recipes) == 0 {
			return nil
		}
	}
	c, err := lockCache(ctx, o.cache, func() {
		_, _ = fmt.Fprintf(progress, "another build uses %s: waiting for it\n", o.cache)
	})
	if err != nil {
		return err
	}
	undo.Add(c.close)
	b := &builder{out: o.out, cache: c, progress: progress}
	for _, r := range o.recipes {
		if err := b.build(ctx, r); err != nil {
			return fmt.Errorf("image %s: %w", r.name, err)
		}
	}
	return c.prune()
}

// missingImages leaves out the recipes whose layout is there and whole.
func missingImages(all []recipe, out string) []recipe {
	var need []recipe
	for _, r := range all {
		if _, err := check(filepath.Join(out, r.name)); err != nil {
			need = append(need, r)
		}
	}
	return need
}
