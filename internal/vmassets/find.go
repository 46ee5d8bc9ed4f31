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
	envShim  = "III_KRUN_SHIM"
)

// FindAgent returns the absolute path of the guest agent: III_GUEST_AGENT, else
// guest-agent beside the running program. The error lists what was tried. That
// it can run in a guest is for CheckAgent to say.
func FindAgent(getenv func(string) string) (string, error) {
	return findProgram(getenv, envAgent, "guest-agent", nil, "build the guest agent with `make build`")
}

// FindShim returns the absolute path of krun-shim: III_KRUN_SHIM, else beside the
// running program, else in dir, which is layout.Roots.VMM(). Never in PATH: a
// shim of another build would be found there. The error lists what was tried.
func FindShim(getenv func(string) string, dir string) (string, error) {
	return findProgram(getenv, envShim, "krun-shim", []string{dir}, "build it with `make build`")
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
	return findProgram(getenv, envQEMU, name, filepath.SplitList(getenv("PATH")),
		"install it (Debian: apt-get install --no-install-recommends "+pkg+")")
}

// findProgram looks for a program: the one that the variable env names alone if
// it is set, else name beside the running program, else in dirs. get is how a
// person comes by it.
func findProgram(getenv func(string) string, env, name string, dirs []string, get string) (string, error) {
	if override := getenv(env); override != "" {
		file, err := filepath.Abs(override)
		if err == nil {
			err = checkExecutable(file)
		}
		if err != nil {
			return "", advise("set it to the program "+name+", or not at all", "%s=%s: %w", env, override, err)
		}
		return file, nil
	}
	var tried []string
	if self, err := os.Executable(); err == nil {
		if real, err := filepath.EvalSymlinks(self); err == nil {
			self = real
		}
		tried = append(tried, filepath.Join(filepath.Dir(self), name))
	}
	for _, dir := range dirs {
		if filepath.IsAbs(dir) {
			tried = append(tried, filepath.Join(dir, name))
		}
	}
	for _, file := range tried {
		if checkExecutable(file) == nil {
			return file, nil
		}
	}
	return "", advise(get+", or set "+env+" to it", "no %s (tried %s)", name, strings.Join(tried, ", "))
}

func checkExecutable(file string) error {
	info, err := os.Stat(file)
	if err == nil && (!info.Mode().IsRegular() || info.Mode().Perm()&0o111 == 0) {
		err = fmt.Errorf("%s is not an executable file", file)
	}
	return err
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
