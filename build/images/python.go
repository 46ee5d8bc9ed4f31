package main

import (
	"bytes"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
)

// compileScript compiles the sources named on standard input, each to where the
// import system looks, with the source's path in the image in its tracebacks.
// A source that this Python cannot parse is left to fail when it is imported.
const compileScript = `
import py_compile, sys
for name in sys.stdin.read().splitlines():
    try:
        py_compile.compile(name, dfile="/" + name, doraise=True,
            invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP)
    except py_compile.PyCompileError:
        pass
`

// python makes the interpreter ready to use: its site directory, no mark that
// forbids pip to install (a sandbox has no other owner of /usr/local), and
// compiled modules, without which every fresh sandbox would compile what it
// imports again.
func python(ctx context.Context, t *tree, dir string) error {
	link, ok := t.nodes["usr/bin/python3"]
	if !ok || link.target == "" {
		return errors.New("python3 ships no /usr/bin/python3 symlink: the recipe does not fit this Debian release")
	}
	version := path.Base(link.target)
	t.removeAll("usr/lib/" + version + "/EXTERNALLY-MANAGED")
	if err := t.mkdirMissing("usr/local/lib/" + version + "/dist-packages"); err != nil {
		return err
	}
	var sources []string
	for _, p := range t.paths() {
		if path.Ext(p) == ".py" && strings.HasPrefix(p, "usr/lib/python3") && t.isFile(p) {
			sources = append(sources, p)
		}
	}
	if err := t.extract(dir); err != nil {
		return err
	}
	if err := compilePython(ctx, dir, version, sources); err != nil {
		return err
	}
	tag := "cpython-" + strings.ReplaceAll(strings.TrimPrefix(version, "python"), ".", "")
	return t.takeCompiled(dir, tag, sources)
}

// compilePython runs the image's own interpreter, with the image's own loader
// and libraries, on a copy of the image at root. One process compiles all
// files in one order with one hash seed and nothing from our environment, so
// the bytes do not depend on the host.
func compilePython(ctx context.Context, root, version string, sources []string) error {
	bin := filepath.Join(root, "usr/bin", version)
	loader, machineDir, err := elfRuntime(bin)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, filepath.Join(root, loader), "--library-path",
		filepath.Join(root, "usr/lib", machineDir), bin, "-S", "-s", "-P", "-c", compileScript)
	cmd.Dir = root
	cmd.Env = []string{"PYTHONHOME=" + filepath.Join(root, "usr"), "PYTHONHASHSEED=0", "LC_ALL=C.UTF-8", "TZ=UTC0"}
	cmd.Stdin = strings.NewReader(strings.Join(sources, "\n"))
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("compile Python modules: %w: %s", err, bytes.TrimSpace(stderr.Bytes()))
	}
	return nil
}

// elfRuntime reads which loader a program wants, and the name of Debian's
// library directory for its machine.
func elfRuntime(bin string) (loader, machineDir string, err error) {
	f, err := elf.Open(bin)
	if err != nil {
		return "", "", err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	for _, p := range f.Progs {
		if p.Type != elf.PT_INTERP {
			continue
		}
		name, err := io.ReadAll(p.Open())
		if err != nil {
			return "", "", err
		}
		loader = string(bytes.TrimRight(name, "\x00"))
	}
	m, ok := machines()[f.Machine]
	if loader == "" || !ok {
		return "", "", fmt.Errorf("%s is not a dynamic program for a known machine (%v)", bin, f.Machine)
	}
	return loader, m.dir, nil
}

// takeCompiled brings the compiled modules from the copy at root into the tree.
func (t *tree) takeCompiled(root, tag string, sources []string) error {
	count := 0
	for _, src := range sources {
		base := strings.TrimSuffix(path.Base(src), ".py") + "." + tag + ".pyc"
		p := path.Join(path.Dir(src), "__pycache__", base)
		data, err := os.ReadFile(filepath.Join(root, p))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		if err := t.write(p, 0o644, data); err != nil {
			return err
		}
		count++
	}
	if count == 0 {
		return errors.New("compile Python modules: not one was written")
	}
	return nil
}
