package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/vmassets"
)

// floor is a bare QEMU: the command line that our shim used, run without it.
type floor struct {
	argv []string
}

// newFloor derives the floor from the command line of a QEMU that our shim
// runs, so that both cannot drift apart, and gives it an initramfs and a
// writable disk of its own.
func newFloor(ours []string, initramfs, upper string) (*floor, error) {
	argv, err := bareArguments(ours, initramfs, upper)
	if err != nil {
		return nil, err
	}
	return &floor{argv: argv}, nil
}

// floors are the three that the measurements need.
type floors struct {
	// ends has the smallest init, which restarts the machine at once; stays has
	// one that does nothing instead; agent has our initramfs, whose agent waits
	// for a boot spec that does not come.
	ends, stays, agent *floor
}

func newFloors(ours []string, dir, arch string) (f floors, err error) {
	upper := filepath.Join(dir, "upper.ext4")
	if err := vmassets.CreateUpper(upper, vmassets.Ephemeral); err != nil {
		return f, err
	}
	for _, v := range []struct {
		to   **floor
		name string
		stay bool
	}{{&f.ends, "ends.cpio", false}, {&f.stays, "stays.cpio", true}} {
		archive, err := floorInitramfs(arch, v.stay)
		if err != nil {
			return f, err
		}
		file := filepath.Join(dir, v.name)
		if err := os.WriteFile(file, archive, 0o600); err != nil {
			return f, err
		}
		if *v.to, err = newFloor(ours, file, upper); err != nil {
			return f, err
		}
	}
	f.agent, err = newFloor(ours, "", upper)
	return f, err
}

// bareArguments is a command line of our QEMU that runs without the shim: the
// console is the standard output, the ports are connected to nothing, the
// writable disk is the file upper, and the initramfs is another one unless that
// is empty; it boots even if ours was resumed. All else stays: machine, CPUs,
// memory, devices, kernel.
func bareArguments(ours []string, initramfs, upper string) ([]string, error) {
	out := slices.Clone(ours)
	if i := slices.Index(out, "-incoming"); i >= 0 && i+1 < len(out) {
		out = slices.Delete(out, i, i+2)
	}
	replaced := map[string]bool{}
	for i := 1; i+1 < len(out); i++ {
		value := &out[i+1]
		id, _, _ := strings.Cut(strings.TrimPrefix(*value, "socket,id="), ",")
		switch {
		case out[i] == "-initrd":
			if initramfs != "" {
				*value = initramfs
			}
			replaced["-initrd"] = true
		case out[i] == "-chardev" && id == "console":
			*value = "stdio,id=console"
			replaced["console"] = true
		case out[i] == "-chardev":
			*value = "null,id=" + id
		case out[i] == "-drive" && strings.HasPrefix(*value, "if=none,id=upper,"):
			parts := strings.Split(*value, ",")
			for j, part := range parts {
				if strings.HasPrefix(part, "file=") {
					parts[j] = "file=" + upper
					replaced["upper"] = true
				}
			}
			*value = strings.Join(parts, ",")
		}
	}
	for _, what := range []string{"-initrd", "console", "upper"} {
		if !replaced[what] {
			return nil, fmt.Errorf("the command line of our QEMU has no %s: the bench does not know it any more", what)
		}
	}
	return out, nil
}

// commandLine reads how a running process was started.
func commandLine(pid int) ([]string, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		return nil, err
	}
	return strings.Split(strings.TrimSuffix(string(raw), "\x00"), "\x00"), nil
}

// boot is one run of the floor, in time since QEMU was spawned.
type boot struct {
	// Init is when the init's first instruction had printed; 0 when it never did.
	Init time.Duration
	// End is when QEMU had exited.
	End time.Duration
	// CPU is what it has used, user and system.
	CPU time.Duration
}

// run boots the floor, whose init ends the machine, to its end.
func (f *floor) run(ctx context.Context) (boot, error) {
	runtime.LockOSThread() // see dieWithParent
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(ctx, f.argv[0], f.argv[1:]...)
	cmd.SysProcAttr = dieWithParent()
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return boot{}, err
	}
	var b boot
	begin := time.Now()
	if err := cmd.Start(); err != nil {
		return b, err
	}
	console := bufio.NewScanner(out)
	var last string
	for console.Scan() {
		last = console.Text()
		if b.Init == 0 && strings.Contains(last, strings.TrimSpace(marker)) {
			b.Init = time.Since(begin)
		}
	}
	_, _ = io.Copy(io.Discard, out) // after a line that was too long
	err = cmd.Wait()
	b.End = time.Since(begin)
	b.CPU = cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
	switch {
	case err != nil:
		return b, fmt.Errorf("bare QEMU: %w: %s", err, bytes.TrimSpace(stderr.Bytes()))
	case b.Init == 0:
		return b, fmt.Errorf("bare QEMU ended before its init ran; its last line was %q", last)
	}
	return b, nil
}

// residentSize boots the floor, whose init stays, and returns QEMU's resident
// memory, in bytes, once it no longer grows.
func (f *floor) residentSize(ctx context.Context) (int64, error) {
	runtime.LockOSThread() // see dieWithParent
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(ctx, f.argv[0], f.argv[1:]...)
	cmd.SysProcAttr = dieWithParent()
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	size, err := settledRSS(ctx, cmd.Process.Pid)
	_ = cmd.Process.Kill() // what it is good for is told by Wait
	waitErr := cmd.Wait()
	if err != nil {
		return 0, fmt.Errorf("bare QEMU: %w (%w): %s", err, waitErr, bytes.TrimSpace(stderr.Bytes()))
	}
	return size, nil
}

// settledRSS waits until a process's resident memory has stayed within 1 % for
// 3 s, longer than any pause of a boot, and returns it in bytes. It gives up
// after 30 s, before an agent that waits in vain would.
func settledRSS(ctx context.Context, pid int) (int64, error) {
	const window = 7
	tick := time.NewTicker(500 * time.Millisecond)
	defer tick.Stop()
	var history []int64
	for range 60 {
		now, err := processMemory(pid, "VmRSS")
		if err != nil {
			return 0, err
		}
		history = append(history, now)
		if n := len(history); n >= window && slices.Max(history[n-window:])-slices.Min(history[n-window:]) <= now/100 {
			return now, nil
		}
		select {
		case <-ctx.Done():
			return 0, ctx.Err()
		case <-tick.C:
		}
	}
	return 0, errors.New("the resident memory did not settle in 30 s")
}

// processMemory reads a field of /proc/PID/status that is in kB, in bytes.
func processMemory(pid int, field string) (int64, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	return statusField(string(raw), field)
}

// statusField finds a field like "VmRSS:   1234 kB".
func statusField(status, field string) (int64, error) {
	for line := range strings.Lines(status) {
		name, value, _ := strings.Cut(line, ":")
		var kB int64
		if name == field {
			if _, err := fmt.Sscanf(value, "%d kB", &kB); err != nil {
				return 0, fmt.Errorf("%s is %q: %w", field, value, err)
			}
			return kB << 10, nil
		}
	}
	return 0, fmt.Errorf("there is no field %s", field)
}
