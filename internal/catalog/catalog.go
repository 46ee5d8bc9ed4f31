// Package catalog knows the images by name: the presets, and on the command
// line whatever else names an image directly.
package catalog

import (
	"strings"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
)

// Kind tells where a name comes from.
type Kind string

// Preset images are the same everywhere; Direct ones were named by their source.
const (
	Preset Kind = "preset"
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
