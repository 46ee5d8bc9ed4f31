// Package config decodes the adapter's configuration entry of the iii engine: its
// fields, their defaults, and what makes an entry unusable. The adapter reads it
// once, at its start.
//
// Fields, defaults and rules follow the contract's README and the sandbox contract
// 1.1.
package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/catalog"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/strictjson"
)

// The smallest sandbox (contract: create).
const (
	minCPUs      = 1
	minMemoryMiB = 64
)

// Config is a configuration in force. It does not change and may be shared.
type Config struct {
	// AutoInstall pulls a missing image at the first create.
	AutoInstall bool
	// Catalog has the images: presets, custom ones, allow-list, ceilings.
	Catalog *catalog.Catalog
	// IdleTimeout ends sandboxes whose create does not say one.
	IdleTimeout time.Duration
	// MaxSandboxes is how many may be there at once; 0 allows none.
	MaxSandboxes int
	// MaxExecs is how many programs may run at once in one sandbox, at least 1.
	MaxExecs int
	// MaxExecTimeout is the ceiling of every program's time, at least 1 ms.
	MaxExecTimeout time.Duration
	// CPUs and MemoryMiB are the size of sandboxes whose create does not say one.
	CPUs, MemoryMiB int
	// Warnings are what an operator should know about the entry, one sentence each.
	Warnings []string
}

// entry is the configuration as it is written.
type entry struct {
	AutoInstall      bool              `json:"auto_install"`
	ImageAllowlist   []string          `json:"image_allowlist"`
	IdleTimeoutSecs  uint64            `json:"default_idle_timeout_secs"`
	MaxSandboxes     uint32            `json:"max_concurrent_sandboxes"`
	MaxExecs         uint32            `json:"max_concurrent_exec_per_sandbox"`
	MaxExecTimeoutMs uint64            `json:"max_exec_timeout_ms"`
	CPUs             uint32            `json:"default_cpus"`
	MemoryMiB        uint32            `json:"default_memory_mb"`
	PerImageCaps     map[string]capped `json:"per_image_caps"`
	CustomImages     map[string]string `json:"custom_images"`
}

type capped struct {
	CPUs      optional `json:"max_cpus"`
	MemoryMiB optional `json:"max_memory_mb"`
}

// optional is a number that may be left out, but not be null.
type optional struct{ value *uint32 }

// DecodeStrict is strictjson.Decoder.
func (o *optional) DecodeStrict(raw json.RawMessage, path string) error {
	o.value = new(uint32)
	return strictjson.Decode(raw, path, o.value)
}

// Parse decodes a configuration entry's value. A missing field has its default;
// null, a wrong type and what cannot work are errors. Unknown fields are ignored.
func Parse(value []byte) (*Config, error) {
	// The wrapper hides everything below it: told first.
	var wrapped struct {
		Sandbox present `json:"sandbox"`
	}
	if err := strictjson.Unmarshal(value, &wrapped); err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	if wrapped.Sandbox {
		return nil, errors.New("configuration: the fields are below \"sandbox\", the legacy wrapped shape: move them to the top level")
	}
	e := entry{
		AutoInstall: true, IdleTimeoutSecs: 300, MaxSandboxes: 32, MaxExecs: 4, MaxExecTimeoutMs: 300_000,
		CPUs: 1, MemoryMiB: 512,
	}
	if err := strictjson.Unmarshal(value, &e); err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	c, err := e.config()
	if err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	return c, nil
}

// Default is the configuration of an engine that has no entry: no image may boot.
func Default() *Config {
	c, err := Parse([]byte("{}"))
	if err != nil { // nothing in it can be wrong
		return &Config{}
	}
	return c
}

func (e *entry) config() (*Config, error) {
	switch {
	case e.CPUs < minCPUs:
		return nil, fmt.Errorf("default_cpus is %d, must be at least %d", e.CPUs, minCPUs)
	case e.MemoryMiB < minMemoryMiB:
		return nil, fmt.Errorf("default_memory_mb is %d, must be at least %d", e.MemoryMiB, minMemoryMiB)
	}
	caps := map[string]catalog.Cap{}
	for name, c := range e.PerImageCaps {
		caps[name] = catalog.Cap{CPUs: c.CPUs.value, MemoryMiB: c.MemoryMiB.value}
	}
	images, err := catalog.New(catalog.Config{Custom: e.CustomImages, Allowed: e.ImageAllowlist, Caps: caps})
	if err != nil {
		return nil, err
	}
	c := &Config{
		AutoInstall: e.AutoInstall, Catalog: images,
		IdleTimeout:  saturated(e.IdleTimeoutSecs, time.Second),
		MaxSandboxes: int(e.MaxSandboxes), MaxExecs: max(1, int(e.MaxExecs)),
		MaxExecTimeout: max(time.Millisecond, saturated(e.MaxExecTimeoutMs, time.Millisecond)),
		CPUs:           int(e.CPUs), MemoryMiB: int(e.MemoryMiB),
	}
	if e.MaxExecs == 0 {
		c.Warnings = append(c.Warnings, "max_concurrent_exec_per_sandbox is 0, which means 1")
	}
	if len(e.ImageAllowlist) == 0 {
		c.Warnings = append(c.Warnings, "image_allowlist is empty: every create is refused with S100")
	}
	return c, nil
}

// present is true for a field that is there, whatever it holds.
type present bool

// DecodeStrict is strictjson.Decoder.
func (p *present) DecodeStrict(json.RawMessage, string) error {
	*p = true
	return nil
}

// saturated is n units, or the longest time there is.
func saturated(n uint64, unit time.Duration) time.Duration {
	if n > uint64(math.MaxInt64/unit) {
		return math.MaxInt64
	}
	return time.Duration(n) * unit
}
