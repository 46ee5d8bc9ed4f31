package vmassets_test

import (
	"bytes"
	"debug/elf"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/vmassets"
)

// What a guest does to its copy of the agent, no other guest sees.
func TestMakeRootCopiesTheAgent(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	agent := filepath.Join(dir, "guest-agent")
	machine := map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}[runtime.GOARCH]
	program := elfFile(elf.ET_EXEC, machine, nil, nil)
	writeFile(t, agent, program, 0o755)
	first, second := filepath.Join(dir, "first"), filepath.Join(dir, "second")
	for _, root := range []string{first, second} {
		if err := vmassets.MakeRoot(root, agent); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(first, "agent"), []byte("evil"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{agent, filepath.Join(second, "agent")} {
		if !bytes.Equal(readFile(t, path), program) {
			t.Errorf("%s was changed through another copy", path)
		}
	}
	for _, name := range []string{"dev", "proc", "sys", ".iii/root"} {
		if info, err := os.Stat(filepath.Join(second, name)); err != nil || !info.IsDir() {
			t.Errorf("no directory %s: %v", name, err)
		}
	}
	if err := vmassets.MakeRoot(second, agent); !errors.Is(err, fs.ErrExist) {
		t.Errorf("over another one: %v", err)
	}
	writeFile(t, agent, []byte("#!/bin/sh\n"), 0o755)
	if err := vmassets.MakeRoot(filepath.Join(dir, "third"), agent); err == nil || !strings.Contains(err.Error(), "make build") {
		t.Errorf("an agent that is a script: %v", err)
	}
}
