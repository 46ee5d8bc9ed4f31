package vmassets

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
)

// libkrunName is the directory below libkrun/ that holds the pair which this
// build knows.
const libkrunName = "libkrun-1.17.4-libkrunfw-5.6.1"

// maxMember bounds the size of one unpacked library, in bytes.
const maxMember = 128 << 20

// npmPackage is a package that carries one of the libraries, as the registry
// serves it.
type npmPackage struct {
	name, version string
	sha256        string // of the packed file
	// members of the archive, by the names that they get.
	members map[string]string
}

// pairPackages are the packages of the pair, and a note to lie beside it. Each is
// made for another program, which is why only these members are taken.
func pairPackages() ([]npmPackage, string) {
	library, firmware := pairNames("linux")
	return []npmPackage{
		{
			name: "@earendil-works/gondolin-krun-runner-linux-x64", version: "0.12.0",
			sha256:  "f541c68cd4fb7cb9b262d0b3c95a7d12f74920bc3562fc2104080aab5f6833a8",
			members: map[string]string{library: "package/lib/libkrun.so.1.17.4", "LICENSE.libkrun": "package/LICENSE"},
		},
		{
			name: "@superradcompany/microsandbox-linux-x64-gnu", version: "0.7.2",
			sha256:  "7aacbb9ab86a152813d005c6ba12551b104997be9234a010a3473e4b2e9703e0",
			members: map[string]string{firmware: "package/lib/libkrunfw.so.5.6.1"},
		},
	}, pairNotice
}

const pairNotice = `libkrun.so.1 is libkrun 1.17.4, under the Apache License 2.0 (LICENSE.libkrun).
  Source:  https://github.com/libkrun/libkrun, tag v1.17.4
  Built by and taken from npm package @earendil-works/gondolin-krun-runner-linux-x64 0.12.0
libkrunfw.so.5 is libkrunfw 5.6.1: a library under LGPL-2.1-only whose data is
Linux 6.12.109, under GPL-2.0-only.
  Source:  https://github.com/superradcompany/libkrunfw (build and patches),
           Linux 6.12.109 from https://www.kernel.org
  Built by and taken from npm package @superradcompany/microsandbox-linux-x64-gnu 0.7.2
Both are used as they are; neither is part of this project.
`

func libkrunDir(root string) string { return filepath.Join(root, "libkrun", libkrunName) }

// packagedFor tells where the pair of pairPackages runs.
func packagedFor(goos, goarch string) bool { return goos == "linux" && goarch == "amd64" }

// SetupLibkrun makes sure that this host has libkrun and libkrunfw, and returns
// them. Where FindLibkrun finds a pair it fetches nothing, unless o.Update and
// it is not the one of this build.
//
// It fetches them with `npm pack`, which runs no script of theirs and installs
// nothing, checks each package against the checksum that this build knows, and
// keeps the two libraries and their licences. That takes 50 MiB of download and
// 30 MiB of disk. Concurrent calls, also of other processes, do the work once;
// ctx ends it at any point, and so does kill -9, without leaving anything that
// counts. Only for Linux on x86-64 with glibc; the error tells what to do
// elsewhere, also where a library is missing that they need.
func SetupLibkrun(ctx context.Context, o Options) (*Libkrun, error) {
	if pair, err := FindLibkrun(o.Dir, o.Getenv); !errors.Is(err, ErrNoLibkrun) {
		if err != nil || !o.Update || o.Getenv(envLibkrun) != "" || filepath.Dir(pair.Library) == libkrunDir(o.Dir) {
			return pair, err
		}
	}
	if named := o.Getenv(envLibkrun); named != "" {
		return FindLibkrun(o.Dir, o.Getenv) // what is wrong with it
	}
	if !packagedFor(runtime.GOOS, runtime.GOARCH) {
		return nil, advise(libkrunAdvice(runtime.GOOS, runtime.GOARCH), "no package with libkrun is known for %s/%s", runtime.GOOS, runtime.GOARCH)
	}
	packages, notice := pairPackages()
	pair, err := setupPair(ctx, &o, packages, notice)
	if err != nil {
		return nil, fmt.Errorf("set up libkrun: %w", err)
	}
	return pair, pair.check()
}

// setupPair fetches the packages unless somebody has done it meanwhile.
func setupPair(ctx context.Context, o *Options, packages []npmPackage, notice string) (_ *Libkrun, err error) {
	dir := libkrunDir(o.Dir)
	lock, err := lockDir(ctx, filepath.Dir(dir), func() { o.say("libkrun: waiting for another setup to end") })
	if err != nil {
		return nil, err
	}
	defer lock.Close() //nolint:errcheck // only a lock
	if pair, _ := (place{dir: dir}).look(); pair != nil {
		return pair, nil
	}
	npm, ok := lookPath(o.Getenv("PATH"), "npm")
	if !ok {
		return nil, advise("install npm (Debian: apt-get install --no-install-recommends npm), or get libkrun in another way and set "+envLibkrun, "npm is not in PATH")
	}
	tmp, err := os.MkdirTemp(filepath.Dir(dir), tempPrefix)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	made := filepath.Join(tmp, "made")
	if err := os.Mkdir(made, 0o700); err != nil {
		return nil, err
	}
	for i, p := range packages {
		into := filepath.Join(tmp, fmt.Sprint("package-", i))
		if err := p.fetch(ctx, o, npm, into, made); err != nil {
			return nil, fmt.Errorf("package %s %s: %w", p.name, p.version, err)
		}
	}
	if err := writeSynced(made, "NOTICE.txt", []byte(notice)); err != nil {
		return nil, err
	}
	if err := errors.Join(syncDir(made), os.Rename(made, dir), syncDir(filepath.Dir(dir))); err != nil {
		return nil, err
	}
	o.say("libkrun: ready in %s\n%s", dir, notice)
	o.Log.Info("libkrun is ready", "dir", dir)
	pair, tried := place{dir: dir}.look()
	if pair == nil {
		return nil, fmt.Errorf("the packages have no %v", tried)
	}
	return pair, nil
}

// fetch downloads the package into a new directory and unpacks its members.
func (p npmPackage) fetch(ctx context.Context, o *Options, npm, into, made string) error {
	if err := os.Mkdir(into, 0o700); err != nil {
		return err
	}
	o.say("libkrun: downloading %s %s", p.name, p.version)
	env := o.environment("NO_UPDATE_NOTIFIER=1",
		"npm_config_registry", "NPM_CONFIG_REGISTRY", "npm_config_userconfig", "NPM_CONFIG_USERCONFIG", "npm_config_cache", "NPM_CONFIG_CACHE",
		"npm_config_cafile", "NPM_CONFIG_CAFILE", "NODE_EXTRA_CA_CERTS")
	stop := o.reportGrowth("libkrun", into)
	_, err := runProgram(ctx, env, into, npm, "pack", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error", p.name+"@"+p.version)
	stop()
	if err != nil {
		return fmt.Errorf("%w: check the network, and which registry npm is set up for", err)
	}
	packed, err := filepath.Glob(filepath.Join(into, "*.tgz"))
	if err != nil || len(packed) != 1 {
		return fmt.Errorf("npm pack left %d files instead of one", len(packed))
	}
	if err := checkSum(packed[0], p.sha256); err != nil {
		return err
	}
	return unpackMembers(packed[0], p.members, made)
}

// checkSum compares a file's SHA-256 with what is expected.
func checkSum(path, want string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close() //nolint:errcheck // only read
	sum := sha256.New()
	if _, err := io.Copy(sum, file); err != nil {
		return err
	}
	if got := hex.EncodeToString(sum.Sum(nil)); got != want {
		return advise("do not use it; the registry serves something else than this build knows", "its SHA-256 is %s, not %s", got, want)
	}
	return nil
}

// unpackMembers takes members out of a packed file and writes them to dir, on
// the disk before it returns.
func unpackMembers(packed string, members map[string]string, dir string) error {
	file, err := os.Open(packed)
	if err != nil {
		return err
	}
	defer file.Close() //nolint:errcheck // only read
	plain, err := gzip.NewReader(file)
	if err != nil {
		return err
	}
	names := map[string]string{}
	for name, member := range members {
		names[member] = name
	}
	archive := tar.NewReader(plain)
	for len(names) > 0 {
		head, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return fmt.Errorf("it lacks %v", names)
		}
		if err != nil {
			return err
		}
		name, wanted := names[head.Name]
		if !wanted {
			continue
		}
		if head.Typeflag != tar.TypeReg || head.Size > maxMember {
			return fmt.Errorf("%s is not a regular file of at most %d bytes", head.Name, maxMember)
		}
		err = writeFile(dir, name, true, func(f *os.File) error {
			_, err := io.CopyN(f, archive, head.Size)
			return err
		})
		if err != nil {
			return err
		}
		delete(names, head.Name)
	}
	return nil
}
