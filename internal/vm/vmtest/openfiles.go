package vmtest

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
)

// Parent is the parent of a process on this host.
func Parent(pid int) (int, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	// The name in parentheses may have anything in it.
	text := string(raw)
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	if len(fields) < 2 {
		return 0, fmt.Errorf("/proc/%d/stat is %q", pid, text)
	}
	return strconv.Atoi(fields[1])
}

// openFiles counts the open files of a VM's processes.
type openFiles struct{ shim, vmm, agent int }

// openFiles counts after a call of each kind was made, so that what stays open
// from the first one on does not count as growth. All 0 where the VM has no
// processes of its own, or this host no /proc.
func (r *running) openFiles(t testing.TB) openFiles {
	t.Helper()
	status, err := r.machine.Status(r.Context(t))
	if err != nil {
		t.Fatal(err)
	}
	if status.VMMPID == os.Getpid() || runtime.GOOS != "linux" {
		return openFiles{}
	}
	shim, err := Parent(status.VMMPID)
	if err != nil {
		t.Fatal(err)
	}
	agent := r.exec(t, Shell("ls /proc/1/fd | wc -l"), nil)
	files := openFiles{shim: countFiles(t, shim), vmm: countFiles(t, status.VMMPID)}
	if files.agent, err = strconv.Atoi(strings.TrimSpace(agent.stdout)); err != nil {
		t.Fatalf("the guest says %q %q", agent.stdout, agent.stderr)
	}
	return files
}

func countFiles(t testing.TB, pid int) int {
	t.Helper()
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// checkOpenFiles fails unless soon no process of the VM has more open files than
// before.
func (r *running) checkOpenFiles(t testing.TB, before openFiles) {
	t.Helper()
	var now openFiles
	defer func() { t.Logf("open files before %+v, after %+v", before, now) }()
	Eventually(t, r.Patience, fmt.Sprintf("the return to %+v open files", before), func() bool {
		now = r.openFiles(t)
		return now.shim <= before.shim && now.vmm <= before.vmm && now.agent <= before.agent
	})
}
