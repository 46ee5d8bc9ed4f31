package config_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/config"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
)

func parse(t *testing.T, text string) *config.Config {
	t.Helper()
	c, err := config.Parse([]byte(text))
	if err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return c
}

func TestParse_DefaultOfEachKey(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]*config.Config{
		"empty": parse(t, `{}`), "unknown keys": parse(t, `{"sandbox_dir":1,"Auto_Install":false,"x":null}`),
	} {
		if !c.AutoInstall || c.DefaultIdleTimeoutSecs != 300 || c.MaxSandboxes != 32 || c.MaxExecs != 4 ||
			c.MaxExecTimeoutMs != 300_000 || c.DefaultCPUs != 1 || c.DefaultMemoryMiB != 512 {
			t.Errorf("%s: %+v", name, c)
		}
		if _, err := c.Catalog.Resolve("python"); !errors.Is(err, fault.S100) {
			t.Errorf("%s: with no allow-list python is %v", name, err)
		}
		if err := c.Catalog.CheckSize("python", 255, 1<<20); err != nil {
			t.Errorf("%s: without caps: %v", name, err)
		}
		if len(c.Catalog.Images()) != 2 {
			t.Errorf("%s: images %v", name, c.Catalog.Images())
		}
	}
}

func TestParse_EachKey(t *testing.T) {
	t.Parallel()
	c := parse(t, `{"auto_install":false,"image_allowlist":["python","node","my-app"],"default_idle_timeout_secs":1,
		"max_concurrent_sandboxes":2,"max_concurrent_exec_per_sandbox":3,"max_exec_timeout_ms":4,"default_cpus":5,"default_memory_mb":64,
		"per_image_caps":{"python":{"max_cpus":4,"max_memory_mb":2048},"node":{"max_cpus":2}},"custom_images":{"my-app":"ghcr.io/acme/my-app:1.2.3"}}`)
	if c.AutoInstall || c.DefaultIdleTimeoutSecs != 1 || c.MaxSandboxes != 2 || c.MaxExecs != 3 ||
		c.MaxExecTimeoutMs != 4 || c.DefaultCPUs != 5 || c.DefaultMemoryMiB != 64 {
		t.Errorf("%+v", c)
	}
	if image, err := c.Catalog.Resolve("my-app"); err != nil || image.Ref != "ghcr.io/acme/my-app:1.2.3" {
		t.Errorf("%v %v", image, err)
	}
	if err := c.Catalog.CheckSize("python", 4, 2049); !errors.Is(err, fault.S400) {
		t.Errorf("memory over the cap: %v", err)
	}
	if err := c.Catalog.CheckSize("node", 2, 1<<20); err != nil {
		t.Errorf("a cap with one field left out caps the other: %v", err)
	}
}

func TestParse_Zeros(t *testing.T) {
	t.Parallel()
	c := parse(t, `{"max_concurrent_exec_per_sandbox":0,"max_exec_timeout_ms":0,"max_concurrent_sandboxes":0,"default_idle_timeout_secs":0}`)
	if c.MaxExecs != 0 || c.MaxExecTimeoutMs != 0 || c.MaxSandboxes != 0 || c.DefaultIdleTimeoutSecs != 0 {
		t.Errorf("%+v", c)
	}
}

func TestParse_Refuses(t *testing.T) {
	t.Parallel()
	for text, words := range map[string]string{
		``:                                                   "not JSON",
		`null`:                                               "must be an object, not null",
		`[]`:                                                 "must be an object",
		`"x"`:                                                "must be an object",
		`{"sandbox":{"auto_install":true}}`:                  "legacy wrapped shape",
		`{"sandbox":null,"auto_install":"x"}`:                "legacy wrapped shape",
		`{"auto_install":"true"}`:                            "auto_install",
		`{"auto_install":null}`:                              "auto_install",
		`{"image_allowlist":null}`:                           "image_allowlist",
		`{"image_allowlist":"python"}`:                       "image_allowlist",
		`{"image_allowlist":[1]}`:                            "image_allowlist[0]",
		`{"default_idle_timeout_secs":-1}`:                   "default_idle_timeout_secs",
		`{"default_idle_timeout_secs":1.5}`:                  "default_idle_timeout_secs",
		`{"default_idle_timeout_secs":null}`:                 "default_idle_timeout_secs",
		`{"max_concurrent_sandboxes":"32"}`:                  "max_concurrent_sandboxes",
		`{"max_concurrent_sandboxes":4294967296}`:            "max_concurrent_sandboxes",
		`{"max_concurrent_exec_per_sandbox":null}`:           "max_concurrent_exec_per_sandbox",
		`{"max_exec_timeout_ms":null}`:                       "max_exec_timeout_ms",
		`{"default_cpus":null}`:                              "default_cpus",
		`{"default_cpus":0}`:                                 "at least 1",
		`{"default_memory_mb":63}`:                           "at least 64",
		`{"default_memory_mb":null}`:                         "default_memory_mb",
		`{"per_image_caps":null}`:                            "per_image_caps",
		`{"per_image_caps":{"python":null}}`:                 `per_image_caps["python"]`,
		`{"per_image_caps":{"python":{"max_cpus":null}}}`:    `per_image_caps["python"].max_cpus`,
		`{"per_image_caps":{"python":{"max_memory_mb":-1}}}`: `per_image_caps["python"].max_memory_mb`,
		`{"custom_images":null}`:                             "custom_images",
		`{"custom_images":{"app":null}}`:                     `custom_images["app"]`,
		`{"custom_images":{"python":"x/y:1"}}`:               "shadows a built-in preset",
		`{"custom_images":{"node":"x/y:1"}}`:                 "shadows a built-in preset",
		`{"custom_images":{"":"x/y:1"}}`:                     "must not be empty",
	} {
		if _, err := config.Parse([]byte(text)); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("%s: %v, want %q", text, err, words)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(`{"per_image_caps":{"python":{"max_cpus":1}},"custom_images":{"a":"b"}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := config.Parse(data)
		if err == nil && (c.DefaultCPUs < 1 || c.DefaultMemoryMiB < 64 || c.Catalog == nil) {
			t.Errorf("%q: %+v", data, c)
		}
	})
}
