package vmassets

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// ErrNoKernel is what Find's error wraps when this host has no guest kernel
// yet. Its text names the cure.
var ErrNoKernel = errors.New("no guest kernel: run `adapter vmm setup`, or set III_VM_KERNEL to a vmlinuz or vmlinux")

// Environment variables that name a kernel of the user's own.
const (
	envKernel  = "III_VM_KERNEL"
	envModules = "III_VM_MODULES"
)

// Names below the directory of all assets.
const (
	kernelsDir   = "kernels"
	currentName  = "current"
	manifestName = "kernel.json"
	imageName    = "vmlinux"
	modulesDir   = "modules"
	orderName    = "order"
)

// ownVersion stands for the package version of a kernel of the user's own.
const ownVersion = "own"

// manifestFormat changes whenever older kernel directories are not to be used
// any more.
const manifestFormat = 1

// Kernel is a guest kernel on disk. It is immutable and may be shared.
type Kernel struct {
	// Image is the absolute path of what QEMU's -kernel takes.
	Image string
	// Indirect is empty when Image is uncompressed and entered directly, and
	// else says why not: a bzImage that could not be unpacked, or has no PVH
	// entry, boots too, about half a second slower under emulation.
	Indirect string
	// Release is what uname -r says in the guest.
	Release string
	// Version is the version of the package it came from, or "own" for a
	// kernel named by III_VM_KERNEL.
	Version string
	// Arch is the GOARCH it runs on.
	Arch string
	// Modules are the file names of the modules in load order.
	Modules []string

	root string // the directory of all assets
	dir  string // the directory of this kernel
}

// manifest is kernel.json, written last into a kernel's directory.
type manifest struct {
	Format  int      `json:"format"`
	Release string   `json:"release"`
	Version string   `json:"version"`
	Arch    string   `json:"arch"`
	Modules []string `json:"modules"`
	// Indirect says why the image is still compressed; usually empty.
	Indirect string `json:"indirect,omitempty"`
	// Sources are the files that an own kernel was made of, the image first;
	// when one has changed the kernel is made again.
	Sources []source `json:"sources,omitempty"`
	// ModulesFrom is the directory that was asked for an own kernel's modules.
	ModulesFrom string `json:"modules_from,omitempty"`
}

// source is the identity of a file: while it is the same, so is the content.
type source struct {
	Path  string `json:"path"`
	Stamp string `json:"stamp"`
}

func stampFile(path string) (source, error) {
	info, err := os.Stat(path)
	if err != nil {
		return source{}, err
	}
	return source{Path: path, Stamp: stamp(info)}, nil
}

// Find returns the kernel that Setup made, in a millisecond or so. dir is
// layout.Roots.VMM(). With III_VM_KERNEL set it is that kernel, unpacked now if
// it was not yet or has changed. The error wraps ErrNoKernel where Setup is the
// cure.
func Find(dir string, getenv func(string) string) (*Kernel, error) {
	if own := getenv(envKernel); own != "" {
		return findOwn(dir, own, getenv(envModules))
	}
	return current(dir)
}

// current loads the kernel that came from a package.
func current(dir string) (*Kernel, error) {
	name, err := os.ReadFile(filepath.Join(dir, kernelsDir, currentName))
	if errors.Is(err, os.ErrNotExist) {
		return nil, ErrNoKernel
	}
	if err != nil {
		return nil, err
	}
	if !validName(string(name)) {
		return nil, fmt.Errorf("%w (%s is damaged)", ErrNoKernel, filepath.Join(dir, kernelsDir, currentName))
	}
	k, _, err := load(dir, string(name))
	if err != nil {
		return nil, fmt.Errorf("%w (the one there is of no use: %w)", ErrNoKernel, err)
	}
	return k, nil
}

// validName tells whether name can be a kernel's directory: one element that is
// not hidden.
func validName(name string) bool {
	return name != "" && len(name) <= 128 && name[0] != '.' && !strings.ContainsAny(name, "/\x00")
}

// load reads the kernel in the directory name and checks that its files are
// there.
func load(root, name string) (*Kernel, *manifest, error) {
	dir := filepath.Join(root, kernelsDir, name)
	body, err := os.ReadFile(filepath.Join(dir, manifestName))
	if err != nil {
		return nil, nil, err
	}
	var m manifest
	if err := json.Unmarshal(body, &m); err != nil {
		return nil, nil, fmt.Errorf("%s: %w", filepath.Join(dir, manifestName), err)
	}
	if m.Format != manifestFormat {
		return nil, nil, fmt.Errorf("%s has format %d, this build reads %d", dir, m.Format, manifestFormat)
	}
	if m.Arch != runtime.GOARCH {
		return nil, nil, fmt.Errorf("%s is for %s, this host is %s", dir, m.Arch, runtime.GOARCH)
	}
	k := &Kernel{
		Image: filepath.Join(dir, imageName), Indirect: m.Indirect, Release: m.Release, Version: m.Version,
		Arch: m.Arch, Modules: m.Modules, root: root, dir: dir,
	}
	if info, err := os.Stat(k.Image); err != nil {
		return nil, nil, err
	} else if info.Size() == 0 {
		return nil, nil, fmt.Errorf("%s is empty", k.Image)
	}
	for _, name := range m.Modules {
		if _, err := os.Stat(filepath.Join(dir, modulesDir, name)); err != nil {
			return nil, nil, err
		}
	}
	return k, &m, nil
}

// build makes a kernel directory in tmp, which exists and is empty, out of the
// image and the modules in the directory that modulesOf names for its release;
// no directory means that all drivers are built in. It fills in the rest of m.
func build(ctx context.Context, tmp, image string, modulesOf func(release string) string, m *manifest) (err error) {
	// O_NONBLOCK: a fifo must be refused, not waited for.
	src, err := os.OpenFile(image, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer src.Close() //nolint:errcheck // only read
	if file, err := src.Stat(); err != nil || !file.Mode().IsRegular() {
		return errors.Join(fmt.Errorf("kernel %s is not a regular file", image), err)
	}
	dst, err := os.OpenFile(filepath.Join(tmp, imageName), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dst.Close()) }()
	info, err := unpackImage(ctx, src, dst)
	if err != nil {
		return fmt.Errorf("kernel %s: %w", image, err)
	}
	if info.arch != runtime.GOARCH {
		return fmt.Errorf("kernel %s is for %s, this host is %s", image, info.arch, runtime.GOARCH)
	}
	m.Format, m.Arch, m.Release = manifestFormat, info.arch, info.release
	if info.reason != nil {
		m.Indirect = info.reason.Error()
	}
	if err := dst.Sync(); err != nil {
		return err
	}
	return addModules(tmp, modulesOf(info.release), m)
}

// addModules writes the modules, their order and the manifest, in this order.
func addModules(tmp, modulesFrom string, m *manifest) error {
	var order []module
	if modulesFrom != "" {
		tree, err := openModules(modulesFrom)
		if err != nil {
			return err
		}
		if order, err = tree.resolve(needs()); err != nil {
			return fmt.Errorf("kernel %s: %w", m.Release, err)
		}
	}
	dir := filepath.Join(tmp, modulesDir)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	for _, mod := range order {
		name := mod.name + ".ko"
		if err := writeSynced(dir, name, mod.data); err != nil {
			return err
		}
		m.Modules = append(m.Modules, name)
		if m.Version == ownVersion {
			s, err := stampFile(mod.source)
			if err != nil {
				return err
			}
			m.Sources = append(m.Sources, s)
		}
	}
	if err := writeSynced(dir, orderName, orderFile(m.Modules)); err != nil {
		return err
	}
	body, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	return errors.Join(writeSynced(tmp, manifestName, append(body, '\n')), syncDir(dir), syncDir(tmp))
}

func orderFile(modules []string) []byte {
	if len(modules) == 0 {
		return nil
	}
	return []byte(strings.Join(modules, "\n") + "\n")
}

func writeSynced(dir, name string, data []byte) error {
	return writeFile(dir, name, true, func(f *os.File) error {
		_, err := f.Write(data)
		return err
	})
}

// directoryName derives the name of a kernel directory from its content.
func directoryName(tmp string, m *manifest) (string, error) {
	sum := sha256.New()
	names := []string{manifestName, imageName}
	for _, mod := range m.Modules {
		names = append(names, filepath.Join(modulesDir, mod))
	}
	for _, name := range names {
		if err := hashFile(sum, filepath.Join(tmp, name)); err != nil {
			return "", err
		}
	}
	return m.Release + "_" + hex.EncodeToString(sum.Sum(nil)[:8]), nil
}

// hashFile adds a file's length and content to sum.
func hashFile(sum io.Writer, path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close() //nolint:errcheck // only read
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintf(sum, "%d\n", info.Size()); err != nil {
		return err
	}
	_, err = io.Copy(sum, f)
	return err
}

// publish gives the finished directory tmp its name. A usable one of that name
// is kept, since VMs may be starting from it. The caller holds the lock.
func publish(root, tmp string, m *manifest) (*Kernel, error) {
	name, err := directoryName(tmp, m)
	if err != nil {
		return nil, err
	}
	if k, _, err := load(root, name); err == nil {
		now := time.Now()
		return k, os.Chtimes(k.dir, now, now)
	}
	dir := filepath.Join(root, kernelsDir, name)
	// A damaged one must not be in the way of the rename.
	if err := os.RemoveAll(dir); err != nil {
		return nil, err
	}
	if err := os.Rename(tmp, dir); err != nil {
		return nil, err
	}
	if err := syncDir(filepath.Join(root, kernelsDir)); err != nil {
		return nil, err
	}
	k, _, err := load(root, name)
	return k, err
}
