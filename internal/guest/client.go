// Package guest is the host's client of the agent in one VM: it runs programs,
// moves files and shuts the guest down. Every call goes over one gRPC
// connection to the VM's shim, which passes it on to the agent.
//
// Limits, order and flow control are those stated in api/proto/guest/v1.
package guest

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc"

	guestv1 "github.com/iii-hq/workers/sandbox-libkrun/api/guest/v1"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/agentlink"
)

// Client calls the agent of one VM. All its methods may be called concurrently.
type Client struct {
	api   guestv1.AgentServiceClient
	files guestv1.FileServiceClient
}

// New returns a client on conn, which the caller keeps open while it is used
// and closes afterwards. Nothing is sent.
func New(conn grpc.ClientConnInterface) *Client {
	return &Client{api: guestv1.NewAgentServiceClient(conn), files: guestv1.NewFileServiceClient(conn)}
}

// Info is what the agent tells about itself and the guest's boot.
type Info struct {
	// AgentVersion is the version of the agent's build, KernelRelease the
	// guest's uname -r.
	AgentVersion, KernelRelease string
	// KernelTime is from the kernel's start to the boot spec's arrival, AgentTime
	// from there to the link to the shim, by the guest's clock: it stands still in
	// a snapshot.
	KernelTime, AgentTime time.Duration
	// Warnings are what the agent could not do at boot but went on without, one
	// sentence each.
	Warnings []string
}

// VersionError tells that client and agent come from builds that do not
// understand each other.
type VersionError struct {
	// ClientProtocol and AgentProtocol are what each speaks.
	ClientProtocol, AgentProtocol uint32
	// ClientVersion and AgentVersion name the builds.
	ClientVersion, AgentVersion string
}

func (e *VersionError) Error() string {
	return fmt.Sprintf("guest agent %q speaks protocol %d, this build (%q) speaks %d: use adapter, krun-shim and guest-agent of one build",
		e.AgentVersion, e.AgentProtocol, e.ClientVersion, e.ClientProtocol)
}

// Hello proves that the guest has booted: it returns when the agent answers,
// or when ctx ends. version names the caller's build, for the agent's log.
// An agent of another protocol is a *VersionError.
func (c *Client) Hello(ctx context.Context, version string) (Info, error) {
	reply, err := c.api.Hello(ctx, &guestv1.HelloRequest{
		ProtocolVersion: agentlink.ProtocolVersion,
		ClientVersion:   version,
	})
	if err != nil {
		return Info{}, callError(ctx, "hello", err)
	}
	if reply.GetProtocolVersion() != agentlink.ProtocolVersion {
		return Info{}, &VersionError{
			ClientProtocol: agentlink.ProtocolVersion, AgentProtocol: reply.GetProtocolVersion(),
			ClientVersion: version, AgentVersion: reply.GetAgentVersion(),
		}
	}
	return Info{
		AgentVersion:  reply.GetAgentVersion(),
		KernelRelease: reply.GetKernelRelease(),
		KernelTime:    milliseconds(reply.GetKernelMs()),
		AgentTime:     milliseconds(reply.GetAgentMs()),
		Warnings:      reply.GetWarnings(),
	}, nil
}

// MaxGrace is the longest grace that Shutdown passes on.
const MaxGrace = time.Minute

// Shutdown ends the guest in order: SIGTERM to every process, SIGKILL after
// grace (0 to MaxGrace, clamped), disks flushed, power off. It returns when the
// agent says that the disks are flushed; the VM's process ends a moment later,
// so a call that loses the connection may have worked as well.
func (c *Client) Shutdown(ctx context.Context, grace time.Duration) error {
	grace = min(max(grace, 0), MaxGrace)
	_, err := c.api.Shutdown(ctx, &guestv1.ShutdownRequest{GraceMs: uint32(ceilMilliseconds(grace))})
	return callError(ctx, "shutdown", err)
}

// SetTime sets the guest's wall clock to t and returns how far it was behind
// (negative: ahead).
func (c *Client) SetTime(ctx context.Context, t time.Time) (time.Duration, error) {
	reply, err := c.api.SetTime(ctx, &guestv1.SetTimeRequest{UnixNanos: t.UnixNano()})
	if err != nil {
		return 0, callError(ctx, "set time", err)
	}
	return time.Duration(reply.GetOffsetNanos()), nil
}

// milliseconds clamps: the number comes from the guest.
func milliseconds(ms uint64) time.Duration {
	const longest = uint64(1<<63-1) / uint64(time.Millisecond)
	return time.Duration(min(ms, longest)) * time.Millisecond
}

// ceilMilliseconds rounds up, so that a short limit never becomes "no limit".
func ceilMilliseconds(d time.Duration) int64 {
	ms := d.Milliseconds()
	if d > time.Duration(ms)*time.Millisecond {
		ms++
	}
	return ms
}
