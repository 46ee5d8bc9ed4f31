package boot

import (
	"context"
	"fmt"
	"net"
	"os"
	"runtime"
	"strings"
	"testing"

	"github.com/jsimonetti/rtnetlink/v2"
	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
)

// inNewNetwork runs a test in a network namespace of its own, in which there is
// one device with that hardware address.
func inNewNetwork(t *testing.T, mac string, test func(*rtnetlink.Conn)) {
	t.Helper()
	skipped := make(chan string)
	go func() {
		defer close(skipped)
		// Never unlocked: the thread ends with the goroutine, and the namespace with it.
		runtime.LockOSThread()
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			skipped <- fmt.Sprintf("a network namespace cannot be made (needs root): %v", err)
			return
		}
		conn, err := rtnetlink.Dial(nil)
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close() //nolint:errcheck // a test
		address, err := net.ParseMAC(mac)
		if err != nil {
			t.Error(err)
			return
		}
		err = conn.Link.New(&rtnetlink.LinkMessage{Attributes: &rtnetlink.LinkAttributes{
			Name: "nic", Address: address, Info: &rtnetlink.LinkInfo{Kind: "dummy"},
		}})
		if err != nil {
			skipped <- fmt.Sprintf("this kernel has no dummy network devices: %v", err)
			return
		}
		test(conn)
	}()
	if reason, ok := <-skipped; ok {
		t.Skip("SKIPPED: " + reason)
	}
}

func TestConfigureInterface(t *testing.T) {
	t.Parallel()
	spec := bootspec.NewInterface(9000, false)
	inNewNetwork(t, spec.MAC, func(conn *rtnetlink.Conn) {
		if err := configureInterface(t.Context(), spec); err != nil {
			t.Error(err)
			return
		}
		link, err := net.InterfaceByName("nic")
		if err != nil || link.MTU != 9000 || link.Flags&net.FlagUp == 0 {
			t.Errorf("the interface is %+v, %v", link, err)
		}
		addresses, err := conn.Address.List()
		if err != nil {
			t.Error(err)
		}
		var got []string
		for _, a := range addresses {
			// Usable at once: neither tentative nor waiting for anybody.
			if a.Attributes.Flags&unix.IFA_F_TENTATIVE != 0 {
				t.Errorf("%v is tentative", a.Attributes.Address)
			}
			got = append(got, fmt.Sprintf("%v/%d", a.Attributes.Address, a.PrefixLength))
		}
		want := []string{"198.18.0.2/30"}
		if hasIPv6("/proc/sys") {
			want = append(want, "fd9c:3f1e:7a52::2/64")
		}
		if strings.Join(got, " ") != strings.Join(want, " ") {
			t.Errorf("addresses are %v, want %v alone", got, want)
		}
		routes, err := conn.Route.List()
		if err != nil {
			t.Error(err)
		}
		var gateways []string
		for _, r := range routes {
			if r.DstLength == 0 && r.Attributes.Gateway != nil && r.Type == unix.RTN_UNICAST {
				gateways = append(gateways, r.Attributes.Gateway.String())
			}
		}
		if len(gateways) != len(want) || gateways[0] != "198.18.0.1" {
			t.Errorf("gateways are %v", gateways)
		}
	})
}

func TestConfigureInterface_SaysWhatIsMissing(t *testing.T) {
	t.Parallel()
	inNewNetwork(t, "5a:94:ef:18:00:03", func(*rtnetlink.Conn) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		err := configureInterface(ctx, bootspec.NewInterface(1500, false))
		if err == nil || !strings.Contains(err.Error(), "5a:94:ef:18:00:02") || !strings.Contains(err.Error(), "network device") {
			t.Errorf("error is %v", err)
		}
	})
}

func TestDropSpare(t *testing.T) {
	t.Parallel()
	inNewNetwork(t, "5a:94:ef:18:00:03", func(*rtnetlink.Conn) {
		// What /sys shows is another namespace's.
		sys := t.TempDir()
		for _, name := range []string{"lo", "nic"} {
			if err := os.Mkdir(sys+"/"+name, 0o755); err != nil {
				t.Error(err)
			}
		}
		names := func() (out []string) {
			links, err := net.Interfaces()
			if err != nil {
				t.Error(err)
			}
			for _, l := range links {
				out = append(out, l.Name)
			}
			return out
		}
		if err := dropSpare(sys, 2); err != nil || len(names()) != 2 {
			t.Errorf("there are as many as wanted, and left are %v, %v", names(), err)
		}
		if err := dropSpare(sys, 1); err != nil || len(names()) != 1 || names()[0] != "lo" {
			t.Errorf("left are %v, %v", names(), err)
		}
	})
}

func TestHasIPv6(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if hasIPv6(dir) {
		t.Error("a kernel without IPv6 has it")
	}
	if err := os.MkdirAll(dir+"/net/ipv6/conf", 0o755); err != nil {
		t.Fatal(err)
	}
	if !hasIPv6(dir) {
		t.Error("a kernel with IPv6 has none")
	}
}
