package shim

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	shimv1 "github.com/iii-hq/workers/sandbox-libkrun/api/shim/v1"
)

// clockTick is the unit of times in /proc, in milliseconds: USER_HZ is 100 on
// every architecture of ours.
const clockTick = 10

// measure reads the VMM's use of CPU and memory, this process's memory, and the
// space of the upper.
func measure(pid int, upper string) (*shimv1.StatsResponse, error) {
	cpu, err := cpuTime(pid)
	if err != nil {
		return nil, err
	}
	vmm, err := memory(pid)
	if err != nil {
		return nil, err
	}
	own, err := memory(os.Getpid())
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Stat(upper, &st); err != nil {
		return nil, &os.PathError{Op: "stat", Path: upper, Err: err}
	}
	return &shimv1.StatsResponse{
		CpuMs: cpu, RssBytes: vmm["VmRSS"], RssAnonBytes: vmm["RssAnon"],
		ShimRssAnonBytes: own["RssAnon"], UpperBytes: uint64(st.Blocks) * 512,
	}, nil
}

// cpuTime is utime and stime of /proc/<pid>/stat, fields 14 and 15, in
// milliseconds.
func cpuTime(pid int) (uint64, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	// The command name before field 3 may hold anything.
	fields := strings.Fields(string(raw[bytes.LastIndexByte(raw, ')')+1:]))
	if len(fields) < 13 {
		return 0, fmt.Errorf("/proc/%d/stat has %d fields", pid, len(fields))
	}
	user, err := strconv.ParseUint(fields[14-3], 10, 64)
	system, err2 := strconv.ParseUint(fields[15-3], 10, 64)
	return (user + system) * clockTick, errors.Join(err, err2)
}

// memory reads the sizes of /proc/<pid>/status, in bytes.
func memory(pid int) (map[string]uint64, error) {
	file, err := os.Open(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	sizes := map[string]uint64{}
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		name, rest, _ := strings.Cut(lines.Text(), ":")
		kib, ok := strings.CutSuffix(strings.TrimSpace(rest), " kB")
		if n, err := strconv.ParseUint(kib, 10, 54); ok && err == nil {
			sizes[name] = n << 10
		}
	}
	return sizes, lines.Err()
}
