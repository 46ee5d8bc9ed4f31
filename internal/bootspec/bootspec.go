// Package bootspec is the document that describes one VM from launch to agent:
// the launcher builds it, the shim reads it on standard input and boots it, and
// the agent receives its Guest part over the console port iii.env.
//
// On the wire a document is the magic "IIISPEC1", its length as 8 hexadecimal
// digits, and that many bytes of JSON with no unknown fields.
package bootspec

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// Version is the version of the document. A shim or agent that gets another one
// refuses it and names both.
const Version = 2

// MaxSize is the most bytes that a document may have, and MaxEnv what the guest
// environment may take of it: it must fit the 1 MiB frame of iii.env with its
// JSON quoting.
const (
	MaxSize = 1 << 20
	MaxEnv  = 256 << 10
)

// maxQuotedEnv is what the environment may take in JSON, which needs up to six
// bytes for one; the rest of a document takes far less than 64 KiB.
const maxQuotedEnv = MaxSize - 64<<10

const magic = "IIISPEC1"

// The VMMs that a shim may run.
const (
	QEMU    = "qemu"
	Libkrun = "libkrun"
)

// Lifetimes of a VM.
const (
	// Tied: the VM dies with the process that launched it.
	Tied = "tied"
	// Detached: the VM may be released by its launcher and then lives on until
	// it is stopped or idle for the spec's time.
	Detached = "detached"
)

// Serials that mark the two disks for the agent where the VMM passes serials
// through (QEMU). Their order, lower first, holds everywhere.
const (
	LowerSerial = "iii-lower"
	UpperSerial = "iii-upper"
)

// Limits of what a VM may ask for.
const (
	MinMemoryMiB = 64
	MaxMemoryMiB = 1 << 20
	MaxCPUs      = 255
)

// Spec describes one VM. All paths are absolute host paths.
type Spec struct {
	Version int `json:"version"`
	// ID names the VM: see layout.ValidID.
	ID string `json:"id"`
	// VMM is QEMU or Libkrun; the part of the same name is then set (Validate
	// insists for QEMU alone: tests play the other without libraries).
	VMM string `json:"vmm"`
	// Lifetime is Tied or Detached.
	Lifetime string `json:"lifetime"`
	// IdleTimeoutMs ends a released VM after so many milliseconds without an
	// agent call in flight; 0 means never. Only for Detached.
	IdleTimeoutMs int64 `json:"idle_timeout_ms,omitempty"`

	// Dir is the machine directory and Socket the shim's unix socket
	// (layout.Machine).
	Dir    string `json:"dir"`
	Socket string `json:"socket"`

	CPUs      int  `json:"cpus"`
	MemoryMiB int  `json:"memory_mib"`
	Lower     Disk `json:"lower"`
	Upper     Disk `json:"upper"`

	QEMU    *QEMUSpec    `json:"qemu,omitempty"`
	Libkrun *LibkrunSpec `json:"libkrun,omitempty"`

	// Network is set, as is Guest.Interface, for a VM with a network; without it
	// the guest has no device and no way to any.
	Network *Network `json:"network,omitempty"`

	Guest Guest `json:"guest"`
}

// Disk is one raw disk image.
type Disk struct {
	Path string `json:"path"`
	// ReadOnly disks are locked shared and may serve any number of VMs; others
	// are locked exclusively.
	ReadOnly bool `json:"read_only,omitempty"`
	// Durable disks survive the VM and are flushed to the host's disk when the
	// guest asks; others may be lost when the host dies.
	Durable bool `json:"durable,omitempty"`
}

// QEMUSpec is what QEMU needs beyond the common part.
type QEMUSpec struct {
	// Binary is the emulator.
	Binary string `json:"binary"`
	// Machine is "q35", "microvm" or "virt".
	Machine string `json:"machine"`
	// TSCKHz is the host's time-stamp counter rate, needed for microvm.
	TSCKHz int `json:"tsc_khz,omitempty"`
	// Kernel is an uncompressed kernel image that QEMU can enter directly,
	// Initramfs the archive with agent and modules.
	Kernel    string `json:"kernel"`
	Initramfs string `json:"initramfs"`
	// Snapshot is a saved guest of this very machine that waits for its boot
	// spec: QEMU resumes it rather than boot the kernel. Empty, or a file that is
	// not there or does not fit, means to boot.
	Snapshot string `json:"snapshot,omitempty"`
}

// LibkrunSpec is what libkrun needs beyond the common part.
type LibkrunSpec struct {
	// Library is libkrun's file, Firmware that of libkrunfw, which has the kernel.
	Library  string `json:"library"`
	Firmware string `json:"firmware"`
	// Root is the directory that the guest boots from: the agent, and empty
	// directories to mount on. It is this VM's alone, since the guest may change
	// it.
	Root string `json:"root"`
	// Nested lets the guest run VMs itself. libkrun refuses where library, host or
	// platform cannot: on Linux that is everything before 1.18.
	Nested bool `json:"nested,omitempty"`
}

// Guest is the part of the document that the agent gets. The token and the
// environment are secrets: they are never logged and not part of a saved spec.
type Guest struct {
	Version int `json:"version"`
	// Token proves to the shim that a link comes from this guest's agent:
	// 32 hexadecimal digits.
	Token string `json:"token"`
	// Hostname is the guest's host name, a DNS label.
	Hostname string `json:"hostname"`
	// Env is the environment of every program in the guest, KEY=value, the last
	// of a key wins. Values may have any bytes but NUL.
	Env []string `json:"env"`
	// NoFile is the limit on open files, soft and hard; 0 leaves 65536.
	NoFile uint64 `json:"nofile,omitempty"`
	// Interface is nil for a guest without a network.
	Interface *Interface `json:"interface,omitempty"`
}

// IdleTimeout is IdleTimeoutMs as a duration.
func (s *Spec) IdleTimeout() time.Duration {
	return time.Duration(s.IdleTimeoutMs) * time.Millisecond
}

// Validate names every fault of the spec that can be seen without touching the
// host, joined into one error.
func (s *Spec) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if s.Version != Version {
		return versionError(s.Version)
	}
	if s.ID == "" {
		bad("id is empty")
	}
	if s.Lifetime != Tied && s.Lifetime != Detached {
		bad("lifetime is %q, not %q or %q", s.Lifetime, Tied, Detached)
	}
	if s.IdleTimeoutMs < 0 {
		bad("idle_timeout_ms is negative")
	}
	if s.CPUs < 1 || s.CPUs > MaxCPUs {
		bad("cpus is %d, not 1 to %d", s.CPUs, MaxCPUs)
	}
	if s.MemoryMiB < MinMemoryMiB || s.MemoryMiB > MaxMemoryMiB {
		bad("memory_mib is %d, not %d to %d", s.MemoryMiB, MinMemoryMiB, MaxMemoryMiB)
	}
	for _, p := range s.paths() {
		if err := checkPath(p.value); err != nil {
			bad("%s %w", p.name, err)
		}
	}
	switch {
	case s.VMM == QEMU && s.QEMU == nil:
		bad("vmm is qemu but the qemu part is missing")
	case s.VMM == QEMU && s.QEMU.Machine == "microvm" && s.QEMU.TSCKHz <= 0:
		bad("qemu.tsc_khz must be set for machine microvm")
	case s.VMM != QEMU && s.VMM != Libkrun:
		bad("vmm is %q, not %q or %q", s.VMM, QEMU, Libkrun)
	}
	if (s.Network == nil) != (s.Guest.Interface == nil) {
		bad("network and guest.interface must both be set, or neither")
	}
	if s.Network != nil {
		if err := s.Network.Validate(); err != nil {
			bad("network: %w", err)
		}
	}
	if err := s.Guest.Validate(); err != nil {
		bad("guest: %w", err)
	}
	return errors.Join(errs...)
}

func versionError(theirs int) error {
	return fmt.Errorf("version is %d, this build reads %d: adapter and krun-shim must come from one build", theirs, Version)
}

type namedPath struct{ name, value string }

func (s *Spec) paths() []namedPath {
	paths := []namedPath{{"dir", s.Dir}, {"socket", s.Socket}, {"lower.path", s.Lower.Path}, {"upper.path", s.Upper.Path}}
	if s.QEMU != nil {
		paths = append(paths, namedPath{"qemu.binary", s.QEMU.Binary}, namedPath{"qemu.kernel", s.QEMU.Kernel},
			namedPath{"qemu.initramfs", s.QEMU.Initramfs})
		if s.QEMU.Snapshot != "" {
			paths = append(paths, namedPath{"qemu.snapshot", s.QEMU.Snapshot})
		}
	}
	if s.Libkrun != nil {
		paths = append(paths, namedPath{"libkrun.library", s.Libkrun.Library}, namedPath{"libkrun.firmware", s.Libkrun.Firmware},
			namedPath{"libkrun.root", s.Libkrun.Root})
	}
	return paths
}

func checkPath(path string) error {
	switch {
	case path == "":
		return errors.New("is empty")
	case !filepath.IsAbs(path):
		return fmt.Errorf("is %q, not an absolute path", path)
	case strings.ContainsAny(path, "\x00\n"):
		return fmt.Errorf("is %q: NUL and newline are not allowed", path)
	}
	return nil
}

// Validate names every fault of the agent's part.
func (g *Guest) Validate() error {
	var errs []error
	if g.Version != Version {
		return fmt.Errorf("version is %d, this build reads %d: adapter and guest-agent must come from one build", g.Version, Version)
	}
	if raw, err := hex.DecodeString(g.Token); err != nil || len(raw) != 16 {
		errs = append(errs, errors.New("token is not 32 hexadecimal digits"))
	}
	if !validHostname(g.Hostname) {
		errs = append(errs, fmt.Errorf("hostname %q is not a DNS label (1 to 63 of a-z, 0-9, '-')", g.Hostname))
	}
	if g.Interface != nil {
		if err := g.Interface.Validate(); err != nil {
			errs = append(errs, fmt.Errorf("interface: %w", err))
		}
	}
	return errors.Join(append(errs, checkEnv(g.Env)...)...)
}

// checkEnv names every fault of a guest's environment.
func checkEnv(env []string) []error {
	var errs []error
	size := 0
	for i, kv := range env {
		size += len(kv) + 1
		key, _, ok := strings.Cut(kv, "=")
		switch {
		case !ok || key == "":
			errs = append(errs, fmt.Errorf("env[%d] is not KEY=value", i))
		case strings.ContainsRune(kv, 0):
			errs = append(errs, fmt.Errorf("env[%d] (%s) has a NUL byte", i, strings.ReplaceAll(key, "\x00", "")))
		case !utf8.ValidString(kv):
			errs = append(errs, fmt.Errorf("env[%d] (%q) is not UTF-8", i, key))
		}
	}
	if size > MaxEnv {
		errs = append(errs, fmt.Errorf("the environment has %d bytes, more than %d", size, MaxEnv))
	} else if quoted, err := json.Marshal(env); err != nil || len(quoted) > maxQuotedEnv {
		errs = append(errs, fmt.Errorf("the environment has %d bytes as JSON, more than %d: it has too many control characters", len(quoted), maxQuotedEnv))
	}
	return errs
}

func validHostname(name string) bool {
	if name == "" || len(name) > 63 || name[0] == '-' || name[len(name)-1] == '-' {
		return false
	}
	for _, c := range []byte(name) {
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '-' {
			return false
		}
	}
	return true
}

// Redacted returns a copy without token and environment, which may be saved.
// It does not validate; a replay puts new ones in.
func (s *Spec) Redacted() *Spec {
	c := *s
	c.Guest.Token = ""
	c.Guest.Env = nil
	return &c
}

// Write sends the document to w.
func Write(w io.Writer, s *Spec) error {
	body, err := json.Marshal(s)
	if err != nil {
		return err
	}
	if len(body) > MaxSize {
		return fmt.Errorf("boot spec has %d bytes, more than %d", len(body), MaxSize)
	}
	_, err = w.Write(fmt.Appendf(nil, "%s%08x%s", magic, len(body), body))
	return err
}

// Read takes one document from r, leaving r after its last byte, and validates
// it. A document that ends early, is too long, or has unknown fields is an
// error.
func Read(r io.Reader) (*Spec, error) {
	var head [len(magic) + 8]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, fmt.Errorf("read boot spec: %w", err)
	}
	if string(head[:len(magic)]) != magic {
		return nil, fmt.Errorf("read boot spec: it begins with %q, not %q", head[:len(magic)], magic)
	}
	size, err := strconv.ParseUint(string(head[len(magic):]), 16, 32)
	if err != nil || size > MaxSize {
		return nil, fmt.Errorf("read boot spec: length %q is not a hexadecimal number up to %x", head[len(magic):], MaxSize)
	}
	body := make([]byte, size)
	if _, err := io.ReadFull(r, body); err != nil {
		return nil, fmt.Errorf("read boot spec: %w", err)
	}
	s, err := Parse(body)
	if err != nil {
		return nil, err
	}
	if err := s.Validate(); err != nil {
		return nil, fmt.Errorf("boot spec: %w", err)
	}
	return s, nil
}

// Parse reads the JSON alone, without validating it: a spec saved to a file has
// neither token nor environment yet. Only a document of another version is
// refused as such, before its unknown fields are.
func Parse(body []byte) (*Spec, error) {
	var s Spec
	if err := strictJSON(body, &s); err != nil {
		var head struct{ Version int }
		if json.Unmarshal(body, &head) == nil && head.Version != Version {
			err = versionError(head.Version)
		}
		return nil, fmt.Errorf("boot spec: %w", err)
	}
	return &s, nil
}

// ParseGuest reads and validates the agent's part.
func ParseGuest(body []byte) (*Guest, error) {
	var g Guest
	if err := strictJSON(body, &g); err != nil {
		return nil, fmt.Errorf("guest spec: %w", err)
	}
	if err := g.Validate(); err != nil {
		return nil, fmt.Errorf("guest spec: %w", err)
	}
	return &g, nil
}

func strictJSON(body []byte, into any) error {
	dec := json.NewDecoder(bytes.NewReader(body))
	dec.DisallowUnknownFields()
	if err := dec.Decode(into); err != nil {
		return err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return errors.New("more than one JSON value")
	}
	return nil
}
