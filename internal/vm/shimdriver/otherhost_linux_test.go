package shimdriver_test

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/egress"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/guest"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/vmtest"
)

// The other host's network, of those for documentation (RFC 5737).
const (
	otherNetwork = "198.51.100.0/24"
	otherHost    = "198.51.100.2"
	ownHost      = "198.51.100.1"
)

// other is another host: a network namespace at the end of a cable.
type other struct {
	t        *testing.T
	name     string
	ours, in string // the cable's ends
}

// openOther makes one for the test's time, with a server for the probe on port 7.
func openOther(t *testing.T, probe string) *other {
	t.Helper()
	if _, err := exec.LookPath("ip"); err != nil || os.Geteuid() != 0 {
		t.Skip("SKIPPED: another host is a network namespace, which needs root and iproute2")
	}
	o := &other{t: t, name: fmt.Sprintf("vmtest%d", os.Getpid()), ours: fmt.Sprintf("vt%dh", os.Getpid()), in: fmt.Sprintf("vt%dg", os.Getpid())}
	if out, err := exec.Command("ip", "netns", "add", o.name).CombinedOutput(); err != nil {
		t.Skipf("SKIPPED: no network namespace can be made: %v: %s", err, out)
	}
	t.Cleanup(func() { o.ip("netns", "del", o.name) })
	// Without the cable nothing may go where other networks are.
	o.ip("route", "add", "unreachable", otherNetwork, "metric", "4000000000")
	t.Cleanup(func() { o.ip("route", "del", "unreachable", otherNetwork, "metric", "4000000000") })
	o.plug()
	ctx, cancel := context.WithCancel(context.Background())
	server := exec.CommandContext(ctx, "ip", "netns", "exec", o.name, probe, "echo", "7", "1000")
	stdout, err := server.StdoutPipe()
	if err == nil {
		err = server.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		_ = server.Wait() // it was killed
	})
	if _, err := bufio.NewReader(stdout).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	return o
}

func (o *other) ip(args ...string) {
	o.t.Helper()
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		o.t.Fatalf("ip %q: %v: %s", args, err, out)
	}
}

// plug connects the other host, unplug takes the cable away.
func (o *other) plug() {
	o.t.Helper()
	o.ip("link", "add", o.ours, "type", "veth", "peer", "name", o.in, "netns", o.name)
	o.ip("addr", "add", ownHost+"/24", "dev", o.ours)
	o.ip("link", "set", o.ours, "up")
	o.ip("-n", o.name, "addr", "add", otherHost+"/24", "dev", o.in)
	o.ip("-n", o.name, "link", "set", o.in, "up")
}

func (o *other) unplug() { o.ip("link", "del", o.ours) }

// Guests reach other hosts as far as their policy lets them, and their own host by
// none of its addresses, also one that it got after they booted. When the network
// of the host is gone they are told, and when it is back they have it again.
func TestReachesOtherHosts(t *testing.T) {
	host := vmtest.QEMU(t)
	e := qemuEnv(t, host, nil)
	launch := func(policy egress.Policy) *vm.Machine {
		req := e.Request()
		req.Network = &vm.Network{Policy: policy}
		m := e.Launch(t, e.Launcher(t), req)
		file, err := os.Open(host.Probe)
		if err != nil {
			t.Fatal(err)
		}
		defer file.Close() //nolint:errcheck // only read
		if _, err := m.Guest().WriteFile(e.Context(t), "/tmp/netprobe", guest.WriteOptions{Mode: 0o755}, file); err != nil {
			t.Fatal(err)
		}
		return m
	}
	open := launch(egress.Policy{Mode: egress.Open})
	restricted := launch(egress.Policy{Mode: egress.Restricted, Allow: []egress.Rule{{CIDR: "203.0.113.0/24"}, {CIDR: otherHost, Ports: []string{"8"}}}})
	allowed := launch(egress.Policy{Mode: egress.Restricted, Allow: []egress.Rule{{CIDR: "198.51.100.0/24", Ports: []string{"7"}, Protocol: egress.TCP}}})

	o := openOther(t, host.Probe)
	l, err := net.Listen("tcp", ownHost+":7")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() //nolint:errcheck // a test
	reaches := func(m *vm.Machine, address string) bool {
		_, err := vmtest.Output(e.Context(t), m, "/tmp/netprobe rtt "+address+" 1")
		return err == nil
	}
	for _, tt := range []struct {
		name    string
		machine *vm.Machine
		address string
		want    bool
	}{
		{"open, other host", open, otherHost + ":7", true},
		{"open, other host as IPv6", open, "[::ffff:" + otherHost + "]:7", true},
		{"open, nobody listens", open, otherHost + ":8", false},
		{"open, own address", open, ownHost + ":7", false},
		{"open, own address as IPv6", open, "[::ffff:" + ownHost + "]:7", false},
		{"restricted, other host", restricted, otherHost + ":7", false},
		{"restricted, other host as NAT64", restricted, "[64:ff9b::c633:6402]:7", false},
		{"restricted, own address", restricted, ownHost + ":7", false},
		{"allowed, other host", allowed, otherHost + ":7", true},
		{"allowed, own address in its range", allowed, ownHost + ":7", false},
	} {
		if got := reaches(tt.machine, tt.address); got != tt.want {
			t.Errorf("%s: reached %v, want %v", tt.name, got, tt.want)
		}
	}
	if out, err := vmtest.Output(e.Context(t), open, "wget -q -O - http://"+otherHost+":8/"); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("nobody listens: %q %v", out, err)
	}
	o.unplug()
	if reaches(open, otherHost+":7") {
		t.Error("a host without a cable was reached")
	}
	o.plug()
	if !reaches(open, otherHost+":7") {
		t.Error("the network is not back")
	}
}
