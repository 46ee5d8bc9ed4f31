package l1

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
)

// debian is what comes from Debian's packages: files of the machine.
type debian struct {
	kernel, busybox string
	// modules are in the order to load them.
	modules []string
}

// fetchDebian downloads and unpacks the packages once.
func fetchDebian(ctx context.Context, cache string, modules []string) (debian, error) {
	dir := filepath.Join(cache, "debian")
	if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
		if err := unpackDebian(ctx, dir); err != nil {
			return debian{}, fmt.Errorf("fetch the machine's kernel and shell: %w", err)
		}
	}
	kernels, err := filepath.Glob(filepath.Join(dir, "boot", "vmlinuz-*"))
	if err != nil || len(kernels) != 1 {
		return debian{}, fmt.Errorf("%s has %d kernels instead of one: remove it", dir, len(kernels))
	}
	d := debian{kernel: kernels[0], busybox: filepath.Join(dir, "bin", "busybox")}
	for _, name := range modules {
		found, err := filepath.Glob(filepath.Join(dir, "lib", "modules", "*", "kernel", name))
		if err != nil || len(found) != 1 {
			return debian{}, fmt.Errorf("the kernel's package has no module %s", name)
		}
		d.modules = append(d.modules, found[0])
	}
	return d, nil
}

// unpackDebian makes dir, which appears by one rename.
func unpackDebian(ctx context.Context, dir string) error {
	record, err := exec.CommandContext(ctx, "apt-cache", "show", "--no-all-versions", "linux-image-cloud-amd64").Output()
	if err != nil {
		return fmt.Errorf("apt-cache: %w: run apt-get update", err)
	}
	match := regexp.MustCompile(`linux-image-[a-z0-9.+-]*-cloud-amd64`).Find(record)
	if match == nil {
		return errors.New("linux-image-cloud-amd64 depends on no kernel")
	}
	tmp, err := os.MkdirTemp(filepath.Dir(dir), "debian-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(tmp) }()
	root := filepath.Join(tmp, "root")
	for _, name := range []string{string(match), "busybox-static"} {
		get := exec.CommandContext(ctx, "apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", name)
		get.Dir = tmp
		if out, err := get.CombinedOutput(); err != nil {
			return fmt.Errorf("apt-get download %s: %w\n%s", name, err, out)
		}
	}
	packages, err := filepath.Glob(filepath.Join(tmp, "*.deb"))
	if err != nil {
		return err
	}
	for _, deb := range packages {
		if out, err := exec.CommandContext(ctx, "dpkg-deb", "--extract", deb, root).CombinedOutput(); err != nil {
			return fmt.Errorf("dpkg-deb: %w\n%s", err, out)
		}
	}
	return os.Rename(root, dir)
}
