package vm

import (
	"context"
	"fmt"
	"time"

	shimv1 "github.com/iii-hq/workers/sandbox-libkrun/api/shim/v1"
)

// State is what a VM is doing.
type State string

// The states of a VM, in their order.
const (
	// Booting: the guest has not dialled yet.
	Booting State = "booting"
	// Running: the agent answers.
	Running State = "running"
	// Ended: the VM is gone and its shim about to be.
	Ended State = "ended"
)

// Status is what the shim knows about its VM.
type Status struct {
	State State
	// VMM is "qemu" or "libkrun"; VMMPID its process on the host.
	VMM    string
	VMMPID int
	// Started is when the shim started, Running when the link to the agent came
	// up first; zero before that.
	Started, Running time.Time
	// Calls is the number of agent calls in flight, LastActivity when the last
	// one began or ended.
	Calls        int
	LastActivity time.Time
	// ShimVersion names the shim's build.
	ShimVersion string
	// Published are the ports of the host that lead into the guest, by host port;
	// none is 0 here.
	Published []PublishedPort
}

// Status asks the shim.
func (m *Machine) Status(ctx context.Context) (Status, error) {
	reply, err := m.shim.Status(ctx, &shimv1.StatusRequest{})
	if err != nil {
		return Status{}, fmt.Errorf("status of vm %s: %w", m.id, err)
	}
	return statusOf(reply), nil
}

func statusOf(s *shimv1.StatusResponse) Status {
	states := map[shimv1.State]State{
		shimv1.State_STATE_BOOTING: Booting,
		shimv1.State_STATE_RUNNING: Running,
		shimv1.State_STATE_ENDED:   Ended,
	}
	var published []PublishedPort
	for _, p := range s.GetPublished() {
		published = append(published, PublishedPort{Host: uint16(p.GetHost()), Guest: uint16(p.GetGuest())})
	}
	return Status{
		Published:    published,
		State:        states[s.GetState()],
		VMM:          s.GetVmm(),
		VMMPID:       int(s.GetVmmPid()),
		Started:      unixMilli(s.GetStartedUnixMs()),
		Running:      unixMilli(s.GetRunningUnixMs()),
		Calls:        int(s.GetCallsInFlight()),
		LastActivity: unixMilli(s.GetLastActivityUnixMs()),
		ShimVersion:  s.GetShimVersion(),
	}
}

func unixMilli(ms int64) time.Time {
	if ms == 0 {
		return time.Time{}
	}
	return time.UnixMilli(ms)
}

// Stats is what a VM uses on the host now; memory and disk in bytes.
type Stats struct {
	// CPU is the time the VMM has used, user and system.
	CPU time.Duration
	// RSS and RSSAnon are the VMM's resident and anonymous memory, ShimRSSAnon
	// the shim's (Linux).
	RSS, RSSAnon, ShimRSSAnon uint64
	// UpperBytes is what the writable disk takes.
	UpperBytes uint64
	// Network is nil for a VM without one.
	Network *NetworkStats
}

// NetworkStats is what went through a VM's gateway since its start: payload alone,
// neither acknowledgements nor keep-alives.
type NetworkStats struct {
	// BytesIn went into the guest, BytesOut out of it, DNS not counted.
	BytesIn, BytesOut uint64
	// TCPFlows and UDPFlows were opened, LiveFlows are open now.
	TCPFlows, UDPFlows, LiveFlows uint64
	// DNSQueries were asked, Denied is what the policy denied.
	DNSQueries, Denied uint64
	// Idle is the time since the last payload, or since the start, by a clock that
	// is never set.
	Idle time.Duration
}

// Stats measures the VM.
func (m *Machine) Stats(ctx context.Context) (Stats, error) {
	reply, err := m.shim.Stats(ctx, &shimv1.StatsRequest{})
	if err != nil {
		return Stats{}, fmt.Errorf("stats of vm %s: %w", m.id, err)
	}
	return Stats{
		CPU:         time.Duration(reply.GetCpuMs()) * time.Millisecond,
		RSS:         reply.GetRssBytes(),
		RSSAnon:     reply.GetRssAnonBytes(),
		ShimRSSAnon: reply.GetShimRssAnonBytes(),
		UpperBytes:  reply.GetUpperBytes(),
		Network:     networkStatsOf(reply.GetNetwork()),
	}, nil
}

func networkStatsOf(n *shimv1.NetworkStats) *NetworkStats {
	if n == nil {
		return nil
	}
	return &NetworkStats{
		BytesIn: n.GetInBytes(), BytesOut: n.GetOutBytes(),
		TCPFlows: n.GetTcpFlows(), UDPFlows: n.GetUdpFlows(), LiveFlows: n.GetLiveFlows(),
		DNSQueries: n.GetDnsQueries(), Denied: n.GetDenied(),
		Idle: time.Duration(n.GetIdleMs()) * time.Millisecond,
	}
}
