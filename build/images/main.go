// Command images makes the images that sandboxes start from, as OCI image
// layouts, out of nothing but Debian packages: no registry, no container
// runtime, no root. The same package versions give the same digest, whoever
// builds them, where and when.
//
//	go run ./build/images [--out DIR] [--cache DIR] [--if-missing] python|node|busybox|all
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := command(ctx, os.Args[1:], os.Getenv, os.Stderr)
	stop()
	os.Exit(code)
}

// options are what the command line asks for.
type options struct {
	out, cache string
	ifMissing  bool
	recipes    []recipe
}

// command runs the program and returns its exit status: 0, 1 for a failed
// build, 2 for a wrong command line.
func command(ctx context.Context, args []string, getenv func(string) string, stderr io.Writer) int {
	o, err := parse(args, getenv, stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		_, _ = fmt.Fprintf(stderr, "images: %v\n", err)
		return 2
	}
	if err := buildAll(ctx, o, stderr); err != nil {
		_, _ = fmt.Fprintf(stderr, "images: %v\n", err)
		return 1
	}
	return 0
}

func parse(args []string, getenv func(string) string, stderr io.Writer) (options, error) {
	var o options
	flags := flag.NewFlagSet("images", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.StringVar(&o.out, "out", "", "directory of image layouts (default: III_SANDBOX_IMAGE_DIR, else images in the data directory)")
	flags.StringVar(&o.cache, "cache", "", "directory of fetched packages (default: packages in the cache directory)")
	flags.BoolVar(&o.ifMissing, "if-missing", false, "leave images alone that are there, whatever their package versions")
	flags.Usage = func() {
		_, _ = fmt.Fprintf(stderr, "usage: images [--out DIR] [--cache DIR] [--if-missing] IMAGE...\nimages: all %s\n", strings.Join(names(), " "))
		flags.PrintDefaults()
	}
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	var err error
	if o.recipes, err = choose(flags.Args()); err != nil {
		return o, err
	}
	return o, o.fillPaths(getenv)
}

// fillPaths sets the directories that the command line left open.
func (o *options) fillPaths(getenv func(string) string) error {
	if o.out == "" {
		o.out = getenv("III_SANDBOX_IMAGE_DIR")
	}
	if o.out == "" || o.cache == "" {
		roots, err := layout.FromEnvironment(getenv)
		if err != nil {
			return err
		}
		if o.out == "" {
			o.out = roots.ImageLayouts()
		}
		if o.cache == "" {
			o.cache = roots.Packages()
		}
	}
	var errs [2]error
	o.out, errs[0] = filepath.Abs(o.out)
	o.cache, errs[1] = filepath.Abs(o.cache)
	return errors.Join(errs[:]...)
}

func names() []string {
	var list []string
	for _, r := range recipes() {
		list = append(list, r.name)
	}
	return list
}

// choose finds the recipes by name, each once.
func choose(args []string) ([]recipe, error) {
	if len(args) == 0 {
		return nil, fmt.Errorf("name an image: all %s", strings.Join(names(), " "))
	}
	want := map[string]bool{}
	for _, a := range args {
		want[a] = true
	}
	var chosen []recipe
	for _, r := range recipes() {
		if want["all"] || want[r.name] {
			chosen = append(chosen, r)
		}
		delete(want, r.name)
	}
	delete(want, "all")
	for a := range want {
		return nil, fmt.Errorf("there is no image %q: all %s", a, strings.Join(names(), " "))
	}
	return chosen, nil
}
