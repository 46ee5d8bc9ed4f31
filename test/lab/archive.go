package main

import (
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/cavaliergopher/cpio"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/vmassets"
)

// initScript is the machine's first program; %s is the command.
const initScript = `#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/opt:/bin HOME=/root TERM=linux
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev
exec </dev/console >/dev/console 2>&1
mount -t tmpfs -o size=75%% none /tmp
mount -t tmpfs -o size=75%% none /run
for module in /modules/*.ko; do insmod "$module"; done
ifconfig lo up
export III_SANDBOX_CACHE_DIR=/run/c III_SANDBOX_STATE_DIR=/run/s III_SANDBOX_RUN_DIR=/run/r
export III_SANDBOX_IMAGE_DIR=/opt/images III_LIBKRUN_PATH=/opt III_KRUN_SHIM=/opt/krun-shim III_GUEST_AGENT=/opt/guest-agent
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

// writeArchive makes the initramfs: busybox, the modules, our programs, libkrun
// and the libraries of both, and an image.
func writeArchive(path string, d debian, pair *vmassets.Libkrun, tests, image, command string) (err error) {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	a := &archive{w: cpio.NewWriter(file), dirs: map[string]bool{}}
	for _, dir := range []string{"proc", "sys", "dev", "tmp", "run", "root", "bin", "etc"} {
		if err := a.dir(dir); err != nil {
			return err
		}
	}
	shim := filepath.Join("bin", "krun-shim")
	files := map[string]string{
		"bin/busybox": d.busybox, "opt/shimdriver.test": tests,
		"opt/adapter": filepath.Join("bin", "adapter"), "opt/krun-shim": shim, "opt/guest-agent": filepath.Join("bin", "guest-agent"),
		"opt/" + filepath.Base(pair.Library): pair.Library, "opt/" + filepath.Base(pair.Firmware): pair.Firmware,
	}
	for i, module := range d.modules {
		files[fmt.Sprintf("modules/%d-%s", i, filepath.Base(module))] = module
	}
	if err := libraries(files, shim, pair.Library); err != nil {
		return err
	}
	for name, source := range files {
		if err := a.file(name, source); err != nil {
			return fmt.Errorf("%w: run make build", err)
		}
	}
	if err := a.tree("opt/images/busybox", image); err != nil {
		return fmt.Errorf("%w: run go run ./build/images busybox", err)
	}
	if err := a.content("init", []byte(fmt.Sprintf(initScript, command))); err != nil {
		return err
	}
	return a.w.Close()
}

// libraries adds what dynamic programs and libraries need, as they name it.
func libraries(files map[string]string, programs ...string) error {
	dirs := []string{"/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64"}
	for queue := slices.Clone(programs); len(queue) > 0; queue = queue[1:] {
		program, err := elf.Open(queue[0])
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
