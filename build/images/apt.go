package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
)

// pkg is one binary package as the signed index describes it.
type pkg struct {
	Name    string `json:"name"`
	Version string `json:"version"`
	// File is the name of the .deb, Size its bytes, SHA256 its hash in hex.
	File   string `json:"file"`
	Size   int64  `json:"size"`
	SHA256 string `json:"sha256"`
}

// errNoIndex tells that the host has no package lists of Debian.
var errNoIndex = errors.New("apt has no package lists of Debian: run apt-get update as root")

// apt asks the host's package client as if nothing were installed and Debian
// were the only archive. It works as any user: the host's lists are read, all
// else is in work.
type apt struct {
	work string
	opts []string
}

// newApt checks that this is a host with Debian's tools and prepares work, an
// empty directory that the caller removes.
func newApt(ctx context.Context, work string) (*apt, error) {
	for _, tool := range []string{"apt-get", "dpkg", "dpkg-deb"} {
		if _, err := exec.LookPath(tool); err != nil {
			return nil, fmt.Errorf("%s is not installed: images are made of Debian packages, so build them on Debian (or in a Debian container) and copy the layouts", tool)
		}
	}
	a := &apt{work: work}
	out, err := run(ctx, "", "dpkg", "--print-architecture")
	if err != nil {
		return nil, err
	}
	if arch := strings.TrimSpace(string(out)); arch != runtime.GOARCH {
		return nil, fmt.Errorf("this program was built for %s but the host's packages are for %s: build it with GOARCH=%[2]s", runtime.GOARCH, arch)
	}
	for _, d := range []string{"cache/archives/partial"} {
		if err := os.MkdirAll(filepath.Join(work, d), 0o700); err != nil {
			return nil, err
		}
	}
	if err := os.WriteFile(filepath.Join(work, "status"), nil, 0o600); err != nil {
		return nil, err
	}
	for _, o := range []string{
		"Dir::State::status=" + filepath.Join(work, "status"),
		"Dir::State::extended_states=" + filepath.Join(work, "extended_states"),
		"Dir::Cache=" + filepath.Join(work, "cache"),
		"Dir::Etc::sourcelist=" + filepath.Join(work, "sources.list"), "Dir::Etc::sourceparts=-",
		"Dir::Etc::preferences=-", "Dir::Etc::preferencesparts=-",
		"APT::Default-Release=", "APT::Install-Recommends=false", "APT::Install-Suggests=false",
		"APT::Architecture=" + runtime.GOARCH, "APT::Architectures=" + runtime.GOARCH,
		"Debug::NoLocking=true", "Acquire::Retries=3",
		// The download directory is ours alone, which apt's own user cannot enter.
		"APT::Sandbox::User=root",
	} {
		a.opts = append(a.opts, "-o", o)
	}
	return a, nil
}

// useDebian limits what follows to the host's lists that come from Debian and
// whose signature apt has verified. Without any it runs apt-get update once
// when it is root, and returns errNoIndex otherwise.
func (a *apt) useDebian(ctx context.Context, note func(string)) error {
	sources, err := debianSources(ctx)
	if err != nil {
		return err
	}
	if len(sources) == 0 && os.Geteuid() == 0 {
		note("no package lists on this host: running apt-get update")
		if _, err := run(ctx, "", "apt-get", "-qq", "update"); err != nil {
			return fmt.Errorf("%w (as tried now: %w)", errNoIndex, err)
		}
		if sources, err = debianSources(ctx); err != nil {
			return err
		}
	}
	if len(sources) == 0 {
		return errNoIndex
	}
	return os.WriteFile(filepath.Join(a.work, "sources.list"), []byte(strings.Join(sources, "\n")+"\n"), 0o600)
}

func debianSources(ctx context.Context) ([]string, error) {
	out, err := run(ctx, "", "apt-get", "indextargets", "--format",
		"$(CREATED_BY)|$(ORIGIN)|$(TRUSTED)|$(ARCHITECTURE)|$(REPO_URI)|$(RELEASE)|$(COMPONENT)",
		"Created-By: Packages", "Origin: Debian", "Trusted: yes", "Architecture: "+runtime.GOARCH)
	if err != nil {
		return nil, err
	}
	var sources []string
	for line := range strings.Lines(string(out)) {
		f := strings.Split(strings.TrimSpace(line), "|")
		if len(f) != 7 || f[0] != "Packages" || f[1] != "Debian" || f[2] != "yes" || f[3] != runtime.GOARCH {
			continue
		}
		s := fmt.Sprintf("deb [arch=%s] %s %s %s", f[3], f[4], f[5], f[6])
		if !slices.Contains(sources, s) {
			sources = append(sources, s)
		}
	}
	return sources, nil
}

// resolve lists the packages that an empty system would get with r's, sorted by
// name, without those r drops. It reads the host's lists alone: no network.
func (a *apt) resolve(ctx context.Context, r recipe) ([]pkg, error) {
	args := append(slices.Clone(a.opts), "-qq", "--simulate", "install", "--")
	out, err := run(ctx, "", "apt-get", append(args, r.packages...)...)
	if err != nil {
		return nil, fmt.Errorf("resolve the packages of %s: %w", r.name, err)
	}
	chosen, err := parseSimulation(out)
	if err != nil {
		return nil, err
	}
	chosen = slices.DeleteFunc(chosen, func(p pkg) bool { return slices.Contains(r.drop, p.Name) })
	args = append(slices.Clone(a.opts), "-qq", "--print-uris", "download", "--")
	out, err = run(ctx, a.work, "apt-get", append(args, exact(chosen)...)...)
	if err != nil {
		return nil, fmt.Errorf("look up the packages of %s: %w", r.name, err)
	}
	return describe(chosen, out)
}

// exact names the packages with their versions for apt-get.
func exact(pkgs []pkg) []string {
	var args []string
	for _, p := range pkgs {
		args = append(args, p.Name+"="+p.Version)
	}
	return args
}

// parseSimulation reads lines like
//
//	Inst tar (1.34+dfsg-1.2 Debian:12.15/oldstable [amd64])
func parseSimulation(out []byte) ([]pkg, error) {
	inst := regexp.MustCompile(`^Inst (\S+) \((\S+) `)
	var pkgs []pkg
	for line := range strings.Lines(string(out)) {
		if m := inst.FindStringSubmatch(line); m != nil {
			pkgs = append(pkgs, pkg{Name: m[1], Version: m[2]})
		}
	}
	if len(pkgs) == 0 {
		return nil, fmt.Errorf("apt-get chose no packages; it said %.200q", out)
	}
	slices.SortFunc(pkgs, func(a, b pkg) int { return strings.Compare(a.Name, b.Name) })
	return pkgs, nil
}

// describe completes pkgs from lines like
//
//	'http://host/pool/tar.deb' tar_1.34+dfsg-1.2_amd64.deb 815288 SHA256:66d6...
func describe(pkgs []pkg, out []byte) ([]pkg, error) {
	uri := regexp.MustCompile(`^'[^']*' (([a-z0-9][a-z0-9+.-]*)_[A-Za-z0-9%.+~_-]+\.deb) ([0-9]+) SHA256:([0-9a-f]{64})$`)
	found := map[string]pkg{}
	for line := range strings.Lines(string(out)) {
		m := uri.FindStringSubmatch(strings.TrimSpace(line))
		if m == nil {
			continue
		}
		size, err := strconv.ParseInt(m[3], 10, 64)
		if err != nil {
			return nil, fmt.Errorf("size of %s: %w", m[1], err)
		}
		found[m[2]] = pkg{File: m[1], Size: size, SHA256: m[4]}
	}
	for i, p := range pkgs {
		f, ok := found[p.Name]
		if !ok {
			return nil, fmt.Errorf("apt-get gave no file and SHA256 for %s=%s", p.Name, p.Version)
		}
		f.Name, f.Version = p.Name, p.Version
		pkgs[i] = f
	}
	return pkgs, nil
}

// download fetches the packages into dir; apt verifies each against its index.
func (a *apt) download(ctx context.Context, dir string, pkgs []pkg) error {
	args := append(slices.Clone(a.opts), "-qq", "download", "--")
	_, err := run(ctx, dir, "apt-get", append(args, exact(pkgs)...)...)
	return err
}

// run returns what a program prints; its error has the program's own words.
func run(ctx context.Context, dir, name string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "LC_ALL=C", "DEBIAN_FRONTEND=noninteractive")
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, fmt.Errorf("%s: %w: %s", name, err, tail(stdout.String()+stderr.String()))
	}
	return stdout.Bytes(), nil
}

// tail keeps apt's errors, or else the last lines, of an output.
func tail(out string) string {
	lines := strings.Split(strings.TrimSpace(out), "\n")
	if errs := slices.DeleteFunc(slices.Clone(lines), func(l string) bool { return !strings.HasPrefix(l, "E: ") }); len(errs) > 0 {
		lines = errs
	}
	return strings.Join(lines[max(0, len(lines)-5):], "; ")
}
