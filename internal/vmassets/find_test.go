package vmassets_test

import (
	"errors"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/vmassets"
)

func TestFindQEMU(t *testing.T) {
	t.Parallel()
	empty, bin := t.TempDir(), t.TempDir()
	program := filepath.Join(bin, "qemu-system-x86_64")
	writeFile(t, program, []byte("#!/bin/sh\n"), 0o755)
	text := filepath.Join(bin, "text")
	writeFile(t, text, []byte("no program"), 0o644)

	if got, err := vmassets.FindQEMU(env("PATH", empty+":"+bin), "amd64"); err != nil || got != program {
		t.Errorf("in PATH: %s, %v", got, err)
	}
	if got, err := vmassets.FindQEMU(env("III_QEMU", program, "PATH", empty), "amd64"); err != nil || got != program {
		t.Errorf("by III_QEMU: %s, %v", got, err)
	}
	_, err := vmassets.FindQEMU(env("PATH", empty+"::relative:"+bin), "arm64")
	for _, want := range []string{filepath.Join(empty, "qemu-system-aarch64"), filepath.Join(bin, "qemu-system-aarch64"), "qemu-system-arm", "III_QEMU"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("nowhere: the error %v does not say %q", err, want)
		}
	}
	if err != nil && strings.Contains(err.Error(), "relative/") {
		t.Errorf("a relative directory of PATH was searched: %v", err)
	}
	if _, err := vmassets.FindQEMU(env("III_QEMU", filepath.Join(empty, "none"), "PATH", bin), "amd64"); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "III_QEMU") {
		t.Errorf("III_QEMU is wrong, and the error is %v", err)
	}
	for _, wrong := range []string{text, bin} {
		if _, err := vmassets.FindQEMU(env("III_QEMU", wrong, "PATH", bin), "amd64"); err == nil || !strings.Contains(err.Error(), "not an executable file") {
			t.Errorf("III_QEMU=%s: the error is %v", wrong, err)
		}
	}
	if _, err := vmassets.FindQEMU(env("PATH", bin), "riscv64"); err == nil {
		t.Error("an architecture that nobody knows was found")
	}
}

func TestFindAgent(t *testing.T) {
	t.Parallel()
	agent := agentFile(t, "agent")
	if got, err := vmassets.FindAgent(env("III_GUEST_AGENT", agent)); err != nil || got != agent {
		t.Errorf("by III_GUEST_AGENT: %s, %v", got, err)
	}
	// PATH is not searched: an agent of another build would be found there.
	_, err := vmassets.FindAgent(env("PATH", filepath.Dir(agent)))
	for _, want := range []string{"guest-agent", "make build", "III_GUEST_AGENT"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("nowhere: the error %v does not say %q", err, want)
		}
	}
}

func TestDiagnose(t *testing.T) {
	t.Parallel()
	names := func(findings []vmassets.Finding) map[string]vmassets.Finding {
		m := map[string]vmassets.Finding{}
		for _, f := range findings {
			if f.Name == "" || f.Finding == "" || !f.OK && f.Fix == "" {
				t.Errorf("finding %+v is not complete", f)
			}
			m[f.Name] = f
		}
		return m
	}
	bare := names(vmassets.Diagnose(t.Context(), filepath.Join(privateDir(t), "not", "there"), "", env()))
	for name, fix := range map[string]string{
		"qemu": "qemu-system-x86", "guest kernel": "adapter vmm setup", "guest agent": "make build", "initramfs": "see there",
		"krun-shim": "III_KRUN_SHIM",
	} {
		if f := bare[name]; f.OK || !strings.Contains(f.Fix, fix) {
			t.Errorf("on a bare host: %+v, without %q", f, fix)
		}
	}
	for _, name := range []string{"hardware virtualization", "disk space", "machine type"} {
		if _, there := bare[name]; !there {
			t.Errorf("there is no finding %s", name)
		}
	}

	a, dir := newArchive(t), privateDir(t)
	if _, err := a.setup(dir); err != nil {
		t.Fatal(err)
	}
	for version, ok := range map[string]bool{"7.2.22 (Debian 1:7.2)": true, "10.0.2": true, "7.1.0": false, "new": false} {
		qemu := filepath.Join(t.TempDir(), "qemu")
		writeFile(t, qemu, []byte("#!/bin/sh\necho 'QEMU emulator version "+version+"'\n"), 0o755)
		whole := names(vmassets.Diagnose(t.Context(), dir, "", env("III_QEMU", qemu, "III_GUEST_AGENT", agentFile(t, "agent"))))
		if f := whole["qemu"]; f.OK != ok || !strings.Contains(f.Finding, version) {
			t.Errorf("QEMU %s: %+v", version, f)
		}
		for _, name := range []string{"guest kernel", "guest agent", "initramfs"} {
			if f := whole[name]; !f.OK {
				t.Errorf("on a ready host: %+v", f)
			}
		}
	}
	broken := filepath.Join(t.TempDir(), "qemu")
	writeFile(t, broken, []byte("#!/bin/sh\nexit 127\n"), 0o755)
	script := filepath.Join(t.TempDir(), "agent")
	writeFile(t, script, []byte("#!/bin/sh\n"), 0o755)
	wrong := names(vmassets.Diagnose(t.Context(), dir, "", env("III_QEMU", broken, "III_GUEST_AGENT", script, "III_KRUN_SHIM", dir)))
	if wrong["qemu"].OK || wrong["guest agent"].OK || wrong["initramfs"].OK || wrong["krun-shim"].OK {
		t.Errorf("broken programs pass: %+v", wrong)
	}
	// libkrun alone, where it is not or cannot be: what QEMU needs does not count.
	alone := names(vmassets.Diagnose(t.Context(), dir, "libkrun", env("III_QEMU", broken, "III_LIBKRUN_PATH", t.TempDir())))
	if alone["libkrun"].OK || !alone["qemu"].OK || alone["hardware virtualization"].OK != (vmassets.HardwareVirtualization() == nil) {
		t.Errorf("with libkrun asked for: %+v", alone)
	}
	none := filepath.Join(dir, "none")
	names(vmassets.Diagnose(t.Context(), dir, "", env("III_QEMU", none, "III_GUEST_AGENT", none, "III_KRUN_SHIM", none)))
}
