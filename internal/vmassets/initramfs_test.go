package vmassets_test

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cavaliergopher/cpio"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/vmassets"
)

// fakeKernel makes a kernel of the user's own in dir.
func fakeKernel(t *testing.T, dir string) *vmassets.Kernel {
	t.Helper()
	image := filepath.Join(t.TempDir(), "vmlinux")
	writeFile(t, image, vmlinux(true, ""), 0o644)
	k, err := own(t, dir, image, writeTree(t, t.TempDir(), debianTree()))
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// agentFile makes a static executable.
func agentFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "guest-agent")
	writeFile(t, path, elfFile(elf.ET_EXEC, elf.EM_X86_64, []program{{elf.PT_LOAD, []byte(text)}}, nil), 0o755)
	return path
}

type archived struct {
	mode cpio.FileMode
	data []byte
}

func readArchive(t *testing.T, path string) (names []string, files map[string]archived) {
	t.Helper()
	raw := readFile(t, path)
	r := cpio.NewReader(bytes.NewReader(raw))
	files = map[string]archived{}
	inodes := map[int64]bool{}
	for {
		head, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if head.Uid != 0 || head.Guid != 0 || head.ModTime.Unix() != 0 || inodes[head.Inode] {
			t.Errorf("%s: %+v", head.Name, head)
		}
		inodes[head.Inode] = true
		data, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, head.Name)
		files[head.Name] = archived{head.Mode, data}
	}
	if len(raw)%4 != 0 {
		t.Errorf("the archive has %d bytes, no multiple of 4", len(raw))
	}
	return names, files
}

func TestInitramfsHoldsAgentAndModules(t *testing.T) {
	t.Parallel()
	dir := privateDir(t)
	k, agent := fakeKernel(t, dir), agentFile(t, "one")
	path, err := k.Initramfs(t.Context(), agent)
	if err != nil {
		t.Fatal(err)
	}
	names, files := readArchive(t, path)
	for name, want := range map[string]cpio.FileMode{
		"init": cpio.TypeReg | 0o755, "dev": cpio.TypeDir | 0o755, "proc": cpio.TypeDir | 0o555, "sys": cpio.TypeDir | 0o555,
		"dev/console": cpio.TypeChar | 0o600, "modules": cpio.TypeDir | 0o755, "modules/order": cpio.TypeReg | 0o644,
	} {
		if files[name].mode != want {
			t.Errorf("%s has mode %o, not %o", name, files[name].mode, want)
		}
		if parent := filepath.Dir(name); parent != "." && slices.Index(names, parent) > slices.Index(names, name) {
			t.Errorf("%s comes before its directory", name)
		}
	}
	if !bytes.Equal(files["init"].data, readFile(t, agent)) {
		t.Error("init is not the agent")
	}
	// The reader drops the device number: it is in the raw header.
	raw := readFile(t, path)
	at := bytes.Index(raw, []byte("dev/console\x00"))
	if got := string(raw[at-110+78 : at-110+94]); got != "0000000500000001" {
		t.Errorf("dev/console is device %s", got)
	}
	order := strings.Fields(string(files["modules/order"].data))
	if !slices.Equal(order, k.Modules) {
		t.Errorf("the order is %v, not %v", order, k.Modules)
	}
	for _, name := range order {
		want := readFile(t, filepath.Join(filepath.Dir(k.Image), "modules", name))
		if !bytes.Equal(files["modules/"+name].data, want) {
			t.Errorf("module %s is not what it was", name)
		}
	}
	if want := 7 + len(order); len(names) != want {
		t.Errorf("there are %d entries, not %d: %v", len(names), want, names)
	}
}

func TestInitramfsIsMadeOncePerContent(t *testing.T) {
	t.Parallel()
	dir := privateDir(t)
	k, agent := fakeKernel(t, dir), agentFile(t, "one")
	first, err := k.Initramfs(t.Context(), agent)
	if err != nil {
		t.Fatal(err)
	}
	before, err := os.Stat(first)
	if err != nil {
		t.Fatal(err)
	}
	content := readFile(t, first)
	same, err := k.Initramfs(t.Context(), agentFile(t, "one"))
	if err != nil || same != first {
		t.Errorf("a copy of the agent gave %s, %v", same, err)
	}
	after, err := os.Stat(first)
	if err != nil || !os.SameFile(before, after) {
		t.Errorf("the archive was written again: %v", err)
	}
	// The same path, size and times, but another file.
	info, err := os.Stat(agent)
	if err != nil {
		t.Fatal(err)
	}
	other := agentFile(t, "two")
	if err := os.Chtimes(other, info.ModTime(), info.ModTime()); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(other, agent); err != nil {
		t.Fatal(err)
	}
	second, err := k.Initramfs(t.Context(), agent)
	if err != nil || second == first {
		t.Fatalf("a changed agent gave %s, %v", second, err)
	}
	_, files := readArchive(t, second)
	if !bytes.Equal(files["init"].data, readFile(t, agent)) {
		t.Error("init is not the changed agent")
	}
	// Made from nothing, the bytes are the same.
	if err := os.RemoveAll(filepath.Join(dir, "initramfs")); err != nil {
		t.Fatal(err)
	}
	again, err := k.Initramfs(t.Context(), agentFile(t, "one"))
	if err != nil || again != first || !bytes.Equal(readFile(t, again), content) {
		t.Errorf("the archive made again is %s and differs, or: %v", again, err)
	}
}

func TestInitramfsOfManyAtOnce(t *testing.T) {
	t.Parallel()
	dir := privateDir(t)
	k := fakeKernel(t, dir)
	// What a killed process left is swept and not in the way.
	writeFile(t, filepath.Join(dir, "initramfs", ".tmp-left"), []byte("half"), 0o600)
	if err := os.Chmod(filepath.Join(dir, "initramfs"), 0o700); err != nil {
		t.Fatal(err)
	}
	agents := []string{agentFile(t, "one"), agentFile(t, "two")}
	var wg sync.WaitGroup
	paths := make([]string, 16)
	for i := range paths {
		wg.Go(func() {
			var err error
			if paths[i], err = k.Initramfs(t.Context(), agents[i%2]); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for i, path := range paths {
		if path != paths[i%2] {
			t.Errorf("call %d gave %s, not %s", i, path, paths[i%2])
		}
		_, files := readArchive(t, path)
		if !bytes.Equal(files["init"].data, readFile(t, agents[i%2])) {
			t.Errorf("call %d got another's agent", i)
		}
	}
	noTemporaries(t, filepath.Join(dir, "initramfs"))
}

func TestOldArchivesAreRemoved(t *testing.T) {
	t.Parallel()
	dir := privateDir(t)
	k := fakeKernel(t, dir)
	long := time.Now().Add(-3 * time.Hour)
	var paths []string
	var agents []string
	for i := range 8 {
		agents = append(agents, agentFile(t, fmt.Sprint("agent ", i)))
		path, err := k.Initramfs(t.Context(), agents[i])
		if err != nil {
			t.Fatal(err)
		}
		paths = append(paths, path)
		if i != 1 && i < 7 { // the second was just used
			if err := os.Chtimes(path, long, long.Add(time.Duration(i)*time.Minute)); err != nil {
				t.Fatal(err)
			}
		}
	}
	for i, path := range paths {
		_, err := os.Stat(path)
		if gone, want := err != nil, i == 0 || i >= 2 && i <= 4; gone != want {
			t.Errorf("archive %d: gone is %v, not %v", i, gone, want)
		}
	}
	again, err := k.Initramfs(t.Context(), agents[0])
	if err != nil || again != paths[0] {
		t.Errorf("a removed archive is not made again: %s, %v", again, err)
	}
}

func TestAgentsThatCannotRunAreRefused(t *testing.T) {
	t.Parallel()
	dir := privateDir(t)
	k := fakeKernel(t, dir)
	for name, c := range map[string]struct {
		file []byte
		want string
	}{
		"empty":   {nil, "not an ELF"},
		"script":  {[]byte("#!/bin/sh\nexit 0\n"), "not an ELF"},
		"dynamic": {elfFile(elf.ET_DYN, elf.EM_X86_64, []program{{elf.PT_INTERP, []byte("/lib64/ld-linux-x86-64.so.2\x00")}}, nil), "static"},
		"arm64":   {elfFile(elf.ET_EXEC, elf.EM_AARCH64, nil, nil), "GOARCH=amd64"},
		"object":  {ko("depends="), "not an executable"},
		"cut off": {elfFile(elf.ET_EXEC, elf.EM_X86_64, []program{{elf.PT_LOAD, nil}}, nil)[:70], "not an ELF"},
	} {
		path := filepath.Join(t.TempDir(), "agent")
		writeFile(t, path, c.file, 0o755)
		for what, err := range map[string]error{
			"CheckAgent": vmassets.CheckAgent(path, "amd64"),
			"Initramfs":  func() error { _, err := k.Initramfs(t.Context(), path); return err }(),
		} {
			if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), path) {
				t.Errorf("%s, %s: the error is %v, without %q", name, what, err, c.want)
			}
		}
	}
	if _, err := k.Initramfs(t.Context(), filepath.Join(dir, "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing: %v", err)
	}
	if err := vmassets.CheckAgent(agentFile(t, "x"), "amd64"); err != nil {
		t.Errorf("a good one is refused: %v", err)
	}
}
