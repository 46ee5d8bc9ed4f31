package vmassets

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

const (
	initramfsDir = "initramfs"
	archiveExt   = ".cpio"
	refExt       = ".ref"
	// archiveFormat changes whenever the same inputs give another archive.
	archiveFormat = "3"
	// keepArchives is how many archives stay even when they are old, and
	// keepTime how long one stays after its last use: it covers the time from
	// here to QEMU's having read it.
	keepArchives = 4
	keepTime     = time.Hour
	// keepRefs is how long the memory of an agent file is kept.
	keepRefs = 30 * 24 * time.Hour
)

// Initramfs returns the path of an uncompressed newc archive with the agent as
// /init, the kernel's modules as /modules/<name>.ko and their file names, one a
// line in load order, in /modules/order; also /dev/console and the empty
// directories dev, proc and sys. agentPath must be a static executable of the
// kernel's architecture.
//
// It is built at the first call for an agent's content and found again by the
// file's identity (a millisecond). The file stays for at least an hour after
// the latest call that returned it.
func (k *Kernel) Initramfs(ctx context.Context, agentPath string) (string, error) {
	path, err := k.initramfs(ctx, agentPath)
	if err != nil {
		return "", fmt.Errorf("initramfs: %w", err)
	}
	return path, nil
}

func (k *Kernel) initramfs(ctx context.Context, agentPath string) (string, error) {
	agent, err := os.Open(agentPath)
	if err != nil {
		return "", err
	}
	defer agent.Close() //nolint:errcheck // only read
	info, err := agent.Stat()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(k.root, initramfsDir)
	ref := k.refName(info)
	if path := remembered(dir, ref); path != "" {
		return path, nil
	}
	lock, err := lockDir(ctx, dir, nil)
	if err != nil {
		return "", err
	}
	defer lock.Close() //nolint:errcheck // only a lock
	if path := remembered(dir, ref); path != "" {
		return path, nil
	}
	if err := CheckAgent(agentPath, k.Arch); err != nil {
		return "", err
	}
	name, err := k.archiveName(agent)
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, name)
	if !use(path) {
		if err := writeFile(dir, name, true, func(f *os.File) error { return k.writeArchive(f, agent, info) }); err != nil {
			return "", err
		}
	}
	// A file changed while it was read has another identity now; what was read
	// must not be remembered under either.
	if now, err := os.Stat(agentPath); err != nil || stamp(now) != stamp(info) {
		return "", errors.Join(fmt.Errorf("%s was changed while it was read: try again", agentPath), err)
	}
	err = writeFile(dir, ref, false, func(f *os.File) error {
		_, err := f.WriteString(name)
		return err
	})
	if err != nil {
		return "", err
	}
	return path, pruneArchives(dir, time.Now())
}

// refName derives the name of the file that remembers the archive of k and the
// agent with this identity.
func (k *Kernel) refName(agent os.FileInfo) string {
	sum := sha256.Sum256([]byte(archiveFormat + "\n" + filepath.Base(k.dir) + "\n" + stamp(agent)))
	return hex.EncodeToString(sum[:16]) + refExt
}

// remembered returns the archive that ref names, if it is there still.
func remembered(dir, ref string) string {
	name, err := os.ReadFile(filepath.Join(dir, ref))
	if err != nil || !validName(string(name)) || filepath.Ext(string(name)) != archiveExt {
		return ""
	}
	path := filepath.Join(dir, string(name))
	if !use(path) {
		return ""
	}
	return path
}

// use marks an archive as used now and reports whether it is there.
func use(path string) bool {
	if info, err := os.Lstat(path); err != nil || !info.Mode().IsRegular() {
		return false
	}
	now := time.Now()
	return os.Chtimes(path, now, now) == nil
}

// archiveName derives the archive's name from its content, leaving agent at its
// beginning.
func (k *Kernel) archiveName(agent *os.File) (string, error) {
	sum := sha256.New()
	if _, err := fmt.Fprintf(sum, "%s\n%s\n", archiveFormat, filepath.Base(k.dir)); err != nil {
		return "", err
	}
	if _, err := io.Copy(sum, agent); err != nil {
		return "", err
	}
	if _, err := agent.Seek(0, io.SeekStart); err != nil {
		return "", err
	}
	return k.Release + "_" + hex.EncodeToString(sum.Sum(nil)[:12]) + archiveExt, nil
}

// writeArchive writes the whole archive to f.
func (k *Kernel) writeArchive(f, agent *os.File, info fs.FileInfo) error {
	out := bufio.NewWriterSize(f, 1<<20)
	c := &cpioWriter{w: out}
	order := orderFile(k.Modules)
	entries := []entry{
		{name: "dev", mode: cpioDir | 0o755},
		{name: "dev/console", mode: cpioChar | 0o600, major: 5, minor: 1},
		{name: "proc", mode: cpioDir | 0o555},
		{name: "sys", mode: cpioDir | 0o555},
		{name: "modules", mode: cpioDir | 0o755},
		{name: "modules/order", mode: cpioFile | 0o644, size: int64(len(order)), data: bytes.NewReader(order)},
	}
	for _, e := range entries {
		if err := c.add(e); err != nil {
			return err
		}
	}
	for _, name := range k.Modules {
		data, err := os.ReadFile(filepath.Join(k.dir, modulesDir, name))
		if err != nil {
			return err
		}
		data = lean(data)
		e := entry{name: "modules/" + name, mode: cpioFile | 0o644, size: int64(len(data)), data: bytes.NewReader(data)}
		if err := c.add(e); err != nil {
			return err
		}
	}
	if err := c.add(entry{name: "init", mode: cpioFile | 0o755, size: info.Size(), data: agent}); err != nil {
		return err
	}
	if err := c.close(); err != nil {
		return err
	}
	return out.Flush()
}

// pruneArchives removes archives that nobody has used for a while, and what
// remembers agents of long ago. The caller holds the lock.
func pruneArchives(dir string, now time.Time) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	type archive struct {
		name string
		used time.Time
	}
	var archives []archive
	var errs []error
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			continue
		}
		switch {
		case strings.HasSuffix(e.Name(), archiveExt):
			archives = append(archives, archive{e.Name(), info.ModTime()})
		case strings.HasSuffix(e.Name(), refExt) && now.Sub(info.ModTime()) > keepRefs:
			errs = append(errs, removeIfThere(filepath.Join(dir, e.Name())))
		}
	}
	slices.SortFunc(archives, func(a, b archive) int { return b.used.Compare(a.used) })
	for i, a := range archives {
		path := filepath.Join(dir, a.name)
		if i < keepArchives || now.Sub(a.used) <= keepTime {
			continue
		}
		// Users do not take the lock, so look again at the last moment.
		if info, err := os.Stat(path); err == nil && now.Sub(info.ModTime()) > keepTime {
			errs = append(errs, removeIfThere(path))
		}
	}
	return errors.Join(errs...)
}
