// Command guestinit is PID 1 of the test guests of package vmassets: it loads
// the modules of the initramfs, tries the disk and says on the console what it
// saw, one "RESULT key value" a line.
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

func main() {
	if err := run(); err != nil {
		fmt.Println("RESULT error", err)
	}
	fmt.Println("RESULT end")
	unix.Sync()
	fmt.Println(unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART))
	select {}
}

func run() error {
	fmt.Println()
	for _, m := range [][2]string{{"proc", "/proc"}, {"sysfs", "/sys"}, {"devtmpfs", "/dev"}} {
		if err := unix.Mount(m[0], m[1], m[0], 0, ""); err != nil {
			return fmt.Errorf("mount %s: %w", m[1], err)
		}
	}
	if err := loadModules(); err != nil {
		return err
	}
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return err
	}
	fmt.Println("RESULT release", unix.ByteSliceToString(uts.Release[:]))
	fmt.Println("RESULT port", hasPort("iii.agent"))
	if err := tryUpper(); err != nil {
		return err
	}
	return showClock()
}

func loadModules() error {
	start := time.Now()
	order, err := os.ReadFile("/modules/order")
	if err != nil {
		return err
	}
	for _, name := range strings.Fields(string(order)) {
		f, err := os.Open(filepath.Join("/modules", name))
		if err != nil {
			return err
		}
		if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil {
			return fmt.Errorf("load %s: %w", name, err)
		}
		_ = f.Close()
	}
	fmt.Println("RESULT modules", len(strings.Fields(string(order))), time.Since(start).Milliseconds(), "ms")
	fs, err := os.ReadFile("/proc/filesystems")
	if err != nil {
		return err
	}
	for _, want := range []string{"erofs", "ext4", "overlay"} {
		if !strings.Contains(string(fs), "\t"+want+"\n") {
			return fmt.Errorf("no file system %s in the kernel", want)
		}
	}
	return nil
}

func hasPort(want string) bool {
	names, _ := filepath.Glob("/sys/class/virtio-ports/*/name")
	for _, path := range names {
		if name, err := os.ReadFile(path); err == nil && strings.TrimSpace(string(name)) == want {
			return true
		}
	}
	return false
}

// tryUpper mounts the disk, counts what is in it and fills it with small files.
func tryUpper() error {
	device, err := diskWithSerial("iii-upper")
	if err != nil {
		return err
	}
	if err := os.Mkdir("/mnt", 0o700); err != nil {
		return err
	}
	start := time.Now()
	if err := unix.Mount(device, "/mnt", "ext4", 0, ""); err != nil {
		return fmt.Errorf("mount %s: %w", device, err)
	}
	mounted := time.Since(start)
	var st unix.Statfs_t
	if err := unix.Statfs("/mnt", &st); err != nil {
		return err
	}
	fmt.Println("RESULT upper", st.Blocks*uint64(st.Bsize)>>20, "MiB", mounted.Milliseconds(), "ms")
	old, err := os.ReadFile("/mnt/0/0")
	fmt.Println("RESULT found", len(old), err == nil)
	start = time.Now()
	const dirs, files = 10, 100
	for d := range dirs {
		dir := filepath.Join("/mnt", strconv.Itoa(d))
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		for f := range files {
			if err := os.WriteFile(filepath.Join(dir, strconv.Itoa(f)), []byte(strings.Repeat("x", 3000)), 0o644); err != nil {
				return err
			}
		}
	}
	created := time.Since(start)
	unix.Sync()
	fmt.Println("RESULT files", dirs*files, created.Milliseconds(), "ms, with sync", time.Since(start).Milliseconds(), "ms")
	start = time.Now()
	if err := writeLarge("/mnt/large", 64<<20); err != nil {
		return err
	}
	fmt.Println("RESULT large", 64, "MiB", time.Since(start).Milliseconds(), "ms")
	if option("hang") == "1" {
		select {} // until the host kills the VM
	}
	return unix.Unmount("/mnt", 0)
}

func writeLarge(path string, size int) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	chunk := []byte(strings.Repeat("0123456789abcdef", 1<<16))
	for range size / len(chunk) {
		if _, err := f.Write(chunk); err != nil {
			return err
		}
	}
	if err := f.Sync(); err != nil {
		return err
	}
	return f.Close()
}

func diskWithSerial(want string) (string, error) {
	paths, err := filepath.Glob("/sys/block/*/serial")
	if err != nil {
		return "", err
	}
	for _, path := range paths {
		if serial, err := os.ReadFile(path); err == nil && strings.TrimSpace(string(serial)) == want {
			return filepath.Join("/dev", filepath.Base(filepath.Dir(path))), nil
		}
	}
	return "", fmt.Errorf("no disk has the serial %s", want)
}

// showClock prints what the guest's clock is read from.
func showClock() error {
	source, err := os.ReadFile("/sys/devices/system/clocksource/clocksource0/current_clocksource")
	if err != nil {
		return err
	}
	fmt.Println("RESULT clocksource", strings.TrimSpace(string(source)))
	return nil
}

// option returns the value of iii.<key> on the kernel command line.
func option(key string) string {
	line, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return ""
	}
	for _, word := range strings.Fields(string(line)) {
		if value, ok := strings.CutPrefix(word, "iii."+key+"="); ok {
			return value
		}
	}
	return ""
}
