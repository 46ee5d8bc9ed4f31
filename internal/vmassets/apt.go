package vmassets

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"
)

// errLists marks a failure that newer package lists may cure.
var errLists = errors.New("the package lists are missing or out of date: run `apt-get update` as root, then try again; " +
	"on a system that is not Debian, set " + envKernel + " (and " + envModules + ") instead")

const (
	// stopGrace is what a program has to end after SIGTERM.
	stopGrace = 5 * time.Second
	// progressEvery is how often a long download says that it lives.
	progressEvery = 2 * time.Second
	// errorTail is how much of a failed program's last words an error carries.
	errorTail = 600
)

// apt drives Debian's package client as the user who runs this process.
type apt struct {
	o                      *Options
	env                    []string
	aptCache, aptGet, dpkg string
	root, updated          bool
}

// packageVersion is one package to fetch.
type packageVersion struct {
	name, version string
}

func newApt(o *Options) (*apt, error) {
	a := &apt{o: o, root: os.Geteuid() == 0, env: o.environment("DEBIAN_FRONTEND=noninteractive", "APT_CONFIG", "ftp_proxy")}
	for _, program := range []struct {
		name string
		path *string
	}{{"apt-cache", &a.aptCache}, {"apt-get", &a.aptGet}, {"dpkg-deb", &a.dpkg}} {
		path, ok := lookPath(o.Getenv("PATH"), program.name)
		if !ok {
			return nil, fmt.Errorf("%s is not in PATH, so the kernel cannot come from Debian's packages: set %s to a vmlinuz, and %s to its /lib/modules/<release>",
				program.name, envKernel, envModules)
		}
		*program.path = path
	}
	return a, nil
}

// fetch gets the newest kernel package that meta depends on into dir and
// unpacks it there. With have as the newest version it does nothing, and
// unpacked is empty.
func (a *apt) fetch(ctx context.Context, meta, have, dir string) (unpacked, version string, err error) {
	pkg, err := a.newest(ctx, meta)
	if errors.Is(err, errLists) && a.update(ctx, err) {
		pkg, err = a.newest(ctx, meta)
	}
	if err != nil {
		return "", "", err
	}
	if pkg.version == have {
		return "", have, nil
	}
	deb, err := a.download(ctx, pkg, dir)
	if err != nil && a.update(ctx, err) {
		// The lists named a version that the archive has dropped since.
		if pkg, err = a.newest(ctx, meta); err == nil {
			deb, err = a.download(ctx, pkg, dir)
		}
	}
	if err != nil {
		return "", "", fmt.Errorf("%w: check the network; when the archive has a newer version, run `apt-get update` as root", err)
	}
	unpacked = filepath.Join(dir, "unpacked")
	if err := os.Mkdir(unpacked, 0o700); err != nil {
		return "", "", err
	}
	if _, err := a.run(ctx, dir, a.dpkg, "--extract", deb, unpacked); err != nil {
		return "", "", err
	}
	return unpacked, pkg.version, nil
}

// newest resolves the meta package to the package of the newest kernel.
func (a *apt) newest(ctx context.Context, meta string) (packageVersion, error) {
	out, err := a.run(ctx, "", a.aptCache, "show", "--no-all-versions", meta)
	if err != nil {
		return packageVersion{}, fmt.Errorf("%w: %w", err, errLists)
	}
	return parseMeta(meta, out)
}

// update brings the package lists up to date, once, where this process may and
// the failure cause was not the end of ctx.
func (a *apt) update(ctx context.Context, cause error) bool {
	if !a.root || a.updated || ctx.Err() != nil {
		return false
	}
	a.updated = true
	a.o.say("kernel: the package lists are missing or out of date: apt-get update")
	a.o.Log.Info("updating the package lists", "cause", cause)
	if _, err := a.run(ctx, "", a.aptGet, "-q", "update"); err != nil {
		a.o.Log.Warn("apt-get update", "err", err)
		return false
	}
	return true
}

// parseMeta reads the kernel package and its exact version out of the meta
// package's record.
func parseMeta(meta string, record []byte) (packageVersion, error) {
	var depends string
	for line := range strings.SplitSeq(string(record), "\n") {
		if value, ok := strings.CutPrefix(line, "Depends:"); ok {
			depends = value
			break
		}
	}
	for item := range strings.SplitSeq(depends, ",") {
		match := kernelDependency().FindStringSubmatch(strings.TrimSpace(item))
		if match != nil {
			return packageVersion{name: match[1], version: match[2]}, nil
		}
	}
	return packageVersion{}, fmt.Errorf("package %s depends on no single kernel package but on %q", meta, strings.TrimSpace(depends))
}

// kernelDependency matches a dependency on one version of one kernel package.
// Both become arguments of apt-get, so nothing else may be in them.
func kernelDependency() *regexp.Regexp {
	return regexp.MustCompile(`^(linux-image-[a-z0-9][a-z0-9+.-]*) \(= ([A-Za-z0-9][A-Za-z0-9.+~:-]*)\)$`)
}

// download fetches pkg into a new directory below dir and returns the file. apt
// checks it against the hash in its signed lists.
func (a *apt) download(ctx context.Context, pkg packageVersion, dir string) (string, error) {
	dir, err := os.MkdirTemp(dir, "download-")
	if err != nil {
		return "", err
	}
	a.o.say("kernel: downloading %s %s", pkg.name, pkg.version)
	args := []string{"-q", "download", pkg.name + "=" + pkg.version}
	if a.root {
		// apt would try to download as user _apt, who cannot write to our
		// private directory, and warn about it.
		args = append([]string{"-o", "APT::Sandbox::User=root"}, args...)
	}
	stop := a.o.reportGrowth("kernel", dir)
	_, err = a.run(ctx, dir, a.aptGet, args...)
	stop()
	if err != nil {
		return "", err
	}
	return oneMatch(filepath.Join(dir, "*.deb"))
}

// reportGrowth says every few seconds how much has arrived in dir, until the
// returned function is called.
func (o *Options) reportGrowth(what, dir string) (stop func()) {
	quit, gone := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(gone)
		tick := time.NewTicker(progressEvery)
		defer tick.Stop()
		for {
			select {
			case <-quit:
				return
			case <-tick.C:
				o.say("%s: %d MiB downloaded", what, sizeBelow(dir)>>20)
			}
		}
	}()
	return func() {
		close(quit)
		<-gone
	}
}

// sizeBelow adds up the sizes of the files in dir, as well as it can be told
// while they come and go.
func sizeBelow(dir string) int64 {
	var size int64
	entries, err := os.ReadDir(dir)
	if err != nil {
		return 0
	}
	for _, e := range entries {
		if info, err := e.Info(); err == nil && info.Mode().IsRegular() {
			size += info.Size()
		}
	}
	return size
}

// run runs a program with apt's environment; see runProgram.
func (a *apt) run(ctx context.Context, dir, program string, args ...string) ([]byte, error) {
	return runProgram(ctx, a.env, dir, program, args...)
}

// environment is what a package client gets: a setting of ours, and of this
// process's environment what every such client needs and what is named beside.
// Nothing else is its business.
func (o *Options) environment(setting string, beside ...string) []string {
	env := []string{"LC_ALL=C", setting}
	for _, key := range append([]string{
		"PATH", "HOME", "TMPDIR", "http_proxy", "https_proxy", "no_proxy", "all_proxy",
		"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY",
	}, beside...) {
		if value := o.Getenv(key); value != "" {
			env = append(env, key+"="+value)
		}
	}
	return env
}

// runProgram runs a program to its end and returns what it printed. The error
// has the end of what it said on standard error.
func runProgram(ctx context.Context, env []string, dir, program string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir, cmd.Env = dir, env
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = stopGrace
	err := cmd.Run()
	if err == nil {
		return stdout.Bytes(), nil
	}
	what := filepath.Base(program) + " " + strings.Join(args, " ")
	if cause := context.Cause(ctx); cause != nil {
		return nil, fmt.Errorf("%s: %w", what, cause)
	}
	said := strings.TrimSpace(stderr.String())
	said = said[max(0, len(said)-errorTail):]
	return nil, fmt.Errorf("%s: %w: %s", what, err, strings.ReplaceAll(said, "\n", "; "))
}

// lookPath finds an executable in a PATH.
func lookPath(path, name string) (string, bool) {
	for _, dir := range filepath.SplitList(path) {
		if !filepath.IsAbs(dir) {
			continue
		}
		file := filepath.Join(dir, name)
		if checkExecutable(file) == nil {
			return file, true
		}
	}
	return "", false
}
