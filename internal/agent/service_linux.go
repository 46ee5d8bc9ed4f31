package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	guestv1 "github.com/iii-hq/workers/sandbox-libkrun/api/guest/v1"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/agent/procs"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/agentlink"
)

// Config is what a Service needs; Log and Table must be set.
type Config struct {
	Log *slog.Logger
	// Version of the agent's build, for Hello.
	Version string
	// Table starts the programs. The service does not close it.
	Table *procs.Table
	// Env is the guest's environment, KEY=value, the last of a key wins.
	Env []string
	// Kernel is the time from the kernel's start to the boot spec's arrival, Boot
	// from there until the link was open.
	Kernel, Boot time.Duration
	// Warnings are for Hello: what went wrong at boot without ending it.
	Warnings []string
	// SetClock sets the wall clock. Nil where the clock is not the agent's to
	// set; SetTime is then refused.
	SetClock func(time.Time) error
	// OnShutdown runs once, when every process is gone and before Shutdown is
	// answered: it makes the file systems safe. Nil does nothing.
	OnShutdown func()
}

// Service is the agent's AgentService. Make it with New.
type Service struct {
	guestv1.UnimplementedAgentServiceServer

	cfg     Config
	env     []string
	release string
	buffers sync.Pool

	mu       sync.Mutex
	stopping bool
	// ended is closed when Shutdown has killed what was left, done when it has
	// been carried out.
	ended, done chan struct{}
}

// New makes the service. It starts nothing.
func New(cfg Config) *Service {
	return &Service{
		cfg:     cfg,
		env:     overlay(nil, cfg.Env),
		release: kernelRelease(),
		buffers: sync.Pool{New: func() any { return new([maxChunk]byte) }},
		ended:   make(chan struct{}),
		done:    make(chan struct{}),
	}
}

// Register puts the service on s.
func (s *Service) Register(r grpc.ServiceRegistrar) {
	guestv1.RegisterAgentServiceServer(r, s)
}

// Done is closed when a Shutdown has been carried out and is about to be
// answered: the machine may then be powered off as soon as Serve has returned.
func (s *Service) Done() <-chan struct{} { return s.done }

// Hello tells what this agent is.
func (s *Service) Hello(_ context.Context, req *guestv1.HelloRequest) (*guestv1.HelloResponse, error) {
	if theirs := req.GetProtocolVersion(); theirs != agentlink.ProtocolVersion {
		return nil, status.Errorf(codes.FailedPrecondition,
			"the client (version %q) speaks protocol %d, the guest's agent (version %q) protocol %d: adapter, krun-shim and guest-agent must come from one build",
			req.GetClientVersion(), theirs, s.cfg.Version, agentlink.ProtocolVersion)
	}
	if s.isStopping() {
		return nil, errStopping(codes.FailedPrecondition)
	}
	return &guestv1.HelloResponse{
		ProtocolVersion: agentlink.ProtocolVersion,
		AgentVersion:    s.cfg.Version,
		KernelRelease:   s.release,
		KernelMs:        uint64(max(s.cfg.Kernel, 0).Milliseconds()),
		AgentMs:         uint64(max(s.cfg.Boot, 0).Milliseconds()),
		Warnings:        s.cfg.Warnings,
	}, nil
}

// SetTime sets the wall clock.
func (s *Service) SetTime(_ context.Context, req *guestv1.SetTimeRequest) (*guestv1.SetTimeResponse, error) {
	if req.GetUnixNanos() <= 0 {
		return nil, status.Errorf(codes.InvalidArgument, "unix_nanos is %d, not after 1970", req.GetUnixNanos())
	}
	if s.cfg.SetClock == nil {
		return nil, status.Error(codes.FailedPrecondition, "this agent runs outside of a guest, where the clock is not its own")
	}
	to := time.Unix(0, req.GetUnixNanos())
	offset := to.Sub(time.Now().Round(0))
	if err := s.cfg.SetClock(to); err != nil {
		code := codes.Internal
		if errors.Is(err, syscall.EINVAL) {
			code = codes.InvalidArgument
		}
		return nil, status.Errorf(code, "set the clock to %s: %v", to.UTC().Format(time.RFC3339Nano), err)
	}
	return &guestv1.SetTimeResponse{OffsetNanos: offset.Nanoseconds()}, nil
}

// maxGrace is the most that a ShutdownRequest may ask for.
const maxGrace = 60 * time.Second

// killWait bounds the wait for killed processes: one that hangs in the kernel
// must not keep the machine from going down.
const killWait = 5 * time.Second

// Shutdown ends every process and makes the file systems safe. The first call
// does it, further ones wait for that.
func (s *Service) Shutdown(ctx context.Context, req *guestv1.ShutdownRequest) (*guestv1.ShutdownResponse, error) {
	grace := time.Duration(req.GetGraceMs()) * time.Millisecond
	if grace > maxGrace {
		return nil, status.Errorf(codes.InvalidArgument, "grace_ms is %d, more than %d", req.GetGraceMs(), maxGrace.Milliseconds())
	}
	if s.beginStop() {
		// Not under ctx: a client that goes away has still asked for it.
		s.stopAll(context.WithoutCancel(ctx), grace)
	}
	select {
	case <-s.done:
		return &guestv1.ShutdownResponse{}, nil
	case <-ctx.Done():
		return nil, status.FromContextError(ctx.Err()).Err()
	}
}

func (s *Service) beginStop() (first bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopping {
		return false
	}
	s.stopping = true
	return true
}

func (s *Service) isStopping() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stopping
}

func (s *Service) stopAll(ctx context.Context, grace time.Duration) {
	s.cfg.Log.Info("shutting down", "grace", grace)
	if grace > 0 {
		s.cfg.Table.SignalAll(syscall.SIGTERM)
		// A stopped process gets its SIGTERM only when it continues.
		s.cfg.Table.SignalAll(syscall.SIGCONT)
	}
	if !s.waitProcesses(ctx, grace) {
		s.cfg.Table.SignalAll(syscall.SIGKILL)
		if !s.waitProcesses(ctx, killWait) {
			s.cfg.Log.Warn("some processes do not end, going on without them")
		}
	}
	close(s.ended)
	if s.cfg.OnShutdown != nil {
		s.cfg.OnShutdown()
	}
	close(s.done)
}

func (s *Service) waitProcesses(ctx context.Context, d time.Duration) bool {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	return s.cfg.Table.Wait(ctx) == nil
}

func errStopping(code codes.Code) error {
	return status.Error(code, "the guest is shutting down")
}

func kernelRelease() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return fmt.Sprintf("unknown (%v)", err)
	}
	return unix.ByteSliceToString(u.Release[:])
}
