//go:build linux

package procs_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/agent/procs"
)

// exitCodes runs n programs, some at a time, each with its own exit code, and
// returns how many statuses were wrong. Every third leaves an orphan.
func exitCodes(table *procs.Table, n int) (wrong int, err error) {
	var mu sync.Mutex
	var group sync.WaitGroup
	jobs := make(chan int)
	for range 16 {
		group.Go(func() {
			for i := range jobs {
				script := "exit " + strconv.Itoa(i%256)
				switch i % 3 {
				case 0:
					script = "(:) >/dev/null 2>&1 & " + script
				case 1:
					script = ": | : ; " + script
				}
				p, startErr := table.Start(sh(script))
				if startErr == nil {
					<-p.Done()
					startErr = p.Close()
				}
				mu.Lock()
				if startErr != nil {
					err = startErr
				} else if got := p.Status(); got.Code != i%256 || got.Signal != 0 {
					wrong++
				}
				mu.Unlock()
			}
		})
	}
	for i := range n {
		jobs <- i
	}
	close(jobs)
	group.Wait()
	return wrong, err
}

func TestExitCodesOwnOnly(t *testing.T) {
	t.Parallel()
	table := procs.Open(procs.OwnOnly)
	wrong, err := exitCodes(table, 1000)
	if wrong != 0 || err != nil {
		t.Fatalf("%d of 1000 exit codes wrong, error %v", wrong, err)
	}
	waitAll(t, table)
}

// TestExitCodesAll runs the reaper of mode All where it belongs: as PID 1 of a
// pid namespace, else as a child subreaper.
func TestExitCodesAll(t *testing.T) {
	t.Parallel()
	asPID1 := &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWPID,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	}
	for name, attr := range map[string]*syscall.SysProcAttr{"pid1": asPID1, "subreaper": nil} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
			defer cancel()
			cmd := exec.CommandContext(ctx, "/proc/self/exe")
			cmd.Env = append(os.Environ(), helperEnv+"=reap-all")
			cmd.SysProcAttr = attr
			var stderr bytes.Buffer
			cmd.Stderr = &stderr
			out, err := cmd.Output()
			if attr != nil && (errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.ENOSPC)) {
				t.Skipf("this host gives no pid namespace: %v", err)
			}
			want := "0 wrong, idle, 0 zombies\n"
			if err != nil || string(out) != want {
				t.Fatalf("got %q, %v, want %q; stderr:\n%s", out, err, want, stderr.String())
			}
		})
	}
}

// orphansGo leaves an orphan that ends after its parent was collected, with
// nothing else to come, and returns how long it stayed a zombie at most.
func orphansGo(table *procs.Table) error {
	p, err := table.Start(sh("(read x; exit 3) <&0 >/dev/null 2>&1 & echo $!"))
	if err != nil {
		return err
	}
	out, err := io.ReadAll(p.Stdout)
	if err != nil {
		return err
	}
	<-p.Done()
	if err := p.Close(); err != nil { // ends the orphan's read
		return err
	}
	deadline := time.After(patience)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		if _, err := os.Stat("/proc/" + strings.TrimSpace(string(out))); err != nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-deadline:
			return errors.New("an orphan stays a zombie")
		}
	}
}

// reapAllMain is the helper of TestExitCodesAll.
func reapAllMain() int {
	if os.Getpid() != 1 {
		if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	table := procs.Open(procs.All)
	wrong, err := exitCodes(table, 1000)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if err := orphansGo(table); err != nil && os.Getpid() != 1 {
		// As PID 1 it sees the /proc of another namespace.
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	state := "idle"
	if err := table.Wait(ctx); err != nil {
		state = err.Error()
	}
	zombies := 0
	for {
		pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
		if err != nil || pid == 0 {
			break
		}
		zombies++
	}
	fmt.Printf("%d wrong, %s, %d zombies\n", wrong, state, zombies)
	return 0
}
