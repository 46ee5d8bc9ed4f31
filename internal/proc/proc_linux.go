package proc

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// waitExited waits until the child has ended and leaves it unreaped; false when
// the kernel does not let it wait.
func waitExited(pid int) bool {
	for {
		err := unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			return err == nil
		}
	}
}

// closeOnExec marks all open files above 2 (Linux 5.11; before that nothing is
// done, and what an unclean parent left open is inherited).
func closeOnExec() {
	_ = unix.CloseRange(3, math.MaxInt32, unix.CLOSE_RANGE_CLOEXEC)
}

// groupAlive reports whether a member of the process group runs. Members that
// are dead but not reaped do not count: their new parent may be one that never
// reaps, PID 1 of a container for example.
func groupAlive(pgid int) bool {
	if err := unix.Kill(-pgid, 0); errors.Is(err, unix.ESRCH) {
		return false
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return true
	}
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		if fields, err := statFields(pid); err == nil && fields[statPgrp] == strconv.Itoa(pgid) && !dead(fields) {
			return true
		}
	}
	return false
}

// Indexes into the fields of /proc/<pid>/stat behind the command name: 3 less
// than the numbers in proc_pid_stat(5).
const (
	statState = 0
	statPgrp  = 2
	statStart = 19
)

func dead(fields []string) bool {
	return fields[statState] == "Z" || fields[statState] == "X"
}

// statFields reads /proc/<pid>/stat from field 3 on. The command name before it
// may hold anything, ')' and spaces too.
func statFields(pid int) ([]string, error) {
	raw, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return nil, fmt.Errorf("process %d: %w", pid, ErrGone)
	}
	if err != nil {
		return nil, err
	}
	end := bytes.LastIndexByte(raw, ')')
	fields := strings.Fields(string(raw[end+1:]))
	if end < 0 || len(fields) <= statStart {
		return nil, fmt.Errorf("/proc/%d/stat has %d fields", pid, len(fields))
	}
	return fields, nil
}

// birthOf is the host's boot id and the process's start in clock ticks since
// that boot (field 22).
func birthOf(pid int) (string, error) {
	fields, err := statFields(pid)
	if err != nil {
		return "", err
	}
	if dead(fields) {
		return "", fmt.Errorf("process %d: %w", pid, ErrGone)
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", err
	}
	return strings.TrimSpace(string(boot)) + "/" + fields[statStart], nil
}
