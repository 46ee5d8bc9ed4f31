// Package catalog knows the images by name: the presets, the operator's custom
// images, which of them may boot and how large; and on the command line whatever
// else names an image directly. It knows nothing of what lies on the host.
//
// Names, their order and the rules follow the sandbox contract 1.1.
package catalog

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
)

// Kind tells where a name comes from.
type Kind string

// Preset images are the same everywhere, Custom ones are the operator's, Direct
// ones were named by their source on the command line.
const (
	Preset Kind = "preset"
	Custom Kind = "custom"
	Direct Kind = "direct"
)

// Image is a name and where the image comes from.
type Image struct {
	// Name is what the user wrote.
	Name string
	// Ref is the source in imagestore's words: a registry reference, or
	// "oci:" and "docker-archive:" with a path.
	Ref  string
	Kind Kind
}

// Presets returns the built-in images in the contract's order.
func Presets() []Image {
	return []Image{
		{Name: "python", Ref: "docker.io/iiidev/python:latest", Kind: Preset},
		{Name: "node", Ref: "docker.io/iiidev/node:latest", Kind: Preset},
	}
}

// Cap is the ceiling of an image's sandboxes; nil leaves that dimension uncapped.
type Cap struct {
	CPUs, MemoryMiB *uint32
}

// Config is what the operator says about images.
type Config struct {
	// Custom maps names to registry references, which are looked at when the image
	// is pulled.
	Custom map[string]string
	// Allowed are the names that may boot; none by default. A name that is not
	// known changes nothing.
	Allowed []string
	// Caps maps names to ceilings.
	Caps map[string]Cap
}

// Catalog is what the functions know of images. It does not change and may be
// shared.
type Catalog struct {
	images  []Image
	allowed map[string]bool
	caps    map[string]Cap
}

// New checks the operator's images: a name that is empty or a preset's is an
// error.
func New(cfg Config) (*Catalog, error) {
	c := &Catalog{images: Presets(), allowed: map[string]bool{}, caps: maps.Clone(cfg.Caps)}
	for _, name := range slices.Sorted(maps.Keys(cfg.Custom)) {
		if name == "" {
			return nil, errors.New("custom_images: the name of an image must not be empty")
		}
		if slices.Contains(presetNames(), name) {
			return nil, fmt.Errorf("custom_images: %q shadows a built-in preset: choose another name", name)
		}
		c.images = append(c.images, Image{Name: name, Ref: cfg.Custom[name], Kind: Custom})
	}
	for _, name := range cfg.Allowed {
		c.allowed[name] = true
	}
	return c, nil
}

// Images returns every image that is known, whether it is allowed or not: presets
// first, then the custom ones sorted by name.
func (c *Catalog) Images() []Image { return slices.Clone(c.images) }

// Resolve finds the image that a caller named, by its exact name. One that is
// not known or not allowed is S100.
func (c *Catalog) Resolve(name string) (Image, error) {
	for _, image := range c.images {
		if image.Name == name && c.allowed[name] {
			return image, nil
		}
	}
	return Image{}, fault.UnknownImage(name, c.bootable())
}

// bootable returns the names that Resolve accepts.
func (c *Catalog) bootable() []string {
	var names []string
	for _, image := range c.images {
		if c.allowed[image.Name] {
			names = append(names, image.Name)
		}
	}
	return names
}

// CheckSize compares the size of a sandbox with the image's ceiling, CPUs first;
// more is S400.
func (c *Catalog) CheckSize(image string, cpus, memoryMiB uint32) error {
	ceiling := c.caps[image]
	if most := ceiling.CPUs; most != nil && cpus > *most {
		return fault.ImageCap(image, "cpus", int(cpus), int(*most))
	}
	if most := ceiling.MemoryMiB; most != nil && memoryMiB > *most {
		return fault.ImageCap(image, "memory_mb", int(memoryMiB), int(*most))
	}
	return nil
}

// ResolveDirect resolves a name given by the person who runs the program, who may use
// any source: a preset, "oci:<layout>[:tag]", "docker-archive:<tar>", or a
// registry reference with its host ("ghcr.io/acme/app:1"), or the name of a layout
// in the image folder, which local tells. Another bare name is S100: it would
// silently mean an image of a public registry.
func ResolveDirect(name string, local func(name string) bool) (Image, error) {
	for _, image := range Presets() {
		if image.Name == name {
			return image, nil
		}
	}
	if local(name) || strings.HasPrefix(name, "oci:") || strings.HasPrefix(name, "docker-archive:") || qualified(name) {
		return Image{Name: name, Ref: name, Kind: Direct}, nil
	}
	return Image{}, fault.UnknownImage(name, presetNames())
}

// qualified reports whether the first path element of ref is a registry's host
// by docker's rule: it has a dot or a port, or is localhost.
func qualified(ref string) bool {
	host, rest, ok := strings.Cut(ref, "/")
	return ok && rest != "" && (host == "localhost" || strings.ContainsAny(host, ".:"))
}

func presetNames() []string {
	var names []string
	for _, image := range Presets() {
		names = append(names, image.Name)
	}
	return names
}
