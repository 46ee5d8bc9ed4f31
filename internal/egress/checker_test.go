package egress_test

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/egress"
)

func checker(t testing.TB, policy egress.Policy) *egress.Checker {
	t.Helper()
	c, err := egress.New(policy)
	if err != nil {
		t.Fatal(err)
	}
	c.SetHost([]netip.Prefix{
		netip.MustParsePrefix("127.0.0.1/8"), netip.MustParsePrefix("10.1.2.3/24"), netip.MustParsePrefix("172.17.0.1/16"),
		netip.MustParsePrefix("2001:db8:1::5/64"), netip.MustParsePrefix("fe80::5/64"), netip.MustParsePrefix("10.9.9.9/31"),
	})
	return c
}

// reason asks for "tcp 1.2.3.4:80"; empty means allowed.
func reason(t testing.TB, c *egress.Checker, question string) egress.Reason {
	t.Helper()
	proto, addr, _ := strings.Cut(question, " ")
	err := c.Allow(egress.Protocol(proto), netip.MustParseAddrPort(addr))
	var denial *egress.Denial
	switch {
	case err == nil:
		return ""
	case errors.As(err, &denial):
		return denial.Reason
	}
	t.Fatalf("%s: error is %v", question, err)
	return ""
}

func TestAlwaysDenied(t *testing.T) {
	t.Parallel()
	always := map[string]egress.Reason{
		"127.0.0.1": egress.HostLoopback, "127.255.255.254": egress.HostLoopback, "::1": egress.HostLoopback,
		"0.0.0.0": egress.Unspecified, "0.0.0.1": egress.Unspecified, "::": egress.Unspecified, "240.0.0.1": egress.Unspecified,
		"10.1.2.3": egress.HostAddress, "172.17.0.1": egress.HostAddress, "2001:db8:1::5": egress.HostAddress,
		"2001:db8:1::": egress.HostAddress, // where the host is a router
		"10.9.9.9":     egress.HostAddress,
		"10.1.2.255":   egress.Broadcast, "10.1.2.0": egress.Broadcast, "172.17.255.255": egress.Broadcast, "255.255.255.255": egress.Broadcast,
		"169.254.169.254": egress.LinkLocal, "169.254.0.0": egress.LinkLocal, "fe80::1": egress.LinkLocal, "febf::1": egress.LinkLocal,
		"fd00:ec2::254": egress.Metadata, "100.100.100.200": egress.Metadata, "168.63.129.16": egress.Metadata, "192.0.0.192": egress.Metadata, "fd00:42::42": egress.Metadata,
		"224.0.0.1": egress.Multicast, "239.255.255.255": egress.Multicast, "ff02::1": egress.Multicast, "ff0e::1": egress.Multicast,

		"::ffff:127.0.0.1": egress.HostLoopback, "::ffff:10.1.2.3": egress.HostAddress, "::ffff:169.254.169.254": egress.LinkLocal,
		"::127.0.0.1": egress.HostLoopback, "::10.1.2.3": egress.HostAddress, "::ffff:0:10.1.2.3": egress.HostAddress,
		"64:ff9b::169.254.169.254": egress.LinkLocal, "64:ff9b::10.1.2.3": egress.HostAddress, "64:ff9b::0.0.0.0": egress.Unspecified,
		"64:ff9b:1::169.254.169.254": egress.LinkLocal, "64:ff9b:1:a9fe:a9:fe00::": egress.LinkLocal,
		"2002:7f00:1::": egress.HostLoopback, "2002:a01:203::1": egress.HostAddress, "2002:e000:1::": egress.Multicast,
		"2001:0:7f00:1::": egress.HostLoopback, "2001:0:808:808:0:0:5601:5601": egress.LinkLocal, // of client 169.254.169.254
		"2001:db8::5efe:a9fe:a9fe": egress.LinkLocal, "2001:db8::200:5efe:a01:203": egress.HostAddress,
	}
	for name, policy := range map[string]egress.Policy{
		"open":       {Mode: egress.Open},
		"restricted": {Mode: egress.Restricted, Allow: []egress.Rule{{CIDR: "0.0.0.0/0"}, {CIDR: "::/0"}}},
	} {
		c := checker(t, policy)
		for addr, want := range always {
			for _, proto := range []string{"tcp", "udp"} {
				question := fmt.Sprintf("%s %s", proto, netip.AddrPortFrom(netip.MustParseAddr(addr), 80))
				if got := reason(t, c, question); got != want {
					t.Errorf("%s: %s is %q, want %q", name, question, got, want)
				}
			}
		}
		for _, addr := range []string{
			"8.8.8.8", "10.1.2.4", "192.168.1.1", "100.64.0.1", "10.9.9.8", "172.17.0.2", "2606:4700::1111", "fd12::1",
			"::ffff:8.8.8.8", "64:ff9b::8.8.8.8", "64:ff9b:1::8.8.8.8", "2002:808:808::1", "2001:0:808:808:0:0:f7f7:f7f7", "2001:db8:2::5",
		} {
			question := "tcp " + netip.AddrPortFrom(netip.MustParseAddr(addr), 443).String()
			if got := reason(t, c, question); got != "" {
				t.Errorf("%s: %s is denied: %s", name, question, got)
			}
		}
		if got := reason(t, c, "tcp 8.8.8.8:0"); got != egress.Unspecified {
			t.Errorf("port 0 is %q", got)
		}
	}
}

func TestOff(t *testing.T) {
	t.Parallel()
	c := checker(t, egress.Policy{Mode: egress.Off})
	if got := reason(t, c, "tcp 8.8.8.8:443"); got != egress.NoNetwork {
		t.Errorf("reason is %q", got)
	}
	if c.AllowName("example.com") == nil {
		t.Error("a name is allowed")
	}
}

func TestRules(t *testing.T) {
	t.Parallel()
	c := checker(t, egress.Policy{Mode: egress.Restricted, Allow: []egress.Rule{
		{CIDR: "203.0.113.0/24", Ports: []string{"443", "8000-8100"}, Protocol: egress.TCP},
		{CIDR: "198.51.100.7"},
		{CIDR: "2001:db8:2::/48", Protocol: egress.UDP},
		{CIDR: "10.0.0.0/8", Ports: []string{"22"}},
	}})
	for question, allowed := range map[string]bool{
		"tcp 203.0.113.9:443": true, "tcp 203.0.113.9:8000": true, "tcp 203.0.113.9:8100": true, "tcp 203.0.113.9:8101": false,
		"tcp 203.0.113.9:80": false, "udp 203.0.113.9:443": false, "tcp 203.0.114.0:443": false,
		"tcp 198.51.100.7:1": true, "udp 198.51.100.7:65535": true, "tcp 198.51.100.8:1": false,
		"udp [2001:db8:2::1]:53": true, "tcp [2001:db8:2::1]:53": false,
		"tcp [::ffff:203.0.113.9]:443": true, "tcp [::ffff:203.0.113.9]:80": false,
		"tcp [64:ff9b::cb00:7109]:443": true, "tcp [2002:cb00:7109::1]:443": true, "tcp [2002:cb00:7209::1]:443": false,
		// Teredo reaches itself, its server and its client: all three have to be allowed.
		"tcp [2001:0:cb00:7109:0:0:34ff:8ef6]:443": false,
		"tcp 10.1.2.4:22":                          true, "tcp 10.1.2.3:22": false, "tcp 10.1.2.255:22": false,
		"udp 8.8.8.8:53": false, "tcp 8.8.8.8:53": false, "tcp 1.1.1.1:853": false,
	} {
		if got := reason(t, c, question); (got == "") != allowed {
			t.Errorf("%s is %q", question, got)
		}
	}
}

func TestNames(t *testing.T) {
	t.Parallel()
	c := checker(t, egress.Policy{Mode: egress.Restricted, Allow: []egress.Rule{
		{Name: "example.com", Ports: []string{"443"}},
		{Name: "*.example.org"},
	}, Extra: []egress.Endpoint{{Host: "engine.test", Port: 49134}}})
	for name, allowed := range map[string]bool{
		"example.com": true, "EXAMPLE.com.": true, "www.example.com": false, "badexample.com": false, "example.com.evil.net": false,
		"a.example.org": true, "a.b.C.example.org": true, "example.org": false, ".example.org": false, "badexample.org": false,
		"engine.test": true, "x.engine.test": false, "": false, ".": false,
		"example.com..": false, "example\u212a.com": false, "example.c\u014dm": false,
	} {
		if got := c.AllowName(name) == nil; got != allowed {
			t.Errorf("%q is allowed: %t", name, got)
		}
	}
	// U+212A, the sign of kelvin, is no k, though its lower case is.
	k := checker(t, egress.Policy{Mode: egress.Restricted, Allow: []egress.Rule{{Name: "k.test"}}})
	if k.AllowName("\u212a.test") == nil {
		t.Error("the sign of kelvin is taken for a k")
	}

	addr := netip.MustParseAddr("203.0.113.9")
	if got := reason(t, c, "tcp 203.0.113.9:443"); got != egress.NotAllowed {
		t.Errorf("before any answer: %q", got)
	}
	c.Learn("evil.net", []netip.Addr{addr}, time.Hour)
	if got := reason(t, c, "tcp 203.0.113.9:443"); got != egress.NotAllowed {
		t.Errorf("after an answer for another name: %q", got)
	}
	c.Learn("Example.com.", []netip.Addr{addr}, time.Hour)
	if got := reason(t, c, "tcp 203.0.113.9:443"); got != "" {
		t.Errorf("after the answer: %q", got)
	}
	if got := reason(t, c, "tcp [::ffff:203.0.113.9]:443"); got != "" {
		t.Errorf("mapped: %q", got)
	}
	for _, question := range []string{"tcp 203.0.113.9:80", "tcp 203.0.113.8:443"} {
		if got := reason(t, c, question); got != egress.NotAllowed {
			t.Errorf("%s: %q", question, got)
		}
	}
	// An answer opens nothing that is always denied.
	c.Learn("a.example.org", []netip.Addr{
		netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("169.254.169.254"), netip.MustParseAddr("10.1.2.3"), netip.MustParseAddr("::ffff:127.0.0.1"),
	}, time.Hour)
	for _, question := range []string{"tcp 127.0.0.1:80", "tcp 169.254.169.254:80", "udp 10.1.2.3:80", "tcp 10.1.2.3:80", "tcp [::ffff:127.0.0.1]:80"} {
		if got := reason(t, c, question); got == "" {
			t.Errorf("%s is allowed by an answer", question)
		}
	}
}

func TestAnswersEnd(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := checker(t, egress.Policy{Mode: egress.Restricted, Allow: []egress.Rule{{Name: "*.example.com"}}})
		first, second := netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("192.168.7.7")
		c.Learn("a.example.com", []netip.Addr{first}, 0)
		time.Sleep(egress.MinPin - time.Second) //nolint:forbidigo // of the bubble's time
		if got := reason(t, c, "tcp 203.0.113.1:80"); got != "" {
			t.Errorf("within the least time: %q", got)
		}
		time.Sleep(2 * time.Second) //nolint:forbidigo // of the bubble's time
		if got := reason(t, c, "tcp 203.0.113.1:80"); got != egress.NotAllowed {
			t.Errorf("after its time: %q", got)
		}
		// The name means another address now; the first is not reachable any more,
		// however often the second is asked for.
		c.Learn("a.example.com", []netip.Addr{second}, 5*time.Minute)
		if got := reason(t, c, "tcp 203.0.113.1:80"); got != egress.NotAllowed {
			t.Errorf("the old address: %q", got)
		}
		if got := reason(t, c, "tcp 192.168.7.7:80"); got != "" {
			t.Errorf("the new address: %q", got)
		}
		time.Sleep(5*time.Minute + time.Second) //nolint:forbidigo // of the bubble's time
		if got := reason(t, c, "tcp 192.168.7.7:80"); got != egress.NotAllowed {
			t.Errorf("the new address after its time: %q", got)
		}
		// A week is an hour.
		c.Learn("a.example.com", []netip.Addr{first}, 7*24*time.Hour)
		time.Sleep(egress.MaxPin + time.Second) //nolint:forbidigo // of the bubble's time
		if got := reason(t, c, "tcp 203.0.113.1:80"); got != egress.NotAllowed {
			t.Errorf("after an hour: %q", got)
		}
		// A shorter answer takes nothing from a longer one.
		c.Learn("a.example.com", []netip.Addr{first}, 30*time.Minute)
		c.Learn("a.example.com", []netip.Addr{first}, 0)
		time.Sleep(20 * time.Minute) //nolint:forbidigo // of the bubble's time
		if got := reason(t, c, "tcp 203.0.113.1:80"); got != "" {
			t.Errorf("within the longer answer: %q", got)
		}
	})
}

func TestAnswersAreBounded(t *testing.T) {
	t.Parallel()
	c := checker(t, egress.Policy{Mode: egress.Restricted, Allow: []egress.Rule{{Name: "*.example.com"}}})
	nth := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{11, byte(i >> 16), byte(i >> 8), byte(i)}) }
	const many = 2 * egress.MaxPins
	for i := range many {
		c.Learn(fmt.Sprintf("n%d.example.com", i), []netip.Addr{nth(i)}, time.Minute)
	}
	open := 0
	for i := range many {
		if c.Allow(egress.TCP, netip.AddrPortFrom(nth(i), 80)) == nil {
			open++
		}
	}
	if open > egress.MaxPins || open < egress.MaxPins*7/8 {
		t.Errorf("%d addresses are open", open)
	}
	if c.Allow(egress.TCP, netip.AddrPortFrom(nth(many-1), 80)) != nil {
		t.Error("the last answer is forgotten")
	}
}

func TestOperatorsDestinations(t *testing.T) {
	t.Parallel()
	for _, mode := range []egress.Mode{egress.Open, egress.Restricted} {
		c := checker(t, egress.Policy{Mode: mode, Extra: []egress.Endpoint{{Host: "10.1.2.3", Port: 49134}, {Host: "engine.test", Port: 49135}}})
		if got := reason(t, c, "tcp 10.1.2.3:49134"); got != "" {
			t.Errorf("%s: the engine: %q", mode, got)
		}
		if !c.MayBeHost(egress.TCP, netip.MustParseAddrPort("10.1.2.3:49134")) || c.MayBeHost(egress.TCP, netip.MustParseAddrPort("10.1.2.3:49135")) {
			t.Errorf("%s: what may be the host is wrong", mode)
		}
		for _, question := range []string{"tcp 10.1.2.3:49135", "udp 10.1.2.3:49134", "tcp 172.17.0.1:49134"} {
			if got := reason(t, c, question); got != egress.HostAddress {
				t.Errorf("%s: %s: %q", mode, question, got)
			}
		}
		// A name may mean the host's address, but nothing stranger.
		c.Learn("engine.test", []netip.Addr{
			netip.MustParseAddr("172.17.0.1"), netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("169.254.169.254"), netip.MustParseAddr("10.1.2.255"),
		}, time.Hour)
		if got := reason(t, c, "tcp 172.17.0.1:49135"); got != "" {
			t.Errorf("%s: the engine by name: %q", mode, got)
		}
		for _, question := range []string{"tcp 172.17.0.1:80", "udp 172.17.0.1:49135", "tcp 127.0.0.1:49135", "tcp 169.254.169.254:49135", "tcp 10.1.2.255:49135"} {
			if got := reason(t, c, question); got == "" {
				t.Errorf("%s: %s is allowed", mode, question)
			}
		}
	}
}

func TestHostAddressesChange(t *testing.T) {
	t.Parallel()
	c := checker(t, egress.Policy{Mode: egress.Open})
	c.SetHost([]netip.Prefix{netip.MustParsePrefix("203.0.113.9/24")})
	if got := reason(t, c, "tcp 203.0.113.9:80"); got != egress.HostAddress {
		t.Errorf("the new address: %q", got)
	}
	if got := reason(t, c, "tcp 10.1.2.3:80"); got != "" {
		t.Errorf("the old address: %q", got)
	}
}

func TestConcurrentUse(t *testing.T) {
	t.Parallel()
	c := checker(t, egress.Policy{Mode: egress.Restricted, Allow: []egress.Rule{{Name: "*.example.com"}}})
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			for j := range 200 {
				addr := netip.AddrFrom4([4]byte{11, 0, byte(i), byte(j)})
				c.Learn("a.example.com", []netip.Addr{addr}, time.Minute)
				if err := c.Allow(egress.TCP, netip.AddrPortFrom(addr, 80)); err != nil {
					t.Error(err)
				}
				c.SetHost([]netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{12, 0, byte(i), byte(j)}), 24)})
			}
		})
	}
	all.Wait()
}

// Whatever the address, the two ways to write an IPv4 address are judged alike,
// and what is always denied is denied in an open policy too.
func FuzzAllow(f *testing.F) {
	f.Add([]byte{127, 0, 0, 1}, uint16(80))
	f.Add([]byte{0x64, 0xff, 0x9b, 0, 0, 0, 0, 0, 0, 0, 0, 0, 127, 0, 0, 1}[:16:16], uint16(80))
	c := checker(f, egress.Policy{Mode: egress.Open})
	f.Fuzz(func(t *testing.T, b []byte, port uint16) {
		addr, ok := netip.AddrFromSlice(b)
		if !ok {
			t.Skip("SKIPPED: not the length of an address")
		}
		err := c.Allow(egress.TCP, netip.AddrPortFrom(addr, port))
		mapped := netip.AddrFrom16(addr.As16())
		if errMapped := c.Allow(egress.TCP, netip.AddrPortFrom(mapped, port)); (err == nil) != (errMapped == nil) {
			t.Errorf("%s: %v, but %s: %v", addr, err, mapped, errMapped)
		}
		plain := addr.Unmap()
		if err == nil && (plain.IsLoopback() || plain.IsLinkLocalUnicast() || plain.IsMulticast() || plain.IsUnspecified()) {
			t.Errorf("%s is allowed", addr)
		}
	})
}
