package catalog_test

import (
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/catalog"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
)

func open(t *testing.T, cfg catalog.Config) *catalog.Catalog {
	t.Helper()
	c, err := catalog.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestNew_RefusesBadCustomImages(t *testing.T) {
	t.Parallel()
	for name, words := range map[string]string{"python": "shadows a built-in preset", "node": "shadows a built-in preset", "": "must not be empty"} {
		_, err := catalog.New(catalog.Config{Custom: map[string]string{name: "x"}})
		if err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func TestResolve(t *testing.T) {
	t.Parallel()
	c := open(t, catalog.Config{
		Custom:  map[string]string{"app": "ghcr.io/acme/app:1", "ghcr.io/acme/b:2": "ghcr.io/acme/b:2", "hidden": "x"},
		Allowed: []string{"python", "app", "ghcr.io/acme/b:2", "nosuch"},
	})
	for name, want := range map[string]catalog.Image{
		"python":           {Name: "python", Ref: "docker.io/iiidev/python:latest", Kind: catalog.Preset},
		"app":              {Name: "app", Ref: "ghcr.io/acme/app:1", Kind: catalog.Custom},
		"ghcr.io/acme/b:2": {Name: "ghcr.io/acme/b:2", Ref: "ghcr.io/acme/b:2", Kind: catalog.Custom},
	} {
		if got, err := c.Resolve(name); err != nil || got != want {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
	for _, name := range []string{"node", "hidden", "nosuch", "Python", " python", "", "ghcr.io/acme/app:1"} {
		_, err := c.Resolve(name)
		if !errors.Is(err, fault.S100) {
			t.Errorf("%q: %v", name, err)
			continue
		}
		if !strings.Contains(err.Error(), "allowed are python, app, ghcr.io/acme/b:2") {
			t.Errorf("%q: the allowed set is not in %v", name, err)
		}
	}
}

func TestResolve_EmptyAllowListDeniesAll(t *testing.T) {
	t.Parallel()
	c := open(t, catalog.Config{})
	if _, err := c.Resolve("python"); !errors.Is(err, fault.S100) || !strings.Contains(err.Error(), "image_allowlist") {
		t.Errorf("error %v", err)
	}
}

func TestImages_ShowsAlsoWhatIsNotAllowed(t *testing.T) {
	t.Parallel()
	c := open(t, catalog.Config{Custom: map[string]string{"b": "r/b", "a": "r/a", "Z": "r/Z"}})
	var names []string
	for _, image := range c.Images() {
		names = append(names, image.Name+"="+string(image.Kind))
	}
	if want := []string{"python=preset", "node=preset", "Z=custom", "a=custom", "b=custom"}; !reflect.DeepEqual(names, want) {
		t.Errorf("got %v, want %v", names, want)
	}
}

func TestCheckSize(t *testing.T) {
	t.Parallel()
	two, zero, thousand, most := uint32(2), uint32(0), uint32(1000), uint32(1<<32-1)
	c := open(t, catalog.Config{Caps: map[string]catalog.Cap{
		"both": {CPUs: &two, MemoryMiB: &thousand}, "cpus": {CPUs: &two}, "none": {}, "zero": {MemoryMiB: &zero}, "most": {CPUs: &most},
	}})
	for _, test := range []struct {
		image        string
		cpus, memory uint32
		want         string // in the message; "" is no error
	}{
		{"both", 2, 1000, ""},
		{"both", 3, 1001, "cpus is 3"},
		{"both", 2, 1001, "memory_mb is 1001"},
		{"cpus", 2, 1 << 30, ""},
		{"none", 255, 1 << 30, ""},
		{"other", 255, 1 << 30, ""},
		{"zero", 255, 64, "memory_mb is 64"},
		{"most", 255, 64, ""},
	} {
		err := c.CheckSize(test.image, test.cpus, test.memory)
		switch {
		case test.want == "" && err != nil:
			t.Errorf("%v: %v", test, err)
		case test.want != "" && (!errors.Is(err, fault.S400) || !strings.Contains(err.Error(), test.want)):
			t.Errorf("%v: %v", test, err)
		}
	}
}

func TestResolveDirect(t *testing.T) {
	t.Parallel()
	local := func(name string) bool { return name == "mine" }
	for name, kind := range map[string]catalog.Kind{
		"python": catalog.Preset, "mine": catalog.Direct, "oci:./x": catalog.Direct, "docker-archive:x.tar": catalog.Direct,
		"ghcr.io/acme/app:1": catalog.Direct, "localhost/x": catalog.Direct, "host:5000/x": catalog.Direct,
	} {
		if got, err := catalog.ResolveDirect(name, local); err != nil || got.Kind != kind || got.Name != name {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
	for _, name := range []string{"alpine", "library/alpine", "", "ghcr.io/"} {
		if _, err := catalog.ResolveDirect(name, local); !errors.Is(err, fault.S100) {
			t.Errorf("%q: %v", name, err)
		}
	}
}
