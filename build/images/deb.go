package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
)

// unpack merges the files of one .deb into t with dpkg-deb, which knows every
// compression a .deb may have. Nothing of the package is run.
func unpack(ctx context.Context, t *tree, owner, deb string) error {
	cmd := exec.CommandContext(ctx, "dpkg-deb", "--fsys-tarfile", deb)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	mergeErr := t.addTar(owner, out, wanted)
	if mergeErr == nil {
		_, mergeErr = io.Copy(io.Discard, out) // padding behind the archive's end
	}
	// Closing our end stops dpkg-deb when the merge gave up early.
	closeErr := out.Close()
	if mergeErr != nil {
		_ = cmd.Wait() // ends with SIGPIPE: the merge error says why
		return fmt.Errorf("unpack %s: %w", owner, errors.Join(mergeErr, closeErr))
	}
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("unpack %s: dpkg-deb: %w: %s", owner, err, bytes.TrimSpace(stderr.Bytes()))
	}
	return nil
}

// wanted leaves out what no program in a sandbox reads: manuals, translations,
// the packaging system's own notes. Licences stay.
func wanted(p string) bool {
	if rest, ok := strings.CutPrefix(p, "usr/share/doc/"); ok {
		_, file, below := strings.Cut(rest, "/")
		return !below || file == "copyright"
	}
	for _, dir := range []string{
		"usr/share/man", "usr/share/info", "usr/share/locale", "usr/share/lintian", "usr/share/bug", "usr/share/menu",
		"usr/share/doc-base", "usr/share/initramfs-tools", "usr/share/bash-completion", "usr/share/pixmaps",
		"usr/share/applications", "etc/init.d", "etc/cron.daily", "etc/dpkg", "etc/apt", "etc/update-motd.d",
		"usr/lib/systemd", "usr/lib/lsb", "var/lib/dpkg", "var/cache", "var/backups", "usr/share/debconf",
		"usr/share/zoneinfo/right", // leap seconds, which no system clock here counts
	} {
		if p == dir || strings.HasPrefix(p, dir+"/") {
			return false
		}
	}
	return true
}
