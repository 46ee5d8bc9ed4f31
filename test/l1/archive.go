package l1

import (
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cavaliergopher/cpio"
)

// initScript is the machine's first program; %s are variables and the command.
// Before anything else makes a VM there is one that stays (see Machine.build).
const initScript = `#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/opt:/bin HOME=/root TERM=linux
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev
exec </dev/ttyS0 >/dev/ttyS0 2>&1
mount -t tmpfs -o size=75%% none /tmp
mount -t tmpfs -o size=75%% none /run
for module in /modules/*.ko; do insmod "$module"; done
ifconfig lo up
mkfifo /run/anchor
/anchor >/run/anchor &
read said </run/anchor
[ "$said" = held ] || echo "l1: $said"
%s
cd /tmp
cat >/tmp/command <<'END-OF-COMMAND'
%s
END-OF-COMMAND
sh /tmp/command
echo "` + statusMark + `$?"
poweroff -f
`

// archive is the machine's initramfs being written.
type archive struct {
	w    *cpio.Writer
	dirs map[string]bool
}

// writeArchive makes the initramfs of the machine; anchor is that program.
func (m *Machine) writeArchive(file io.Writer, d debian, anchor string) error {
	a := &archive{w: cpio.NewWriter(file), dirs: map[string]bool{}}
	for _, dir := range []string{"proc", "sys", "dev", "tmp", "run", "root", "bin", "etc"} {
		if err := a.dir(dir); err != nil {
			return err
		}
	}
	files := maps.Clone(m.Files)
	files["bin/busybox"], files["anchor"] = d.busybox, anchor
	for i, module := range d.modules {
		files[fmt.Sprintf("modules/%02d-%s", i, filepath.Base(module))] = module
	}
	if err := libraries(files, slices.Collect(maps.Values(m.Files))...); err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if err := a.file(name, files[name]); err != nil {
			return err
		}
	}
	for _, name := range slices.Sorted(maps.Keys(m.Trees)) {
		if err := a.tree(name, m.Trees[name]); err != nil {
			return err
		}
	}
	var variables strings.Builder
	for _, key := range slices.Sorted(maps.Keys(m.Env)) {
		fmt.Fprintf(&variables, "export %s='%s'\n", key, m.Env[key])
	}
	if err := a.content("init", fmt.Appendf(nil, initScript, &variables, m.Command)); err != nil {
		return err
	}
	return a.w.Close()
}

// libraries adds what dynamic programs and libraries need, as they name it.
func libraries(files map[string]string, programs ...string) error {
	dirs := []string{"/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64"}
	for queue := slices.Clone(programs); len(queue) > 0; queue = queue[1:] {
		program, err := elf.Open(queue[0])
		if _, text := errors.AsType[*elf.FormatError](err); text {
			continue // not a program
		}
		if err != nil {
			return err
		}
		needed, err := program.ImportedLibraries()
		_ = program.Close() // only read
		if err != nil {
			return err
		}
		for _, name := range needed {
			target := "lib/x86_64-linux-gnu/" + name
			if name == "ld-linux-x86-64.so.2" {
				target = "lib64/" + name
			}
			if files[target] != "" {
				continue
			}
			at := slices.IndexFunc(dirs, func(dir string) bool {
				_, err := os.Stat(filepath.Join(dir, name))
				return err == nil
			})
			if at < 0 {
				return fmt.Errorf("%s needs %s, which is not installed", queue[0], name)
			}
			files[target] = filepath.Join(dirs[at], name)
			queue = append(queue, files[target])
		}
	}
	return nil
}

func (a *archive) dir(name string) error {
	if name == "." || a.dirs[name] {
		return nil
	}
	if err := a.dir(filepath.Dir(name)); err != nil {
		return err
	}
	a.dirs[name] = true
	return a.w.WriteHeader(&cpio.Header{Name: name, Mode: cpio.TypeDir | 0o755})
}

func (a *archive) file(name, source string) error {
	file, err := os.Open(source)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	info, err := file.Stat()
	if err != nil {
		return err
	}
	if err := a.dir(filepath.Dir(name)); err != nil {
		return err
	}
	if err := a.w.WriteHeader(&cpio.Header{Name: name, Mode: cpio.TypeReg | 0o755, Size: info.Size()}); err != nil {
		return err
	}
	_, err = io.Copy(a.w, file)
	return err
}

func (a *archive) content(name string, data []byte) error {
	if err := a.w.WriteHeader(&cpio.Header{Name: name, Mode: cpio.TypeReg | 0o755, Size: int64(len(data))}); err != nil {
		return err
	}
	_, err := a.w.Write(data)
	return err
}

func (a *archive) tree(name, source string) error {
	return filepath.WalkDir(source, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		below, err := filepath.Rel(source, path)
		if err != nil {
			return err
		}
		return a.file(filepath.Join(name, below), path)
	})
}
