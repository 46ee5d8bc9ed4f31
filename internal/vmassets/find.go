package vmassets

import (
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// Environment variables that name programs.
const (
	envAgent = "III_GUEST_AGENT"
	envQEMU  = "III_QEMU"
)

// FindAgent returns the absolute path of the guest agent: III_GUEST_AGENT, else
// guest-agent beside the running program. The error lists what was tried. That
// it can run in a guest is for CheckAgent to say.
func FindAgent(getenv func(string) string) (string, error) {
	path, tried, err := findProgram(getenv(envAgent), "guest-agent", "")
	if err != nil {
		return "", fmt.Errorf("%s: %w", envAgent, err)
	}
	if path == "" {
		return "", advise("build it with `make build`, or set "+envAgent+" to it", "no guest agent (tried %s)", strings.Join(tried, ", "))
	}
	return path, nil
}

// FindQEMU returns the absolute path of the emulator for a GOARCH: III_QEMU,
// else qemu-system-* beside the running program, else in PATH. The error lists
// what was tried and names the package to install.
func FindQEMU(getenv func(string) string, arch string) (string, error) {
	var name, pkg string
	switch arch {
	case "amd64":
		name, pkg = "qemu-system-x86_64", "qemu-system-x86"
	case "arm64":
		name, pkg = "qemu-system-aarch64", "qemu-system-arm"
	default:
		return "", fmt.Errorf("no emulator is known for architecture %s (amd64 and arm64 are)", arch)
	}
	path, tried, err := findProgram(getenv(envQEMU), name, getenv("PATH"))
	if err != nil {
		return "", fmt.Errorf("%s: %w", envQEMU, err)
	}
	if path == "" {
		return "", advise("install it (Debian: apt-get install --no-install-recommends "+pkg+"), or set "+envQEMU+" to it",
			"no %s (tried %s)", name, strings.Join(tried, ", "))
	}
	return path, nil
}

// findProgram looks for a program: override alone if set, else name beside the
// running program, else in the directories of path. A program that is not there
// is no error but an empty result, with the files that were tried.
func findProgram(override, name, path string) (found string, tried []string, err error) {
	if override != "" {
		file, err := filepath.Abs(override)
		if err != nil {
			return "", nil, err
		}
		if info, err := os.Stat(file); err != nil {
			return "", nil, err
		} else if !info.Mode().IsRegular() || info.Mode().Perm()&0o111 == 0 {
			return "", nil, fmt.Errorf("%s is not an executable file", file)
		}
		return file, nil, nil
	}
	var candidates []string
	if self, err := os.Executable(); err == nil {
		if real, err := filepath.EvalSymlinks(self); err == nil {
			self = real
		}
		candidates = append(candidates, filepath.Join(filepath.Dir(self), name))
	}
	for _, dir := range filepath.SplitList(path) {
		if filepath.IsAbs(dir) {
			candidates = append(candidates, filepath.Join(dir, name))
		}
	}
	for _, file := range candidates {
		if isExecutable(file) {
			return file, nil, nil
		}
	}
	return "", candidates, nil
}

// CheckAgent tells whether the file at path can be PID 1 in a guest of this
// GOARCH: a guest has no shared libraries and no interpreter.
func CheckAgent(path, arch string) error {
	f, err := elf.Open(path)
	if err != nil {
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, os.ErrPermission) {
			return err
		}
		return advise("build it with `make build`", "agent %s is not an ELF executable (%w)", path, err)
	}
	defer f.Close() //nolint:errcheck // only read
	machines := map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}
	if f.Machine != machines[arch] {
		return advise("build it with GOARCH="+arch, "agent %s is for %s, the guest is %s", path, f.Machine, arch)
	}
	const static = "build it static (CGO_ENABLED=0)"
	if f.Type != elf.ET_EXEC && f.Type != elf.ET_DYN {
		return advise("build it with `make build`", "agent %s is an ELF file but not an executable (%s)", path, f.Type)
	}
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			return advise(static, "agent %s needs a dynamic loader, which the guest does not have", path)
		}
	}
	if libs, err := f.ImportedLibraries(); err == nil && len(libs) > 0 {
		return advise(static, "agent %s needs shared libraries (%s), which the guest does not have", path, strings.Join(libs, ", "))
	}
	return nil
}
