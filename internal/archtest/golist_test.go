package archtest

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

const modulePath = "github.com/iii-hq/workers/sandbox-libkrun"

// A platform is what `go list` selects files for.
type platform struct{ os, arch string }

var (
	linux  = platform{"linux", "amd64"}
	darwin = platform{"darwin", "arm64"}
)

func platforms() []platform { return []platform{linux, darwin} }

// A listed package is what `go list -json` tells of one.
type listed struct {
	ImportPath string
	Dir        string
	Name       string
	Standard   bool
	Imports    []string
	Deps       []string
	CgoFiles   []string
	Error      *struct{ Err string }
}

// name is the import path without that of the module.
func (p listed) name() string { return strings.TrimPrefix(p.ImportPath, modulePath+"/") }

// ourImports are the packages of this module that p imports, by name.
func (p listed) ourImports() []string {
	var names []string
	for _, path := range p.Imports {
		if name, ours := strings.CutPrefix(path, modulePath+"/"); ours {
			names = append(names, name)
		}
	}
	return names
}

// goList runs `go list` in the top directory, cgo on: a file that needs it must
// not hide from the rules.
func goList(t *testing.T, on platform, args ...string) []listed {
	t.Helper()
	command := append([]string{"list", "-e", "-json=ImportPath,Dir,Name,Standard,Imports,Deps,CgoFiles,Error"}, args...)
	cmd := exec.CommandContext(t.Context(), "go", command...)
	cmd.Dir = topDir(t)
	cmd.Env = append(os.Environ(), "GOOS="+on.os, "GOARCH="+on.arch, "CGO_ENABLED=1", "GOFLAGS=-mod=readonly")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, stderr.Bytes())
	}
	var pkgs []listed
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var pkg listed
		if err := dec.Decode(&pkg); errors.Is(err, io.EOF) {
			return pkgs
		} else if err != nil {
			t.Fatalf("go list: %v", err)
		}
		pkgs = append(pkgs, pkg)
	}
}

// listOurs lists the packages of this module that have a file on the platform.
func listOurs(t *testing.T, on platform) []listed {
	t.Helper()
	var ours []listed
	for _, pkg := range goList(t, on, "./...") {
		if pkg.Error != nil {
			// On the other platform, packages of the guest have no file.
			if on != linux && strings.Contains(pkg.Error.Err, "build constraints exclude all Go files") {
				continue
			}
			t.Errorf("go list: %s: %s", pkg.ImportPath, pkg.Error.Err)
		}
		ours = append(ours, pkg)
	}
	return ours
}

// programDeps lists what each program of cmd/ links, by its name.
func programDeps(t *testing.T) map[string][]string {
	t.Helper()
	deps := map[string][]string{}
	for _, pkg := range goList(t, linux, "./cmd/...") {
		if pkg.Error != nil {
			t.Errorf("go list: %s: %s", pkg.ImportPath, pkg.Error.Err)
		}
		deps[pkg.name()] = pkg.Deps
	}
	return deps
}

// topDir is the directory of go.mod.
func topDir(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "go.mod")); err != nil {
		t.Fatal(err)
	}
	return dir
}
