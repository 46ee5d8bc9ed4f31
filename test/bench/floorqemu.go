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
)

// floor is a bare QEMU: the binary, machine, kernel and kernel arguments that
// our shim used, without our devices.
type floor struct {
	argv []string
}

// newFloor derives the floor from the command line of a QEMU that our shim
// runs, so that both cannot drift apart, and gives it an initramfs.
func newFloor(ours []string, initramfs string) (*floor, error) {
	kept, err := bareArguments(ours)
	if err != nil {
		return nil, err
	}
	return &floor{argv: append(kept, "-initrd", initramfs, "-serial", "stdio")}, nil
}

// floors are the three that the measurements need.
type floors struct {
	// ends has the smallest init, which restarts the machine at once; stays has
	// one that does nothing instead; agent has our initramfs, whose agent waits
	// for a device that is not there.
	ends, stays, agent *floor
}

func newFloors(ours []string, dir, arch string) (f floors, err error) {
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
		if *v.to, err = newFloor(ours, file); err != nil {
			return f, err
		}
	}
	i := slices.Index(ours, "-initrd")
	if i < 0 || i+1 == len(ours) {
		return f, errors.New("our QEMU has no -initrd: the bench cannot boot the same guest")
	}
	f.agent, err = newFloor(ours, ours[i+1])
	return f, err
}

// bareArguments keeps of a QEMU command line what makes the machine and drops
// what plugs our devices into it. An option it does not know is an error: it
// must be decided whether the floor has it.
func bareArguments(argv []string) ([]string, error) {
	keptFlags := []string{"-nodefaults", "-no-user-config", "-no-reboot", "-no-hpet", "-no-shutdown", "-nographic", "-S"}
	kept := []string{
		"-M", "-machine", "-accel", "-cpu", "-smp", "-m", "-kernel", "-append", "-display", "-sandbox", "-global", "-rtc", "-vga",
		"-overcommit", "-L", "-bios", "-name", "-action", "-msg", "-parallel", "-monitor", "-mem-prealloc",
	}
	dropped := []string{
		"-initrd", "-drive", "-blockdev", "-device", "-chardev", "-serial", "-netdev", "-nic", "-net", "-qmp", "-mon", "-pidfile",
		"-add-fd", "-object", "-D", "-d", "-uuid", "-smbios", "-fw_cfg",
	}
	if len(argv) == 0 {
		return nil, errors.New("the command line of our QEMU is empty")
	}
	out := []string{argv[0]}
	for i := 1; i < len(argv); i++ {
		opt := argv[i]
		// QEMU takes --option as well.
		if strings.HasPrefix(opt, "--") {
			opt = opt[1:]
		}
		switch {
		case slices.Contains(keptFlags, opt):
			out = append(out, opt)
			continue
		case i+1 == len(argv) || (!slices.Contains(kept, opt) && !slices.Contains(dropped, opt)):
			return nil, fmt.Errorf("the bench does not know QEMU's option %q: decide in bareArguments whether the floor has it", argv[i])
		case slices.Contains(kept, opt):
			out = append(out, opt, argv[i+1])
		}
		i++
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
