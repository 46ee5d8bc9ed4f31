package netstack

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/egress"
)

// Framing is how Ethernet frames lie on a link.
type Framing int

// The framings.
const (
	// Stream has the length of each frame, 4 bytes big endian, in front of it:
	// QEMU's -netdev stream and libkrun's unixstream.
	Stream Framing = iota
	// Datagram has one frame in each datagram: libkrun's unixgram.
	Datagram
)

// MTUs, in bytes of an IP packet.
const (
	// MinMTU is what IPv6 asks for at least.
	MinMTU = 1280
	// SafeMTU is what every VMM and guest bears.
	SafeMTU = 1500
	// MaxMTU is the largest that leaves the frame below 64 KiB with all headers.
	// QEMU bears it with host_mtu, and is then more than twice as fast.
	MaxMTU = 65520
)

// HostName is the name that the gateway's DNS answers with its own addresses when
// the policy opens ports of the host.
const HostName = "host.iii.internal"

// Options describe the network of one VM.
type Options struct {
	// ID names the VM in log records.
	ID string
	// Link carries the guest's frames. The gateway owns it and closes it.
	Link    net.Conn
	Framing Framing
	// MTU is the same on both ends, from MinMTU to MaxMTU.
	MTU int

	// GuestMAC and GatewayMAC are 6 bytes each; frames from others are dropped.
	GuestMAC   net.HardwareAddr
	GatewayMAC net.HardwareAddr
	// Guest4 and Guest6 are the guest's static addresses with the prefix of the
	// VM's own network, Gateway4 and Gateway6 the gateway's in the same networks.
	// IPv6 may be left out.
	Guest4, Guest6     netip.Prefix
	Gateway4, Gateway6 netip.Addr

	// Policy is what the guest reaches; not egress.Off, which needs no gateway.
	Policy egress.Policy

	// ResolvConf is the file that names the host's resolvers, read anew whenever
	// it changed; empty means /etc/resolv.conf.
	ResolvConf string
	// Dial opens the host's side of each flow, "tcp" or "udp" to an address and
	// port without names; nil means a net.Dialer.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// HostAddrs lists the host's own addresses with their networks; nil means
	// those of its interfaces. It is asked again when the answer is older than a
	// second.
	HostAddrs func() ([]netip.Prefix, error)

	Log *slog.Logger
}

func (o Options) validate() error {
	switch {
	case o.Link == nil:
		return errors.New("link is missing")
	case o.Framing != Stream && o.Framing != Datagram:
		return fmt.Errorf("framing %d is unknown", o.Framing)
	case o.MTU < MinMTU || o.MTU > MaxMTU:
		return fmt.Errorf("MTU %d is not from %d to %d", o.MTU, MinMTU, MaxMTU)
	case len(o.GuestMAC) != 6 || len(o.GatewayMAC) != 6 || string(o.GuestMAC) == string(o.GatewayMAC):
		return fmt.Errorf("MAC addresses %s and %s are not two different ones of 6 bytes", o.GuestMAC, o.GatewayMAC)
	case !o.Guest4.Addr().Is4() || !o.Gateway4.Is4() || !sameNetwork(o.Guest4, o.Gateway4):
		return fmt.Errorf("IPv4 guest %s and gateway %s are not two addresses of one network", o.Guest4, o.Gateway4)
	case (o.Guest6.IsValid() || o.Gateway6.IsValid()) && (!o.Guest6.Addr().Is6() || !o.Gateway6.Is6() || !sameNetwork(o.Guest6, o.Gateway6)):
		return fmt.Errorf("IPv6 guest %s and gateway %s are not two addresses of one network", o.Guest6, o.Gateway6)
	case o.Policy.Mode == egress.Off:
		return errors.New("policy is off: a VM without a network has no gateway")
	case o.Log == nil:
		return errors.New("log is missing")
	}
	return nil
}

func sameNetwork(guest netip.Prefix, gateway netip.Addr) bool {
	return guest.Contains(gateway) && guest.Addr() != gateway
}
