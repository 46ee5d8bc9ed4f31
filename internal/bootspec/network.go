package bootspec

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/egress"
)

// HostAlias is the guest's name for its host, where the policy opens ports of it.
const HostAlias = "host.iii.internal"

// The least and the most that an MTU may be, in bytes: what IPv6 asks for
// (RFC 8200, 5), and what leaves a frame below 64 KiB with all headers.
const (
	MinMTU = 1280
	MaxMTU = 65520
)

// The hardware addresses on every VM's link: the guest's and the gateway's. They
// are the same for all VMs, each of which is alone with its gateway: so a saved
// guest fits them all.
const (
	guestMAC   = "5a:94:ef:18:00:02"
	GatewayMAC = "5a:94:ef:18:00:01"
)

// DefaultMTU is that of Ethernet, which every VMM's device bears.
const DefaultMTU = 1500

// maxPublished bounds the ports of one VM: each costs the shim a listener.
const maxPublished = 64

// Network is what lies behind a guest's interface: the shim's gateway. Its
// addresses are in Guest.Interface, which is set with it.
type Network struct {
	// Policy says which packets of the guest leave the host.
	Policy egress.Policy `json:"policy"`
	// Publish are ports of the host that lead into the guest.
	Publish []PublishedPort `json:"publish,omitempty"`
}

// PublishedPort is a TCP port of the host's loopback address 127.0.0.1 that leads
// to a port of the guest.
type PublishedPort struct {
	// Host is 0 to have one chosen that is free.
	Host  uint16 `json:"host"`
	Guest uint16 `json:"guest"`
}

// Interface is the guest's network interface. All of it is fixed before the
// guest boots: nothing is negotiated.
type Interface struct {
	// MAC is the interface's hardware address.
	MAC string `json:"mac"`
	// Addresses are the guest's, Gateways the next hops of its default routes: at
	// most one of each family, and each gateway in the network of an address.
	Addresses []netip.Prefix `json:"addresses"`
	Gateways  []netip.Addr   `json:"gateways"`
	// MTU of the interface, in bytes.
	MTU int `json:"mtu"`
	// NameServers go into /etc/resolv.conf.
	NameServers []netip.Addr `json:"name_servers"`
	// HostAlias makes the gateways' addresses known under the name HostAlias.
	HostAlias bool `json:"host_alias,omitempty"`
}

// NewInterface is the interface of every VM with a network: a network of two
// addresses for IPv4, of the block for tests between networks (RFC 2544), which
// nobody else routes, and a unique local one for IPv6 (RFC 4193), which programs
// take only where they find no IPv4 address.
func NewInterface(mtu int, hostAlias bool) *Interface {
	gateway4 := netip.AddrFrom4([4]byte{198, 18, 0, 1})
	gateway6 := netip.AddrFrom16([16]byte{0xfd, 0x9c, 0x3f, 0x1e, 0x7a, 0x52, 15: 1})
	return &Interface{
		MAC:         guestMAC,
		Addresses:   []netip.Prefix{netip.PrefixFrom(gateway4.Next(), 30), netip.PrefixFrom(gateway6.Next(), 64)},
		Gateways:    []netip.Addr{gateway4, gateway6},
		MTU:         mtu,
		NameServers: []netip.Addr{gateway4},
		HostAlias:   hostAlias,
	}
}

// Validate names every fault of the gateway's part.
func (n *Network) Validate() error {
	var errs []error
	if err := n.Policy.Validate(); err != nil {
		errs = append(errs, fmt.Errorf("policy: %w", err))
	}
	if n.Policy.Mode == egress.Off {
		errs = append(errs, errors.New("policy: mode is off: leave the network out instead"))
	}
	if len(n.Publish) > maxPublished {
		errs = append(errs, fmt.Errorf("publish has %d ports, more than %d", len(n.Publish), maxPublished))
	}
	hosts := map[uint16]bool{}
	for i, p := range n.Publish {
		switch {
		case p.Guest == 0:
			errs = append(errs, fmt.Errorf("publish[%d].guest is 0, not a port", i))
		case p.Host != 0 && hosts[p.Host]:
			errs = append(errs, fmt.Errorf("publish[%d].host: port %d is published twice", i, p.Host))
		}
		hosts[p.Host] = true
	}
	return errors.Join(errs...)
}

// Validate names every fault of the interface.
func (n *Interface) Validate() error {
	var errs []error
	if mac, err := net.ParseMAC(n.MAC); err != nil || len(mac) != 6 || mac[0]&1 != 0 || mac.String() != n.MAC {
		errs = append(errs, fmt.Errorf("mac is %q, not the address of one Ethernet device in lower case", n.MAC))
	}
	if n.MTU < MinMTU || n.MTU > MaxMTU {
		errs = append(errs, fmt.Errorf("mtu is %d, not %d to %d", n.MTU, MinMTU, MaxMTU))
	}
	if len(n.Addresses) == 0 || len(n.Gateways) != len(n.Addresses) {
		errs = append(errs, fmt.Errorf("there are %d addresses and %d gateways: want one of each for IPv4, IPv6 or both", len(n.Addresses), len(n.Gateways)))
	}
	for i, prefix := range n.Addresses {
		if !prefix.IsValid() || !usable(prefix.Addr()) {
			errs = append(errs, fmt.Errorf("addresses[%d] is %v, not the address and network of one host", i, prefix))
		}
		if !slices.ContainsFunc(n.Gateways, func(g netip.Addr) bool { return prefix.Contains(g) && g != prefix.Addr() }) {
			errs = append(errs, fmt.Errorf("addresses[%d] is %v, which no gateway is a neighbour of", i, prefix))
		}
		if slices.ContainsFunc(n.Addresses[:i], func(other netip.Prefix) bool { return other.Addr().Is4() == prefix.Addr().Is4() }) {
			errs = append(errs, fmt.Errorf("addresses[%d] is the second one of its family", i))
		}
	}
	for i, server := range n.NameServers {
		if !usable(server) {
			errs = append(errs, fmt.Errorf("name_servers[%d] is %v, not the address of one host", i, server))
		}
	}
	return errors.Join(errs...)
}

func usable(ip netip.Addr) bool {
	return ip.IsValid() && !ip.IsUnspecified() && !ip.IsMulticast() && !ip.IsLoopback() && !ip.Is4In6() && ip.Zone() == ""
}

// HardwareAddr is MAC in bytes; Validate has checked it.
func (n *Interface) HardwareAddr() [6]byte {
	var out [6]byte
	mac, _ := net.ParseMAC(n.MAC)
	copy(out[:], mac)
	return out
}
