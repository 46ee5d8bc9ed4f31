package vmassets_test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/vmassets"
)

// guestTimeout is for a boot under emulation on a busy machine.
const guestTimeout = 3 * time.Minute

// TestRealKernelBoots fetches Debian's kernel and boots it with the initramfs
// and the disks that this package makes.
func TestRealKernelBoots(t *testing.T) {
	t.Parallel()
	dir := privateDir(t)
	k := realKernel(t, dir)
	if k.Indirect != "" {
		t.Errorf("Debian's kernel was not unpacked: %s", k.Indirect)
	}
	// Everything is there now: no PATH, no package client, no network.
	again, err := vmassets.Setup(t.Context(), vmassets.Options{Dir: dir, Log: slog.New(slog.DiscardHandler), Getenv: env()})
	if err != nil || again.Image != k.Image {
		t.Fatalf("the second setup: %v, %v", again, err)
	}
	qemu, err := vmassets.FindQEMU(os.Getenv, runtime.GOARCH)
	if err != nil {
		t.Skip("SKIP:", err)
	}
	if runtime.GOARCH != "amd64" {
		t.Skip("SKIP: the machine types tried here are for amd64")
	}
	agent := filepath.Join(t.TempDir(), "guestinit")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", agent, "./testdata/guestinit")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the test's init: %v: %s", err, out)
	}
	initramfs, err := k.Initramfs(t.Context(), agent)
	if err != nil {
		t.Fatal(err)
	}
	g := guest{qemu: qemu, kernel: k.Image, initramfs: initramfs}
	t.Run("q35", func(t *testing.T) { g.tryDisk(t, "ephemeral", vmassets.Ephemeral) })
	t.Run("microvm", func(t *testing.T) {
		if g.tscKHz, err = vmassets.TSCKHz(dir); err != nil {
			t.Log("q35 instead:", err)
		}
		g.tryDisk(t, "durable", vmassets.Durable)
	})
}

// realKernel sets up Debian's kernel, or skips where the archive cannot be
// reached with the bare client either.
func realKernel(t *testing.T, dir string) *vmassets.Kernel {
	t.Helper()
	var progress bytes.Buffer
	k, err := vmassets.Setup(t.Context(), vmassets.Options{
		Dir: dir, Log: slog.New(slog.NewTextHandler(t.Output(), nil)), Progress: &progress, Getenv: func(key string) string {
			if strings.HasPrefix(key, "III_") {
				return ""
			}
			return os.Getenv(key)
		},
	})
	t.Logf("%s", progress.String())
	if err == nil {
		return k
	}
	bare := exec.CommandContext(t.Context(), "apt-get", "download", "linux-image-cloud-"+runtime.GOARCH)
	bare.Dir = t.TempDir()
	if out, bareErr := bare.CombinedOutput(); bareErr != nil {
		t.Skipf("SKIP: no package can be fetched here: %v: %s", bareErr, out)
	}
	t.Fatal(err)
	return nil
}

// guest boots VMs with the test's init.
type guest struct {
	qemu, kernel, initramfs string
	tscKHz                  int // microvm when set, else q35
}

// start boots a guest with disk as its upper and returns its console.
func (g guest) start(t *testing.T, disk string, options ...string) (*exec.Cmd, *bufio.Scanner) {
	t.Helper()
	machine, transport := []string{"-M", "q35,accel=tcg,hpet=off,smm=off,sata=off,usb=off,vmport=off,smbus=off"}, "pci"
	options = append(options, "console=ttyS0", "quiet", "panic=-1", "cryptomgr.notests", "tsc=reliable", "no_timer_check")
	if g.tscKHz > 0 {
		machine, transport = []string{"-M", "microvm,accel=tcg", "-global", "virtio-mmio.force-legacy=false"}, "device"
		options = append(options, fmt.Sprintf("tsc_early_khz=%d", g.tscKHz))
	}
	ctx, cancel := context.WithTimeout(t.Context(), guestTimeout)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, g.qemu, append(machine,
		"-cpu", "qemu64,+rdrand", "-smp", "2", "-m", "256", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-serial", "stdio", "-kernel", g.kernel, "-initrd", g.initramfs, "-append", strings.Join(options, " "),
		"-drive", "if=none,id=up,format=raw,cache=unsafe,discard=unmap,file="+disk, "-device", "virtio-blk-"+transport+",drive=up,serial=iii-upper",
		"-device", "virtio-serial-"+transport, "-chardev", "null,id=ag", "-device", "virtserialport,chardev=ag,name=iii.agent")...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if stderr.Len() > 0 {
			t.Logf("qemu: %s", stderr.String())
		}
	})
	return cmd, bufio.NewScanner(out)
}

// run boots a guest to its end and returns its results.
func (g guest) run(t *testing.T, disk string, options ...string) map[string]string {
	t.Helper()
	cmd, console := g.start(t, disk, options...)
	results, text := map[string]string{}, ""
	for console.Scan() {
		text += console.Text() + "\n"
		if result, ok := strings.CutPrefix(console.Text(), "RESULT "); ok {
			key, value, _ := strings.Cut(result, " ")
			results[key] = value
		}
	}
	err := cmd.Wait()
	if _, ended := results["end"]; err != nil || !ended || results["error"] != "" {
		t.Fatalf("the guest failed: %v, %s\n%s", err, results["error"], text)
	}
	t.Log(results)
	return results
}

// tryDisk lets guests use one disk: fresh, again after an orderly end, and a
// durable one after its VM was killed.
func (g guest) tryDisk(t *testing.T, name string, kind vmassets.UpperKind) {
	t.Helper()
	disk := filepath.Join(t.TempDir(), name+".ext4")
	if err := vmassets.CreateUpper(disk, kind); err != nil {
		t.Fatal(err)
	}
	if kind == vmassets.Durable {
		cmd, console := g.start(t, disk, "iii.hang=1")
		for console.Scan() && !strings.HasPrefix(console.Text(), "RESULT large") {
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); err == nil {
			t.Fatal("the killed guest ended well")
		}
	}
	first := g.run(t, disk)
	if found, want := first["found"], "0 false"; kind == vmassets.Ephemeral && found != want {
		t.Errorf("%s: a fresh disk has a file: %s", name, found)
	}
	if kind == vmassets.Durable && first["found"] != "3000 true" {
		t.Errorf("%s: what was synced before the VM was killed is gone: %s", name, first["found"])
	}
	// Another source than the counter means that the kernel found the rate wrong.
	if !strings.HasPrefix(first["clocksource"], "tsc") {
		t.Errorf("the guest's clock is %s", first["clocksource"])
	}
	if first["port"] != "true" || !strings.HasPrefix(first["upper"], "160") && !strings.HasPrefix(first["upper"], "161") {
		t.Errorf("%s: %v", name, first)
	}
	if second := g.run(t, disk); second["found"] != "3000 true" {
		t.Errorf("%s: after an orderly end: %s", name, second["found"])
	}
	if e2fsck, err := exec.LookPath("e2fsck"); err == nil {
		if out, err := exec.CommandContext(t.Context(), e2fsck, "-fn", disk).CombinedOutput(); err != nil {
			t.Errorf("%s: e2fsck after use: %v: %s", name, err, out)
		}
	}
}
