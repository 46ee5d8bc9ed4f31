package vmassets

import (
	"bytes"
	"cmp"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"
)

// envLibkrun names libkrun's file, or the directory that it lies in.
const envLibkrun = "III_LIBKRUN_PATH"

// ErrNoLibkrun tells that this host has no libkrun.
var ErrNoLibkrun = errors.New("libkrun was not found")

// Libkrun is the pair of libraries that boots VMs on hardware virtualization:
// the VMM, and the kernel of its guests. Both paths are absolute.
type Libkrun struct{ Library, Firmware string }

// pairNames are the file names of ABI 1 by GOOS.
func pairNames(goos string) (library, firmware string) {
	if goos == "darwin" {
		return "libkrun.1.dylib", "libkrunfw.5.dylib"
	}
	return "libkrun.so.1", "libkrunfw.so.5"
}

// FindLibkrun looks for libkrun and libkrunfw without loading them:
// III_LIBKRUN_PATH (a file or a directory) alone where set, else beside the
// running program, in dir (layout.Roots.VMM()) where SetupLibkrun puts them, in
// the system's library directories and in Homebrew's. libkrunfw is taken from
// beside libkrun; only a system may keep it in another of its directories.
//
// The error names every path that was tried and what to do. It is ErrNoLibkrun
// where there is none, another one where what was found cannot work: it is for
// another processor, or a library that it needs is not installed.
func FindLibkrun(dir string, getenv func(string) string) (*Libkrun, error) {
	if named := getenv(envLibkrun); named != "" {
		pair, tried, err := namedPair(named)
		if err == nil && pair == nil {
			err = fmt.Errorf("%w (tried %s)", ErrNoLibkrun, strings.Join(tried, ", "))
		}
		if err != nil {
			return nil, fmt.Errorf("%s=%s: %w: set it to libkrun's file, or to a directory with libkrun and libkrunfw", envLibkrun, named, err)
		}
		return pair, pair.check()
	}
	var tried []string
	for _, place := range libkrunPlaces(dir) {
		pair, misses := place.look()
		if pair != nil {
			return pair, pair.check()
		}
		tried = append(tried, misses...)
	}
	return nil, &advice{err: fmt.Errorf("%w (tried %s)", ErrNoLibkrun, strings.Join(tried, ", ")), fix: libkrunAdvice(runtime.GOOS, runtime.GOARCH)}
}

// libkrunAdvice says how to get libkrun on a system.
func libkrunAdvice(goos, goarch string) string {
	switch {
	case goos == "darwin":
		return "install it: brew tap libkrun/krun && brew install libkrun libkrunfw"
	case packagedFor(goos, goarch):
		return "run `adapter vmm setup --libkrun`, or install it (Fedora: dnf install libkrun libkrunfw; Arch: pacman -S libkrun libkrunfw)"
	default:
		return "install it (Fedora: dnf install libkrun libkrunfw; Arch: pacman -S libkrun libkrunfw), or build both and set " + envLibkrun
	}
}

// place is a directory to look in, and others that may hold the firmware.
type place struct {
	dir    string
	beside []string
}

func libkrunPlaces(dir string) []place {
	var places []place
	if self, err := os.Executable(); err == nil {
		if real, err := filepath.EvalSymlinks(self); err == nil {
			self = real
		}
		places = append(places, place{dir: filepath.Dir(self)})
	}
	places = append(places, place{dir: libkrunDir(dir)})
	system := systemLibraryDirs(runtime.GOOS, runtime.GOARCH)
	for _, dir := range system {
		places = append(places, place{dir: dir, beside: system})
	}
	return places
}

// systemLibraryDirs are where distributions and Homebrew put libraries.
func systemLibraryDirs(goos, goarch string) []string {
	if goos == "darwin" {
		return []string{"/opt/homebrew/lib", "/usr/local/lib"}
	}
	triple := map[string]string{"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}[goarch]
	return []string{
		"/usr/local/lib64", "/usr/local/lib", "/usr/lib64", "/usr/lib/" + triple, "/usr/lib",
		"/lib64", "/lib/" + triple, "/home/linuxbrew/.linuxbrew/lib",
	}
}

func (p place) look() (pair *Libkrun, tried []string) {
	library, firmware := pairNames(runtime.GOOS)
	found := filepath.Join(p.dir, library)
	if !isRegular(found) {
		return nil, []string{found}
	}
	for _, dir := range append([]string{p.dir}, p.beside...) {
		file := filepath.Join(dir, firmware)
		if isRegular(file) {
			return &Libkrun{Library: found, Firmware: file}, nil
		}
		tried = append(tried, file)
	}
	return nil, tried
}

// namedPair is the pair that a person named; nil where one of the two is
// missing.
func namedPair(named string) (pair *Libkrun, tried []string, err error) {
	path, err := filepath.Abs(named)
	if err != nil {
		return nil, nil, err
	}
	info, err := os.Stat(path)
	if err != nil {
		return nil, nil, err
	}
	if info.IsDir() {
		pair, tried = place{dir: path}.look()
		return pair, tried, nil
	}
	_, firmware := pairNames(runtime.GOOS)
	file := filepath.Join(filepath.Dir(path), firmware)
	if !isRegular(file) {
		return nil, []string{file}, nil
	}
	return &Libkrun{Library: path, Firmware: file}, nil, nil
}

func isRegular(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular()
}

// check tells what would keep the pair from being loaded.
func (p *Libkrun) check() error {
	if runtime.GOOS != "linux" {
		return nil // only the loader can tell
	}
	var errs []error
	for _, path := range []string{p.Library, p.Firmware} {
		errs = append(errs, checkLibrary(path, runtime.GOARCH))
	}
	return errors.Join(errs...)
}

// checkLibrary reads what a shared library is for and what it needs.
func checkLibrary(path, goarch string) error {
	file, err := elf.Open(path)
	if err != nil {
		return advise("install it anew", "%s is not a shared library: %w", path, err)
	}
	defer file.Close() //nolint:errcheck // only read
	machines := map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}
	if file.Machine != machines[goarch] {
		return advise("install the one for "+goarch, "%s is for %s", path, file.Machine)
	}
	needed, err := file.ImportedLibraries()
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	missing, packages := missingLibraries(needed, systemLibraryDirs("linux", goarch), "/etc/ld.so.cache")
	if len(missing) > 0 {
		return advise("install it (Debian: apt-get install "+strings.Join(packages, " ")+")",
			"%s needs %s, which this system does not have", path, strings.Join(missing, ", "))
	}
	return nil
}

// missingLibraries tells which of the needed are neither in dirs nor known to
// the loader's cache, and the Debian packages that have them.
func missingLibraries(needed, dirs []string, cache string) (missing, packages []string) {
	known, _ := os.ReadFile(cache) // without one, the directories decide
	for _, name := range needed {
		if strings.HasPrefix(name, "ld-linux") || name == "libc.so.6" {
			continue // or this program would not run
		}
		there := slices.ContainsFunc(dirs, func(dir string) bool { return isRegular(filepath.Join(dir, name)) })
		if there || bytes.Contains(known, []byte("/"+name+"\x00")) {
			continue
		}
		missing = append(missing, name)
		switch name {
		case "libcap-ng.so.0":
			packages = append(packages, "libcap-ng0")
		case "libgcc_s.so.1":
			packages = append(packages, "libgcc-s1")
		default:
			packages = append(packages, "the package with "+name)
		}
	}
	return missing, packages
}

// diagnoseLibkrun also tells whether VMs run on libkrun here.
func diagnoseLibkrun(ctx context.Context, dir string, getenv func(string) string) (f Finding, ready bool) {
	f = Finding{Name: "libkrun", OK: true}
	pair, err := FindLibkrun(dir, getenv)
	virtualization := HardwareVirtualization()
	switch {
	case err == nil && virtualization == nil:
		f.Finding = pair.Library + ", kernel in " + pair.Firmware
		// It would be taken, and no VM boot.
		f.OK = f.load(ctx, pair, dir, getenv)
		return f, f.OK
	case err == nil:
		f.Finding = pair.Library + " is there, but of no use without hardware virtualization"
		f.load(ctx, pair, dir, getenv)
		f.Fix = "" // it would be for nothing
	case virtualization != nil:
		f.Finding = "none, and of no use without hardware virtualization"
	default:
		f.Finding, f.Fix = splitFix(err)
		if f.Fix != "" {
			f.Fix = "VMs would run several times faster: " + f.Fix
		}
	}
	return f, false
}

// load adds what the library can do, or why it does not load.
func (f *Finding) load(ctx context.Context, pair *Libkrun, dir string, getenv func(string) string) bool {
	able, err := describeLibkrun(ctx, pair, dir, getenv)
	if err != nil {
		f.Finding += "; it does not load: " + err.Error()
		f.Fix = "install what it needs, or another libkrun, or run `adapter vmm setup --libkrun`"
		return false
	}
	f.Finding += "; it is " + able
	return true
}

// commandDescribe is krun-shim's; see its main.
const commandDescribe = "__describe-libkrun"

// describeLibkrun has krun-shim load the libraries and say what they can do. The
// adapter itself cannot load any.
func describeLibkrun(ctx context.Context, pair *Libkrun, dir string, getenv func(string) string) (string, error) {
	shim, err := FindShim(getenv, dir)
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(ctx, versionTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, shim, commandDescribe, pair.Library, pair.Firmware)
	cmd.WaitDelay = time.Second
	var said strings.Builder
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s", cmp.Or(oneLine(strings.TrimPrefix(said.String(), "krun-shim: ")), err.Error()))
	}
	return oneLine(string(out)), nil
}

func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }
