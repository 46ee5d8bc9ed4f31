package shim_test

import (
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	shimv1 "github.com/iii-hq/workers/sandbox-libkrun/api/shim/v1"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/egress"
)

func networkedVM(t *testing.T, publish ...bootspec.PublishedPort) *vm {
	t.Helper()
	v := newVM(t)
	v.spec.Network = &bootspec.Network{Policy: egress.Policy{Mode: egress.Open}, Publish: publish}
	v.spec.Guest.Interface = bootspec.NewInterface(bootspec.DefaultMTU, false)
	return v
}

func TestNetwork(t *testing.T) {
	t.Parallel()
	v := networkedVM(t, bootspec.PublishedPort{Guest: 80}).start()
	status := v.until("it runs", running)
	if len(status.GetPublished()) != 1 || status.GetPublished()[0].GetHost() == 0 || status.GetPublished()[0].GetGuest() != 80 {
		t.Fatalf("published: %v", status.GetPublished())
	}
	if got := v.machine.guestSpec().Interface; got == nil || got.MAC != v.spec.Guest.Interface.MAC {
		t.Errorf("the guest was told of %+v", got)
	}
	stats, err := v.control().Stats(v.context(), &shimv1.StatsRequest{})
	if err != nil || stats.GetNetwork() == nil {
		t.Errorf("the gateway's counts: %v, %v", stats, err)
	}
	address := fmt.Sprintf("127.0.0.1:%d", status.GetPublished()[0].GetHost())
	c, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
	v.machine.powerOff(bootspec.End{Class: bootspec.EndGuest})
	v.expectEnd(bootspec.EndGuest, "")
	if c, err := net.Dial("tcp", address); err == nil {
		_ = c.Close()
		t.Error("the port outlived its VM")
	}
}

// A VM has no gateway that did not ask for one, nor a file for it.
func TestNoNetwork(t *testing.T) {
	t.Parallel()
	v := newVM(t).start()
	status := v.until("it runs", running)
	stats, err := v.control().Stats(v.context(), &shimv1.StatsRequest{})
	if err != nil || stats.GetNetwork() != nil || len(status.GetPublished()) > 0 || v.machine.dev.Network != nil {
		t.Errorf("stats %v, %v; status %v; file %v", stats, err, status, v.machine.dev.Network)
	}
}

// A port that is taken refuses the VM before anything is started.
func TestNetwork_PortIsTaken(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() //nolint:errcheck // a test
	address, _ := l.Addr().(*net.TCPAddr)
	v := networkedVM(t, bootspec.PublishedPort{Guest: 81}, bootspec.PublishedPort{Host: uint16(address.Port), Guest: 80}).start()
	v.expectEnd(bootspec.EndRefused, "publish another port")
	if !strings.Contains(v.end.Message, l.Addr().String()) || v.machine.ran() {
		t.Errorf("the end is %v; a machine ran: %v", v.end, v.machine.ran())
	}
}

// When the gateway ends, the guest has a dead device, and lives on.
func TestNetwork_EndOfTheGatewayIsNotTheVMs(t *testing.T) {
	t.Parallel()
	v := networkedVM(t).start()
	v.until("it runs", running)
	if err := v.machine.dev.Network.Close(); err != nil {
		t.Fatal(err)
	}
	deadline := time.After(patience)
	for !strings.Contains(v.log.String(), "gateway ended before the VM") {
		select {
		case <-time.After(5 * time.Millisecond):
		case <-deadline:
			t.Fatalf("the log is %s", v.log.String())
		}
	}
	v.until("it still runs", running)
	if _, err := v.control().Stats(v.context(), &shimv1.StatsRequest{}); err != nil {
		t.Error(err)
	}
	v.machine.powerOff(bootspec.End{Class: bootspec.EndGuest})
	v.expectEnd(bootspec.EndGuest, "")
}
