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
	"slices"
	"strings"
	"time"
)

// floor is a bare QEMU: the binary, machine, kernel and kernel arguments that
// our shim used, without our devices, with the smallest init there is.
type floor struct {
	argv []string
}

// newFloor derives the floor from the command line of a QEMU that our shim
// runs, so that both cannot drift apart, and writes its initramfs into dir.
func newFloor(ours []string, dir, arch string, stay bool) (*floor, error) {
	archive, err := floorInitramfs(arch, stay)
	if err != nil {
		return nil, err
	}
	file := filepath.Join(dir, fmt.Sprintf("floor-%v.cpio", stay))
	if err := os.WriteFile(file, archive, 0o600); err != nil {
		return nil, err
	}
	kept, err := bareArguments(ours)
	if err != nil {
		return nil, err
	}
	return &floor{argv: append(kept, "-initrd", file, "-serial", "stdio")}, nil
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
}

// run boots the floor to its end.
func (f *floor) run(ctx context.Context) (boot, error) {
	var b boot
	begin := time.Now()
	err := f.start(ctx, func(*os.Process) error {
		b.Init = time.Since(begin)
		return nil
	})
	b.End = time.Since(begin)
	return b, err
}

// residentSize boots the floor, whose init stays, and returns QEMU's resident
// memory once it no longer grows.
func (f *floor) residentSize(ctx context.Context) (int64, error) {
	var size int64
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	errDone := errors.New("measured")
	err := f.start(ctx, func(p *os.Process) error {
		var err error
		if size, err = settledRSS(ctx, p.Pid); err != nil {
			return err
		}
		return errDone
	})
	if errors.Is(err, errDone) {
		return size, nil
	}
	return 0, errors.Join(err, errors.New("the floor's QEMU ended by itself before it could be measured"))
}

// start runs QEMU until it exits; atInit is called once when the init has
// printed its marker, and an error of it kills QEMU.
func (f *floor) start(ctx context.Context, atInit func(*os.Process) error) error {
	cmd := exec.CommandContext(ctx, f.argv[0], f.argv[1:]...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	var seen bool
	var hookErr error
	console := bufio.NewScanner(out)
	var last string
	for console.Scan() {
		last = console.Text()
		if !seen && strings.Contains(last, strings.TrimSpace(marker)) {
			seen = true
			if hookErr = atInit(cmd.Process); hookErr != nil {
				_ = cmd.Process.Kill() // Wait tells whether it is gone
			}
		}
	}
	_, _ = io.Copy(io.Discard, out) // after a line that was too long
	waitErr := cmd.Wait()
	switch {
	case hookErr != nil:
		return hookErr
	case waitErr != nil:
		return fmt.Errorf("bare QEMU: %w: %s", waitErr, bytes.TrimSpace(stderr.Bytes()))
	case !seen:
		return fmt.Errorf("bare QEMU ended before its init ran; its last line was %q", last)
	}
	return nil
}

// settledRSS waits until a process's resident memory stays within 1 % for a
// second, at most 30 s, and returns it in bytes.
func settledRSS(ctx context.Context, pid int) (int64, error) {
	tick := time.NewTicker(500 * time.Millisecond)
	defer tick.Stop()
	var history []int64
	for range 60 {
		now, err := processMemory(pid, "VmRSS")
		if err != nil {
			return 0, err
		}
		history = append(history, now)
		if n := len(history); n >= 3 && slices.Max(history[n-3:])-slices.Min(history[n-3:]) <= now/100 {
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
