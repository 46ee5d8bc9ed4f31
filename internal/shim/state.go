package shim

import (
	"os"
	"sync"
	"time"

	shimv1 "github.com/iii-hq/workers/sandbox-libkrun/api/shim/v1"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
)

// state is what Status tells, and the count of agent calls.
type state struct {
	id, vmm, version string
	startedAt        time.Time
	// ended is closed with the VM's end.
	ended chan struct{}

	mu        sync.Mutex
	phase     shimv1.State
	changed   chan struct{} // closed and replaced when phase changes
	pid       int
	runningAt time.Time
	calls     int
	last      time.Time // when the last agent call began or ended
	closing   bool      // no agent call may begin any more
	asked     bool      // a Shutdown was passed to the agent
	acked     bool      // and answered
	endReport bootspec.End
}

func newState(spec *bootspec.Spec, version string) *state {
	now := time.Now()
	return &state{
		id: spec.ID, vmm: spec.VMM, version: version, startedAt: now,
		ended:   make(chan struct{}),
		phase:   shimv1.State_STATE_BOOTING,
		changed: make(chan struct{}),
		pid:     os.Getpid(),
		last:    now,
	}
}

func (s *state) started(pid int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pid = pid
}

// running notes that the agent was welcomed.
func (s *state) running() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.phase == shimv1.State_STATE_BOOTING {
		s.runningAt = time.Now()
		s.enter(shimv1.State_STATE_RUNNING)
	}
}

// end notes the end of the VM; called once.
func (s *state) end(end bootspec.End) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.endReport = end
	s.closing = true
	s.enter(shimv1.State_STATE_ENDED)
	close(s.ended)
}

func (s *state) enter(phase shimv1.State) {
	s.phase = phase
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *state) booted() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.runningAt.IsZero()
}

// begin counts an agent call in; false when the VM is about to be ended.
func (s *state) begin() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing {
		return false
	}
	s.calls++
	s.last = time.Now()
	return true
}

func (s *state) finish() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls--
	s.last = time.Now()
}

// touch makes now the moment of the last activity.
func (s *state) touch() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last = time.Now()
}

// touchAt makes t the moment of the last activity, unless there was one since.
func (s *state) touchAt(t time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if t.After(s.last) {
		s.last = t
	}
}

// closeIfIdle stops new agent calls when there was none for d, so that the
// VM's end cannot cut one off. Otherwise it returns how long to wait before
// that can be.
func (s *state) closeIfIdle(d time.Duration) (idle bool, wait time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.calls > 0 {
		return false, d
	}
	if wait := time.Until(s.last.Add(d)); wait > 0 {
		return false, wait
	}
	s.closing = true
	return true, 0
}

func (s *state) shutdownAsked() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked = true
}

func (s *state) shutdownAnswered() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.acked = true
}

func (s *state) shutdown() (asked, acked bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.asked, s.acked
}

func (s *state) vmmPID() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pid
}

// endNow is the VM's end; valid once ended is closed.
func (s *state) endNow() bootspec.End {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.endReport
}

// snapshot returns the status and a channel that closes at the next change of
// its state.
func (s *state) snapshot() (*shimv1.StatusResponse, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	status := &shimv1.StatusResponse{
		State: s.phase, Id: s.id, Vmm: s.vmm, VmmPid: uint32(s.pid),
		StartedUnixMs:      s.startedAt.UnixMilli(),
		CallsInFlight:      uint32(s.calls),
		LastActivityUnixMs: s.last.UnixMilli(),
		ShimVersion:        s.version,
	}
	if !s.runningAt.IsZero() {
		status.RunningUnixMs = s.runningAt.UnixMilli()
	}
	if s.phase == shimv1.State_STATE_ENDED {
		status.End = endMessage(s.endReport)
	}
	return status, s.changed
}

func endMessage(end bootspec.End) *shimv1.End {
	return &shimv1.End{
		Class: string(end.Class), Message: end.Message,
		ExitCode: int32(end.ExitCode), Signal: uint32(end.Signal),
	}
}
