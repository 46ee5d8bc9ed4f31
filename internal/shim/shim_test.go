package shim_test

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	shimv1 "github.com/iii-hq/workers/sandbox-libkrun/api/shim/v1"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/agentlink"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
)

func TestLife(t *testing.T) {
	t.Parallel()
	v := newVM(t).start()
	if info, err := os.Lstat(v.spec.Socket); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("socket: %v, %v", info, err)
	}
	watch, err := v.control().Watch(v.context(), &shimv1.WatchRequest{})
	if err != nil {
		t.Fatal(err)
	}
	var states []shimv1.State
	var last *shimv1.StatusResponse
	for {
		event, err := watch.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		last = event.GetStatus()
		states = append(states, last.GetState())
		if running(last) {
			v.machine.powerOff(bootspec.End{Class: bootspec.EndGuest})
		}
	}
	if n := len(states); n < 2 || states[n-2] != shimv1.State_STATE_RUNNING || states[n-1] != shimv1.State_STATE_ENDED {
		t.Errorf("the states were %v", states)
	}
	if last.GetId() != "vm-1" || last.GetVmm() != "libkrun" || last.GetVmmPid() != uint32(os.Getpid()) || last.GetShimVersion() != "test" ||
		last.GetRunningUnixMs() < last.GetStartedUnixMs() || last.GetStartedUnixMs() == 0 {
		t.Errorf("the last status is %v", last)
	}
	v.expectEnd(bootspec.EndGuest, "powered off by itself")
	end := v.end
	if got := last.GetEnd(); got.GetClass() != string(end.Class) || got.GetMessage() != end.Message {
		t.Errorf("Watch told %v, Run %v", got, end)
	}
	if v.reported() != end || !end.Booted {
		t.Errorf("the report is %+v, Run told %+v", v.reported(), end)
	}
	// The launcher is alive: the directory is its own.
	if !exists(v.spec.Dir) || exists(v.spec.Socket) {
		t.Errorf("directory there: %v, socket there: %v", exists(v.spec.Dir), exists(v.spec.Socket))
	}
	if log := v.log.String(); strings.Contains(log, "swordfish") || strings.Contains(log, token) {
		t.Errorf("the log has secrets: %s", log)
	}
}

func TestEnvironmentReachesTheGuestAndThePortStaysOpen(t *testing.T) {
	t.Parallel()
	v := newVM(t)
	v.spec.Guest.Env = []string{"A=1", "B=" + strings.Repeat("x", 200_000)}
	v.start()
	v.until("the VM runs", running)
	guest := v.machine.guestSpec()
	if !slices.Equal(guest.Env, v.spec.Guest.Env) || guest.Hostname != "box" || guest.Token != token {
		t.Error("the guest got another environment")
	}
	if v.machine.envAtEnd() {
		t.Error("the shim closed its end of iii.env while the VM runs")
	}
}

func TestKill(t *testing.T) {
	t.Parallel()
	v := newVM(t).start()
	v.until("the VM runs", running)
	control := v.control()
	for range 2 {
		reply, err := control.Kill(v.context(), &shimv1.KillRequest{})
		if err != nil {
			// The second may find the shim gone.
			break
		}
		if reply.GetEnd().GetClass() != string(bootspec.EndKilled) {
			t.Errorf("Kill: %v", reply)
		}
	}
	v.expectEnd(bootspec.EndKilled, "Kill was called")
}

func TestLifelineEndsTheVMAndItsFiles(t *testing.T) {
	t.Parallel()
	for _, lifetime := range []string{bootspec.Tied, bootspec.Detached} {
		for _, booted := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/booted=%v", lifetime, booted), func(t *testing.T) {
				t.Parallel()
				v := newVM(t)
				v.spec.Lifetime = lifetime
				v.machine.hang = !booted
				v.start()
				if booted {
					v.until("the VM runs", running)
				}
				if err := v.lifeline.Close(); err != nil {
					t.Fatal(err)
				}
				v.expectEnd(bootspec.EndKilled, "launcher is gone")
				if exists(v.spec.Dir) || exists(v.spec.Socket) {
					t.Error("directory or socket is left")
				}
			})
		}
	}
}

func TestTiedVMCannotBeReleased(t *testing.T) {
	t.Parallel()
	v := newVM(t)
	v.spec.Lifetime = bootspec.Tied
	v.start()
	if _, err := v.lifeline.Write([]byte("D")); err != nil {
		t.Fatal(err)
	}
	if err := v.lifeline.Close(); err != nil {
		t.Fatal(err)
	}
	v.expectEnd(bootspec.EndKilled, "launcher is gone")
}

func TestReleasedVMLivesOnUntilItIsIdle(t *testing.T) {
	t.Parallel()
	v := newVM(t)
	v.spec.IdleTimeoutMs = 300
	v.start()
	stream := v.open(v.context(), "/guest.v1.Test/Echo")
	if _, err := v.lifeline.Write([]byte("D")); err != nil {
		t.Fatal(err)
	}
	if err := v.lifeline.Close(); err != nil {
		t.Fatal(err)
	}
	// A call in flight keeps it alive, longer than the idle time.
	for range 5 {
		roundTrip(t, stream, []byte("still there"))
		select {
		case <-v.done:
			t.Fatalf("it ended with a call in flight: %v", v.end)
		case <-time.After(100 * time.Millisecond):
		}
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	v.expectEnd(bootspec.EndKilled, "idle for 300ms")
	if exists(v.spec.Dir) || exists(v.spec.Socket) {
		t.Error("directory or socket is left")
	}
}

func TestNotReleasedVMIsNeverIdle(t *testing.T) {
	t.Parallel()
	v := newVM(t)
	v.spec.IdleTimeoutMs = 1
	v.start()
	v.until("the VM runs", running)
	select {
	case <-v.done:
		t.Fatalf("it ended: %v", v.end)
	case <-time.After(200 * time.Millisecond):
	}
}

func TestEndsOfTheGuest(t *testing.T) {
	t.Parallel()
	const panicked = "[    1.2] Kernel panic - not syncing: Attempted to kill init! exitcode=0x00000100\r\n[    1.3] CPU: 0 PID: 1\r\n"
	status1 := bootspec.End{Class: bootspec.EndCrashed, Message: "VMM ended with status 1", ExitCode: 1}
	guest := bootspec.End{Class: bootspec.EndGuest, Message: "VMM ended"}
	const rust = "thread '<unnamed>' (7) panicked at src/a.rs:1:2:\nno room for a kernel\nnote: run with a backtrace\nfatal runtime error, aborting\n"
	aborted := bootspec.End{Class: bootspec.EndCrashed, Message: "VMM gave up", ExitCode: -1, Signal: int(syscall.SIGABRT)}
	says125 := bootspec.End{Class: bootspec.EndRefused, Message: "no VM", ExitCode: 125}
	alone := bootspec.End{Class: bootspec.EndGuest, Message: "VMM ended", ExitCode: agentlink.StatusNoAgent}
	for _, tt := range []struct {
		name         string
		boot         bool
		console, vmm string
		end          bootspec.End
		class        bootspec.EndClass
		want         string
	}{
		{"panic with exit 0", true, panicked, "", guest, bootspec.EndCrashed, "Kernel panic - not syncing: Attempted to kill init! exitcode=0x00000100 ("},
		{"panic during boot", false, panicked, "", guest, bootspec.EndCrashed, "Attempted to kill init"},
		{"panic long ago", true, panicked + strings.Repeat("line\r\n", 10_000), "", guest, bootspec.EndGuest, "by itself"},
		{"early end", false, "agent: no disk\r\n", "", guest, bootspec.EndCrashed, "its console ends with: agent: no disk"},
		{"early end, hostile console", false, "\x1b[2Jevil\x00\xff\u202e\n\n \n", "", guest, bootspec.EndCrashed, "[2Jevil"},
		{"panic in the VMM's log", true, "", panicked + strings.Repeat("[ERROR init_or_kernel] call trace\n", 200), guest, bootspec.EndCrashed, "Attempted to kill init"},
		{"early end, VMM's log", false, "", "[ERROR vstate] KVM_EXIT_INTERNAL_ERROR\n", guest, bootspec.EndCrashed, "the VMM's log ends with: [ERROR vstate] KVM_EXIT_INTERNAL_ERROR"},
		{"dead agent", true, "agent: up\r\n", "", alone, bootspec.EndCrashed, "ended without its agent"},
		{"dead agent during boot", false, "", "", alone, bootspec.EndCrashed, "before its agent was there"},
		{"silent end", false, "", "", guest, bootspec.EndCrashed, "printed nothing"},
		{"refused", false, "", "warning\nqemu: -m 99999999: out of range\n", status1, bootspec.EndRefused, "status 1: qemu: -m 99999999: out of range"},
		{"crashed before boot", false, "Linux version\r\n", "oops\n", status1, bootspec.EndCrashed, "status 1: oops"},
		{"crashed", true, "", "assertion\n", status1, bootspec.EndCrashed, "status 1: assertion"},
		{"abort before boot", false, "", rust, aborted, bootspec.EndRefused, "VMM gave up: no room for a kernel"},
		{"abort with a guest", true, "", rust, aborted, bootspec.EndCrashed, "VMM gave up: no room for a kernel"},
		{"panic cut off", false, "", "thread panicked at src/a.rs", aborted, bootspec.EndRefused, "panicked at src/a.rs"},
		{"guest that chose the status", true, "", "", says125, bootspec.EndCrashed, "no VM"},
		{"told to end", true, "", "qemu: terminating on signal 15 from pid 1 (init)\n", guest, bootspec.EndKilled, "terminating on signal 15"},
		{"out of memory", true, "", "", bootspec.End{Class: bootspec.EndKilled, Message: "killed by SIGKILL", Signal: 9, ExitCode: -1}, bootspec.EndKilled, "killed by SIGKILL"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			v := newVM(t)
			v.machine.hang = !tt.boot
			v.start()
			if tt.boot {
				v.until("the VM runs", running)
			}
			v.machine.say(tt.console, tt.vmm)
			v.machine.powerOff(tt.end)
			v.expectEnd(tt.class, tt.want)
			end := v.end
			if end.Booted != tt.boot || end.ExitCode != tt.end.ExitCode || end.Signal != tt.end.Signal {
				t.Errorf("the end is %+v", end)
			}
			for _, c := range end.Message {
				if c < ' ' || c == '\u202e' {
					t.Errorf("the message has character %q", c)
				}
			}
		})
	}
}

func TestStats(t *testing.T) {
	t.Parallel()
	v := newVM(t).start()
	control, ctx := v.control(), v.context()
	stats := &shimv1.StatsResponse{}
	// The fake machine is this process, and asking takes CPU time.
	for stats.GetCpuMs() == 0 {
		var err error
		if stats, err = control.Stats(ctx, &shimv1.StatsRequest{}); err != nil {
			t.Fatal(err)
		}
	}
	if stats.GetRssBytes() < 1<<20 || stats.GetRssAnonBytes() > stats.GetRssBytes() ||
		stats.GetShimRssAnonBytes() == 0 || stats.GetUpperBytes() != 4096 {
		t.Errorf("stats: %v", stats)
	}
}
