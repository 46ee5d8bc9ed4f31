package main

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/proc"
)

// step changes the merged tree as maintainer scripts would have. A step may run
// programs of the image from a copy below dir, which exists and is empty; steps
// work as any user.
type step func(ctx context.Context, t *tree, dir string) error

// mergedUsr links /bin and its like into /usr.
func mergedUsr(_ context.Context, t *tree, _ string) error {
	for _, p := range topLinks() {
		if p != "bin" && p != "sbin" && p != "lib" && !t.has("usr/"+p) {
			continue
		}
		if err := t.mkdirMissing("usr/" + p); err != nil {
			return err
		}
		if err := t.symlink(p, "usr/"+p); err != nil {
			return err
		}
	}
	return nil
}

func (t *tree) mkdirMissing(p string) error {
	if t.has(p) {
		return nil
	}
	return t.mkdir(p, 0o755, 0, 0)
}

// accounts makes the user database from base-passwd's masters; every account
// is locked.
func accounts(_ context.Context, t *tree, _ string) error {
	users, err := t.read("usr/share/base-passwd/passwd.master")
	if err != nil {
		return err
	}
	// The masters have "*" where shadow's users have "x".
	users = bytes.ReplaceAll(users, []byte(":*:"), []byte(":x:"))
	groups, err := t.read("usr/share/base-passwd/group.master")
	if err != nil {
		return err
	}
	shadowGID, err := groupID(groups, "shadow")
	if err != nil {
		return err
	}
	day := t.newest / 86400
	var shadow, gshadow bytes.Buffer
	for _, name := range firstFields(users) {
		fmt.Fprintf(&shadow, "%s:*:%d:0:99999:7:::\n", name, day)
	}
	for _, name := range firstFields(groups) {
		fmt.Fprintf(&gshadow, "%s:*::\n", name)
	}
	for _, f := range []struct {
		path string
		mode int64
		gid  int
		data []byte
	}{
		{"etc/passwd", 0o644, 0, users},
		{"etc/group", 0o644, 0, groups},
		{"etc/shadow", 0o640, shadowGID, shadow.Bytes()},
		{"etc/gshadow", 0o640, shadowGID, gshadow.Bytes()},
	} {
		if err := t.write(f.path, f.mode, f.data); err != nil {
			return err
		}
		t.nodes[f.path].gid = f.gid
	}
	return nil
}

func firstFields(db []byte) []string {
	var names []string
	for line := range strings.Lines(string(db)) {
		if name, _, ok := strings.Cut(line, ":"); ok {
			names = append(names, name)
		}
	}
	return names
}

func groupID(groups []byte, name string) (int, error) {
	for line := range strings.Lines(string(groups)) {
		if f := strings.Split(strings.TrimSpace(line), ":"); len(f) >= 3 && f[0] == name {
			return strconv.Atoi(f[2])
		}
	}
	return 0, fmt.Errorf("base-passwd has no group %s", name)
}

// baseDirs makes the directories that the script of base-files makes, with
// Debian's modes; group 8 is mail.
func baseDirs(_ context.Context, t *tree, _ string) error {
	for _, d := range []struct {
		path string
		mode int64
		gid  int
	}{
		{"dev", 0o755, 0},
		{"etc/opt", 0o755, 0},
		{"home", 0o755, 0},
		{"media", 0o755, 0},
		{"mnt", 0o755, 0},
		{"opt", 0o755, 0},
		{"proc", 0o755, 0},
		{"root", 0o700, 0},
		{"run", 0o755, 0},
		{"run/lock", 0o1777, 0},
		{"srv", 0o755, 0},
		{"sys", 0o755, 0},
		{"tmp", 0o1777, 0},
		{"usr/local/bin", 0o755, 0},
		{"usr/local/etc", 0o755, 0},
		{"usr/local/include", 0o755, 0},
		{"usr/local/lib", 0o755, 0},
		{"usr/local/sbin", 0o755, 0},
		{"usr/local/share", 0o755, 0},
		{"usr/local/src", 0o755, 0},
		{"var/cache", 0o755, 0},
		{"var/log", 0o755, 0},
		{"var/mail", 0o2775, 8},
		{"var/opt", 0o755, 0},
		{"var/spool", 0o755, 0},
		{"var/tmp", 0o1777, 0},
	} {
		if err := t.mkdir(d.path, d.mode, 0, d.gid); err != nil {
			return err
		}
	}
	for _, l := range [][2]string{{"var/run", "/run"}, {"var/lock", "/run/lock"}} {
		t.removeAll(l[0])
		if err := t.symlink(l[0], l[1]); err != nil {
			return err
		}
	}
	return t.symlink("var/spool/mail", "../mail")
}

// baseFiles makes the files that the scripts of base-files, libc-bin and
// debianutils make.
func baseFiles(_ context.Context, t *tree, _ string) error {
	if t.has("usr/share/zoneinfo/Etc/UTC") {
		if err := t.symlink("etc/localtime", "/usr/share/zoneinfo/Etc/UTC"); err != nil {
			return err
		}
	}
	for _, c := range [][2]string{
		{"usr/share/base-files/dot.profile", "root/.profile"},
		{"usr/share/base-files/dot.bashrc", "root/.bashrc"},
		{"usr/share/base-files/profile", "etc/profile"},
		{"usr/share/libc-bin/nsswitch.conf", "etc/nsswitch.conf"},
	} {
		if err := t.copy(c[0], c[1], 0o644); err != nil {
			return err
		}
	}
	if err := t.write("etc/shells", 0o644, []byte("/bin/sh\n/bin/bash\n/bin/dash\n/usr/bin/bash\n/usr/bin/dash\n/usr/bin/sh\n")); err != nil {
		return err
	}
	return t.write("etc/hosts", 0o644, []byte("127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n"))
}

// certificates makes the bundle of all authorities that ca-certificates ships,
// where curl, Go and others look, and links it to where OpenSSL looks.
func certificates(_ context.Context, t *tree, _ string) error {
	var bundle bytes.Buffer
	for _, p := range t.paths() {
		if path.Dir(p) != "usr/share/ca-certificates/mozilla" || path.Ext(p) != ".crt" {
			continue
		}
		pem, err := t.read(p)
		if err != nil {
			return err
		}
		bundle.Write(bytes.TrimSpace(pem))
		bundle.WriteByte('\n')
	}
	if bundle.Len() == 0 {
		return errors.New("ca-certificates ships no certificate under /usr/share/ca-certificates/mozilla: the recipe does not fit this Debian release")
	}
	if err := t.write("etc/ssl/certs/ca-certificates.crt", 0o644, bundle.Bytes()); err != nil {
		return err
	}
	return t.symlink("usr/lib/ssl/cert.pem", "/etc/ssl/certs/ca-certificates.crt")
}

// alternatives links the generic names to the one program we have for each.
func alternatives(_ context.Context, t *tree, _ string) error {
	for _, l := range [][2]string{
		{"usr/bin/awk", "mawk"},
		{"usr/bin/nawk", "mawk"},
		{"usr/bin/which", "which.debianutils"},
		{"usr/bin/js", "nodejs"},
		{"usr/bin/python", "python3"},
		{"usr/sbin/rmt", "rmt-tar"},
	} {
		if !t.has(path.Join(path.Dir(l[0]), l[1])) {
			continue
		}
		if err := t.symlink(l[0], l[1]); err != nil {
			return err
		}
	}
	return nil
}

// busybox makes a whole small system of the one static program: a symlink for
// every applet the program itself lists, and the directories an agent mounts on.
func busybox(ctx context.Context, t *tree, dir string) error {
	const program = "usr/bin/busybox"
	data, err := t.read(program)
	if err != nil {
		return err
	}
	bin := filepath.Join(dir, "busybox")
	if err := proc.WriteProgram(bin, data); err != nil {
		return err
	}
	out, err := exec.CommandContext(ctx, bin, "--list-full").Output()
	if err != nil {
		return fmt.Errorf("ask busybox for its applets: %w", err)
	}
	for _, applet := range strings.Fields(string(out)) {
		p, err := canonical(applet)
		if err != nil {
			return err
		}
		if path.Dir(p) == "." {
			continue // linuxrc, for initial RAM disks
		}
		target := "busybox"
		if path.Dir(p) != path.Dir(program) {
			target = "/" + program
		}
		if err := t.symlink(p, target); err != nil {
			return err
		}
	}
	for _, d := range []string{"dev", "etc", "home", "mnt", "proc", "run", "sys", "var"} {
		if err := t.mkdir(d, 0o755, 0, 0); err != nil {
			return err
		}
	}
	for p, mode := range map[string]int64{"root": 0o700, "tmp": 0o1777, "var/tmp": 0o1777} {
		if err := t.mkdir(p, mode, 0, 0); err != nil {
			return err
		}
	}
	if err := t.write("etc/passwd", 0o644, []byte("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n")); err != nil {
		return err
	}
	return t.write("etc/group", 0o644, []byte("root:x:0:\nnogroup:x:65534:\n"))
}

// isFile reports whether p is a regular file.
func (t *tree) isFile(p string) bool {
	n, ok := t.nodes[p]
	return ok && n.typ == tar.TypeReg
}
