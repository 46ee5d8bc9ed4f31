//go:build linux

package agent_test

import (
	"errors"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	guestv1 "github.com/iii-hq/workers/sandbox-libkrun/api/guest/v1"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/agent"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/agentlink"
)

func TestHello(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(c *agent.Config) {
		c.Kernel, c.Boot = 1500*time.Millisecond, 20*time.Millisecond
		c.Warnings = []string{"no lo"}
	})
	for range 2 {
		hello, err := r.Hello(bounded(t), &guestv1.HelloRequest{ProtocolVersion: agentlink.ProtocolVersion})
		if err != nil {
			t.Fatal(err)
		}
		if hello.GetProtocolVersion() != agentlink.ProtocolVersion || hello.GetAgentVersion() != "1.2.3" || hello.GetKernelRelease() == "" ||
			hello.GetKernelMs() != 1500 || hello.GetAgentMs() != 20 || len(hello.GetWarnings()) != 1 {
			t.Errorf("got %v", hello)
		}
	}
	_, err := r.Hello(bounded(t), &guestv1.HelloRequest{ProtocolVersion: agentlink.ProtocolVersion + 1, ClientVersion: "9.9"})
	if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "9.9") || !strings.Contains(err.Error(), "1.2.3") {
		t.Errorf("another protocol: %v, want FailedPrecondition naming both versions", err)
	}
}

func TestSetTime(t *testing.T) {
	t.Parallel()
	var set time.Time
	r := newRig(t, func(c *agent.Config) {
		c.SetClock = func(to time.Time) error {
			if to.Year() > 2200 {
				return syscall.EINVAL
			}
			set = to
			return nil
		}
	})
	to := time.Now().Add(time.Hour)
	reply, err := r.SetTime(bounded(t), &guestv1.SetTimeRequest{UnixNanos: to.UnixNano()})
	if err != nil {
		t.Fatal(err)
	}
	if !set.Equal(to) {
		t.Errorf("the clock was set to %v, want %v", set, to)
	}
	if off := time.Duration(reply.GetOffsetNanos()); off > time.Hour || off < 59*time.Minute {
		t.Errorf("offset %v, want an hour", off)
	}
	for _, nanos := range []int64{0, -1, time.Date(2250, 1, 1, 0, 0, 0, 0, time.UTC).UnixNano()} {
		if _, err := r.SetTime(bounded(t), &guestv1.SetTimeRequest{UnixNanos: nanos}); status.Code(err) != codes.InvalidArgument {
			t.Errorf("%d: %v, want InvalidArgument", nanos, err)
		}
	}
	if _, err := newRig(t, nil).SetTime(bounded(t), &guestv1.SetTimeRequest{UnixNanos: 1}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("without a clock: %v, want FailedPrecondition", err)
	}
}

// TestShutdown: a program that wants to end in order can, one that does not is
// killed, both calls end with Unavailable, and the file systems are made safe
// after the last process and before the reply.
func TestShutdown(t *testing.T) {
	t.Parallel()
	var polite, stubborn *session
	safe := make(chan string, 1)
	r := newRig(t, func(c *agent.Config) {
		c.OnShutdown = func() { safe <- "safe" }
	})
	polite = r.exec(t, sh("trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.05; done"))
	polite.until("up\n")
	stubborn = r.exec(t, sh("trap '' TERM; echo up; sleep 1000 & wait; sleep 1000"))
	stubborn.until("up\n")

	var calls sync.WaitGroup
	for range 3 {
		calls.Go(func() {
			if _, err := r.Shutdown(bounded(t), &guestv1.ShutdownRequest{GraceMs: 1000}); err != nil {
				t.Errorf("shutdown: %v", err)
			}
		})
	}
	o, err := polite.finish()
	if o.stdout != "bye\n" || status.Code(err) != codes.Unavailable {
		t.Errorf("the polite program: %+v, %v, want its farewell and Unavailable", o, err)
	}
	if _, err := stubborn.finish(); status.Code(err) != codes.Unavailable {
		t.Errorf("the stubborn program: %v, want Unavailable", err)
	}
	calls.Wait()
	select {
	case <-r.service.Done():
	default:
		t.Error("answered before it was done")
	}
	if len(safe) != 1 {
		t.Errorf("OnShutdown ran %d times", len(safe))
	}
	if _, err := r.exec(t, sh("true")).finish(); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("exec afterwards: %v, want FailedPrecondition", err)
	}
	if _, err := r.Hello(bounded(t), &guestv1.HelloRequest{ProtocolVersion: agentlink.ProtocolVersion}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("hello afterwards: %v, want FailedPrecondition", err)
	}
}

func TestShutdownAtOnce(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	if _, err := r.Shutdown(bounded(t), &guestv1.ShutdownRequest{GraceMs: 60_001}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("grace of more than a minute: %v, want InvalidArgument", err)
	}
	s := r.exec(t, sh("trap 'echo caught' TERM; echo up; while :; do sleep 0.05; done"))
	s.until("up\n")
	if _, err := r.Shutdown(bounded(t), &guestv1.ShutdownRequest{}); err != nil {
		t.Fatal(err)
	}
	if o, err := s.finish(); o.stdout != "" || status.Code(err) != codes.Unavailable {
		t.Errorf("got %+v, %v, want nothing and Unavailable", o, err)
	}
}

// TestServeAnswersBeforeItReturns is the last step of a VM: the reply must be
// out before the machine is switched off.
func TestServeAnswersBeforeItReturns(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	replied := make(chan error, 1)
	go func() {
		_, err := r.Shutdown(bounded(t), &guestv1.ShutdownRequest{})
		replied <- err
	}()
	await(t, r.service.Done(), "shutdown")
	r.stop()
	await(t, r.served, "the end of Serve")
	if err := await(t, replied, "the reply"); err != nil {
		t.Errorf("shutdown: %v", errors.Unwrap(err))
	}
}
