package vmtest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/egress"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/guest"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
	"github.com/iii-hq/workers/sandbox-libkrun/test/netprobe/wire"
)

// gateway is where a guest finds the opened ports of its host.
const gateway = "198.18.0.1"

// probePath is where the probe lies in a guest.
const probePath = "/tmp/netprobe"

// guestPort is what the guest's own server listens on, where the host cannot
// mistake it for one of its own.
const guestPort = 7

// counted is a listener that knows how many came.
type counted struct {
	net.Listener
	came atomic.Int64
}

func (c *counted) Accept() (net.Conn, error) {
	conn, err := c.Listener.Accept()
	if err == nil {
		c.came.Add(1)
	}
	return conn, err
}

// port is the listener's.
func (c *counted) port() uint16 {
	address, _ := c.Addr().(*net.TCPAddr)
	return uint16(address.Port)
}

// serverOn starts a server for the probe on an address of the host.
func serverOn(t testing.TB, address string) *counted {
	t.Helper()
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	c := &counted{Listener: l}
	go wire.Serve(c)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// launchWithProbe boots a VM with the probe in it.
func (e *Env) launchWithProbe(t testing.TB, network *vm.Network) *running {
	t.Helper()
	if e.Probe == "" {
		t.Skip("SKIPPED: a guest without a machine has the host's network")
	}
	req := e.Request()
	req.Network = network
	r := &running{Env: e, machine: e.Launch(t, e.Launcher(t), req)}
	file, err := os.Open(e.Probe)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close() //nolint:errcheck // only read
	if _, err := r.machine.Guest().WriteFile(e.Context(t), probePath, guest.WriteOptions{Mode: 0o755}, file); err != nil {
		t.Fatal(err)
	}
	return r
}

// probe runs the probe, which has to succeed, and decodes what it says.
func (r *running) probe(t testing.TB, into any, args ...string) {
	t.Helper()
	got := r.exec(t, guest.Command{Argv: append([]string{probePath}, args...)}, nil)
	if got.ExitCode != 0 {
		t.Fatalf("netprobe %q: %s", args, got.stderr)
	}
	if err := json.Unmarshal([]byte(got.stdout), into); err != nil {
		t.Fatalf("netprobe %q says %q: %v", args, got.stdout, err)
	}
}

// testNetwork uses one VM with a network in many ways at once.
func testNetwork(t *testing.T, e *Env) {
	server, web := serverOn(t, "127.0.0.1:0"), webServer(t)
	closed := serverOn(t, "127.0.0.1:0")
	n := &networked{server: server, web: web, closed: closed, secret: serverOn(t, "127.0.0.1:0")}
	n.running = e.launchWithProbe(t, &vm.Network{
		Policy:  egress.Policy{Mode: egress.Open, HostPorts: []uint16{server.port(), web.port(), closed.port()}},
		Publish: []vm.PublishedPort{{Guest: guestPort}},
	})
	t.Run("group", func(t *testing.T) {
		for name, run := range map[string]func(*testing.T, *networked){
			"Files": testNetworkFiles, "Download": testDownload, "Flood": testFlood, "Refused": testRefused,
			"Unopened": testUnopened, "Names": testNames, "Ping": testPing, "Published": testPublished,
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				run(t, n)
			})
		}
	})
	stats, err := n.machine.Stats(e.Context(t))
	if err != nil {
		t.Fatal(err)
	}
	if s := stats.Network; s == nil || s.BytesIn < uint64(e.load(t).download()) || s.BytesOut == 0 || s.TCPFlows < floodSize || s.Denied == 0 {
		t.Errorf("the gateway counted %+v", s)
	}
	t.Logf("the gateway counted %+v; the shim has %d KiB of its own memory", stats.Network, stats.ShimRSSAnon>>10)
}

// networked is a VM with a network, and servers of the host.
type networked struct {
	*running
	// The ports of the first three are open to the guest; nobody listens on closed
	// for some of the time.
	server, web, closed, secret *counted
}

func at(host string, c *counted) string { return net.JoinHostPort(host, fmt.Sprint(c.port())) }

// download is the size of a file, in bytes.
func (l Load) download() int64 {
	if l.Calls < SmallLoad().Calls {
		return 16 << 20
	}
	return 200 << 20
}

// webServer has a file of random bytes at /SIZE and its checksum in a trailer of
// its own, /sum.
func webServer(t testing.TB) *counted {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := &counted{Listener: l}
	server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var size int64
		if _, err := fmt.Sscanf(r.URL.Path, "/%d", &size); err != nil {
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Content-Length", fmt.Sprint(size))
		_, _ = io.Copy(w, newNoise(size)) // a client that lacks some will tell
	})}
	go func() { _ = server.Serve(c) }()
	t.Cleanup(func() { _ = server.Close() })
	return c
}

func testNetworkFiles(t *testing.T, n *networked) {
	got := n.exec(t, Shell("cat /etc/resolv.conf /etc/hosts; ls /sys/class/net; cat /sys/class/net/eth0/address; hostname"), nil)
	for _, want := range []string{
		"nameserver " + gateway + "\n", gateway + "\t" + bootspec.HostAlias + "\n", "eth0\nlo\n", "localhost", "5a:94:ef:18:00:02",
	} {
		if !strings.Contains(got.stdout, want) {
			t.Errorf("%q is not in %q", want, got.stdout)
		}
	}
}

func testDownload(t *testing.T, n *networked) {
	size := n.load(t).download()
	want := newNoise(size)
	if _, err := io.Copy(io.Discard, want); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	url := fmt.Sprintf("http://%s/%d", at(bootspec.HostAlias, n.web), size)
	got := n.exec(t, Shell("set -o pipefail; wget -q -O - "+url+" | sha256sum"), nil)
	if sum := fmt.Sprintf("%x", want.sum.Sum(nil)); got.ExitCode != 0 || !strings.HasPrefix(got.stdout, sum) {
		t.Errorf("%d %q %q, want %s", got.ExitCode, got.stdout, got.stderr, sum)
	}
	t.Logf("%d MiB in %v, beside other tests", size>>20, time.Since(begin).Round(time.Millisecond))
}

// floodSize is how many connections are open at once.
const floodSize = 200

func testFlood(t *testing.T, n *networked) {
	for _, host := range []string{gateway, "fd9c:3f1e:7a52::1"} {
		var out struct {
			OK     int
			Errors []string
		}
		n.probe(t, &out, "flood", at(host, n.server), fmt.Sprint(floodSize))
		if out.OK != floodSize {
			t.Errorf("%s: %d of %d connections worked: %q", host, out.OK, floodSize, out.Errors)
		}
	}
}

// A port that nobody listens on is refused in the guest, and works as soon as
// somebody does: nothing is remembered.
func testRefused(t *testing.T, n *networked) {
	address := n.closed.Addr().String()
	if err := n.closed.Close(); err != nil {
		t.Fatal(err)
	}
	rtt := guest.Command{Argv: []string{probePath, "rtt", at(gateway, n.closed), "1"}}
	if got := n.exec(t, rtt, nil); got.ExitCode == 0 || !strings.Contains(got.stderr, "refused") {
		t.Errorf("nobody listens: %d %q %q", got.ExitCode, got.stdout, got.stderr)
	}
	again := serverOn(t, address)
	if got := n.exec(t, rtt, nil); got.ExitCode != 0 || again.came.Load() != 1 {
		t.Errorf("somebody listens again: %d %q", got.ExitCode, got.stderr)
	}
}

// What the operator has not opened is not reached by any of the host's names.
func testUnopened(t *testing.T, n *networked) {
	for _, host := range []string{gateway, bootspec.HostAlias, "127.0.0.1", "localhost", "fd9c:3f1e:7a52::1", "::ffff:" + gateway} {
		got := n.exec(t, guest.Command{Argv: []string{probePath, "rtt", at(host, n.secret), "1"}}, nil)
		if got.ExitCode == 0 {
			t.Errorf("%s leads to an unopened port", host)
		}
	}
	if n := n.secret.came.Load(); n != 0 {
		t.Errorf("%d connections came to the host's own server", n)
	}
}

// Every question is answered, also that for a name that nobody has.
func testNames(t *testing.T, n *networked) {
	if got := n.exec(t, Shell("nslookup -type=a "+bootspec.HostAlias+" "+gateway), nil); got.ExitCode != 0 || strings.Count(got.stdout, gateway) < 2 {
		t.Errorf("the host's alias: %d %q %q", got.ExitCode, got.stdout, got.stderr)
	}
	got := n.exec(t, Shell("nslookup nobody.invalid"), nil)
	if said := got.stdout + got.stderr; got.ExitCode == 0 || !strings.Contains(said, "NXDOMAIN") && !strings.Contains(said, "SERVFAIL") {
		t.Errorf("a name that nobody has: %d %q", got.ExitCode, said)
	}
}

func testPing(t *testing.T, n *networked) {
	got := n.exec(t, Shell("ping -c 1 127.0.0.1 && ping -c 1 "+gateway+" && ping -c 1 fd9c:3f1e:7a52::1"), nil)
	if got.ExitCode != 0 {
		t.Errorf("%q %q", got.stdout, got.stderr)
	}
}

// A published port leads to whoever listens in the guest at the time.
func testPublished(t *testing.T, n *networked) {
	status, err := n.machine.Status(n.Context(t))
	if err != nil || len(status.Published) != 1 || status.Published[0].Guest != guestPort {
		t.Fatalf("published: %+v, %v", status.Published, err)
	}
	address := fmt.Sprintf("127.0.0.1:%d", status.Published[0].Host)
	if text, err := exchange(address); err == nil {
		t.Errorf("nobody listens in the guest, but %q came back", text)
	}
	for range 2 { // the second listener is another one
		listens := newGate()
		close(listens.open)
		ended := make(chan error, 1)
		go func() {
			result, err := n.machine.Guest().Exec(n.Context(t), guest.Command{Argv: []string{probePath, "echo", fmt.Sprint(guestPort), "1"}}, guest.IO{Stdout: listens})
			if err == nil && result.ExitCode != 0 {
				err = fmt.Errorf("exit code %d", result.ExitCode)
			}
			ended <- err
		}()
		n.Await(t, listens.arrived, "the guest's server")
		if text, err := exchange(address); err != nil || text != "hello guest" {
			t.Errorf("%q came back: %v", text, err)
		}
		if err := <-ended; err != nil {
			t.Errorf("the guest's server: %v", err)
		}
	}
}

// exchange has text echoed by what a port leads to.
func exchange(address string) (string, error) {
	c, err := net.Dial("tcp", address)
	if err != nil {
		return "", err
	}
	defer c.Close() //nolint:errcheck // everything was read
	if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		return "", err
	}
	_, err = io.WriteString(c, "hello guest")
	if tcp, ok := c.(*net.TCPConn); ok && err == nil {
		err = tcp.CloseWrite()
	}
	if err != nil {
		return "", err
	}
	got, err := io.ReadAll(c)
	if err == nil && len(got) == 0 {
		err = errors.New("it was closed")
	}
	return string(got), err
}

// finding is what netprobe escape says.
type finding struct {
	Interfaces, Routes, NetworkDevices, Reached, Tried []string
}

// escape has the probe try every way out to servers of the host.
func (r *running) escape(t testing.TB, servers ...*counted) finding {
	t.Helper()
	args := []string{"escape"}
	for _, s := range servers {
		args = append(args, s.Addr().String())
		args = append(args, at(gateway, s))
	}
	for _, ip := range ownAddresses() {
		args = append(args, at(ip, servers[0]))
	}
	var f finding
	r.probe(t, &f, args...)
	t.Logf("%d ways out were tried", len(f.Tried))
	if len(f.Tried) < 100 {
		t.Errorf("only %q were tried", f.Tried)
	}
	for _, s := range servers {
		if n := s.came.Load(); n != 0 {
			t.Errorf("%d connections came to %v", n, s.Addr())
		}
	}
	return f
}

// ownAddresses are the host's.
func ownAddresses() []string {
	var out []string
	addresses, _ := net.InterfaceAddrs() // none is as good
	for _, a := range addresses {
		if prefix, ok := a.(*net.IPNet); ok && !prefix.IP.IsLoopback() && !prefix.IP.IsLinkLocalUnicast() {
			out = append(out, prefix.IP.String())
		}
	}
	return out
}

// Without a network there is none: no interface, no route, no names, and no trick
// by which a guest gets at anything.
func testNoNetwork(t *testing.T, e *Env) {
	server := serverOn(t, "0.0.0.0:0")
	r := e.launchWithProbe(t, nil)
	f := r.escape(t, server)
	if len(f.Interfaces)+len(f.Routes)+len(f.NetworkDevices)+len(f.Reached) > 0 {
		t.Errorf("interfaces %q, routes %q, devices %q; reached %q", f.Interfaces, f.Routes, f.NetworkDevices, f.Reached)
	}
	if got := r.exec(t, Shell("ping -c 1 127.0.0.1 && cat /etc/resolv.conf"), nil); got.ExitCode != 0 || strings.Contains(got.stdout, "nameserver") {
		t.Errorf("loopback and names: %d %q %q", got.ExitCode, got.stdout, got.stderr)
	}
	if stats, err := r.machine.Stats(e.Context(t)); err != nil || stats.Network != nil {
		t.Errorf("the shim has a gateway: %+v, %v", stats.Network, err)
	}
	// Nor does a server of the guest become one of the host.
	listens := newGate()
	close(listens.open)
	ctx, cancel := context.WithCancel(e.Context(t))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = r.machine.Guest().Exec(ctx, guest.Command{Argv: []string{probePath, "echo", fmt.Sprint(guestPort), "1"}}, guest.IO{Stdout: listens})
	}()
	e.Await(t, listens.arrived, "the guest's server")
	if text, err := exchange(fmt.Sprintf("127.0.0.1:%d", guestPort)); err == nil {
		t.Errorf("the host has the guest's port: %q came back", text)
	}
	cancel()
	<-ended
}

// A restricted guest reaches what its policy names, and nothing by a trick.
func testRestricted(t *testing.T, e *Env) {
	server, opened := serverOn(t, "0.0.0.0:0"), serverOn(t, "127.0.0.1:0")
	r := e.launchWithProbe(t, &vm.Network{Policy: egress.Policy{
		Mode: egress.Restricted, Allow: []egress.Rule{{CIDR: "203.0.113.0/24"}, {Name: "*.allowed.invalid", Ports: []string{"443"}}},
		HostPorts: []uint16{opened.port()},
	}})
	f := r.escape(t, server)
	// The gateway itself answers. That a packet could be sent says nothing yet.
	answers := []string{
		"ping " + gateway, "udp " + gateway + ":53", "tcp " + gateway + ":53",
		"udp [fd9c:3f1e:7a52::1]:53", "tcp [fd9c:3f1e:7a52::1]:53",
		"lookup " + bootspec.HostAlias, "a raw frame on every device", "a raw packet with a foreign source",
	}
	for _, try := range f.Reached {
		if !slices.Contains(answers, try) {
			t.Errorf("reached: %s", try)
		}
	}
	if !slices.Contains(f.Reached, answers[0]) {
		t.Errorf("not even the gateway was reached: %q", f.Reached)
	}
	var out any
	r.probe(t, &out, "rtt", at(gateway, opened), "10")
	for _, name := range []string{"example.com", "allowed.invalid", "x.allowed.invalid.example"} {
		if got := r.exec(t, Shell("nslookup "+name), nil); got.ExitCode == 0 || !strings.Contains(got.stdout+got.stderr, "NXDOMAIN") {
			t.Errorf("%s: %d %q %q", name, got.ExitCode, got.stdout, got.stderr)
		}
		if got := r.exec(t, Shell("nslookup "+name+" 8.8.8.8"), nil); got.ExitCode == 0 {
			t.Errorf("another name server answered: %q", got.stdout)
		}
	}
	stats, err := r.machine.Stats(e.Context(t))
	if err != nil || stats.Network.Denied == 0 {
		t.Errorf("nothing was denied: %+v, %v", stats.Network, err)
	}
}
