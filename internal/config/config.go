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

	"github.com/iii-hq/workers/sandbox-libkrun/internal/catalog"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/strictjson"
)

// The smallest sandbox (contract: create).
const (
	minCPUs      = 1
	minMemoryMiB = 64
)

// Config is a configuration, in the contract's units. It does not change and may
// be shared.
type Config struct {
	// AutoInstall pulls a missing image at the first create.
	AutoInstall bool
	// Catalog has the images: presets, custom ones, allow-list, ceilings.
	Catalog *catalog.Catalog
	// MaxSandboxes is how many may be there at once; 0 allows none.
	MaxSandboxes uint32
	// MaxExecs is how many programs may run at once in one sandbox; 0 means 1.
	MaxExecs uint32
	// MaxExecTimeoutMs is the ceiling of every program's time; 0 means 1.
	MaxExecTimeoutMs uint64
	// DefaultIdleTimeoutSecs, DefaultCPUs (at least 1) and DefaultMemoryMiB (at
	// least 64) are for sandboxes whose create does not say them.
	DefaultIdleTimeoutSecs        uint64
	DefaultCPUs, DefaultMemoryMiB uint32
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
	return &Config{
		AutoInstall: e.AutoInstall, Catalog: images,
		MaxSandboxes: e.MaxSandboxes, MaxExecs: e.MaxExecs, MaxExecTimeoutMs: e.MaxExecTimeoutMs,
		DefaultIdleTimeoutSecs: e.IdleTimeoutSecs, DefaultCPUs: e.CPUs, DefaultMemoryMiB: e.MemoryMiB,
	}, nil
}

// present is true for a field that is there, whatever it holds.
type present bool

// DecodeStrict is strictjson.Decoder.
func (p *present) DecodeStrict(json.RawMessage, string) error {
	*p = true
	return nil
}
