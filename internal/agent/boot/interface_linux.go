package boot

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/jsimonetti/rtnetlink/v2"
	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
)

// configureInterface gives the guest's one network interface its addresses,
// which are known before the guest boots: nobody is asked, and nothing waited
// for but the device.
func configureInterface(ctx context.Context, spec *bootspec.Interface) error {
	conn, err := rtnetlink.Dial(nil)
	if err != nil {
		return err
	}
	defer conn.Close() //nolint:errcheck // nothing is under way
	link, err := findLink(ctx, conn, spec.MAC)
	if err != nil {
		return err
	}
	ipv6 := hasIPv6("/proc/sys")
	if ipv6 {
		if err := calmIPv6(filepath.Join("/proc/sys/net/ipv6/conf", link.Attributes.Name)); err != nil {
			return err
		}
	}
	up := &rtnetlink.LinkMessage{
		Index: link.Index, Flags: unix.IFF_UP, Change: unix.IFF_UP,
		Attributes: &rtnetlink.LinkAttributes{MTU: uint32(spec.MTU)},
	}
	if err := conn.Link.Set(up); err != nil {
		return fmt.Errorf("bring %s up with an MTU of %d: %w", link.Attributes.Name, spec.MTU, err)
	}
	for _, address := range spec.Addresses {
		if address.Addr().Is6() && !ipv6 {
			continue
		}
		if err := conn.Address.New(addressMessage(link.Index, address)); err != nil {
			return fmt.Errorf("address %v: %w", address, err)
		}
	}
	for _, gateway := range spec.Gateways {
		if gateway.Is6() && !ipv6 {
			continue
		}
		if err := conn.Route.Add(defaultRoute(link.Index, gateway)); err != nil {
			return fmt.Errorf("default route through %v: %w", gateway, err)
		}
	}
	return nil
}

// dropSpare removes the interfaces that a kernel makes by itself, as that of
// libkrunfw does (dummy0): programs take any for a network. wanted is how many
// there are without them; links are looked at only where there are more.
func dropSpare(sysNet string, wanted int) error {
	if len(entries(sysNet)) <= wanted {
		return nil
	}
	conn, err := rtnetlink.Dial(nil)
	if err != nil {
		return err
	}
	defer conn.Close() //nolint:errcheck // nothing is under way
	links, err := conn.Link.List()
	if err != nil {
		return err
	}
	var errs []error
	for _, l := range links {
		// Devices of the machine have no kind, and neither has lo.
		if l.Attributes == nil || l.Attributes.Info == nil || l.Attributes.Info.Kind == "" {
			continue
		}
		if err := conn.Link.Delete(l.Index); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", l.Attributes.Name, err))
		}
	}
	return errors.Join(errs...)
}

// findLink waits for the interface with that hardware address.
func findLink(ctx context.Context, conn *rtnetlink.Conn, mac string) (*rtnetlink.LinkMessage, error) {
	var found *rtnetlink.LinkMessage
	var failed error
	err := poll(ctx, deviceWait, func() bool {
		links, err := conn.Link.List()
		failed = err
		for i := range links {
			if a := links[i].Attributes; a != nil && a.Address.String() == mac {
				found = &links[i]
			}
		}
		return found != nil
	})
	switch {
	case failed != nil:
		return nil, failed
	case err != nil:
		return nil, fmt.Errorf("no interface has the address %s after %v: was a network device given to the VMM, and is virtio_net in /modules/order?", mac, deviceWait)
	}
	return found, nil
}

func hasIPv6(sysctls string) bool {
	_, err := os.Stat(filepath.Join(sysctls, "net/ipv6/conf"))
	return err == nil
}

// calmIPv6 keeps an interface's addresses to those that it is given, and makes
// them usable at once: nobody else is on the link to have them or to give more.
func calmIPv6(conf string) error {
	for name, value := range map[string]string{
		"accept_ra": "0", "autoconf": "0", "accept_dad": "0", "dad_transmits": "0",
		"addr_gen_mode": "1", // no link-local one
	} {
		if err := os.WriteFile(filepath.Join(conf, name), []byte(value), 0o644); err != nil {
			return err
		}
	}
	return nil
}

func addressMessage(index uint32, prefix netip.Prefix) *rtnetlink.AddressMessage {
	ip := net.IP(prefix.Addr().AsSlice())
	m := &rtnetlink.AddressMessage{
		Family: family(prefix.Addr()), PrefixLength: uint8(prefix.Bits()), Index: index,
		Attributes: &rtnetlink.AddressAttributes{Address: ip, Local: ip},
	}
	if prefix.Addr().Is6() {
		m.Attributes.Flags = unix.IFA_F_NODAD
	}
	return m
}

func defaultRoute(index uint32, gateway netip.Addr) *rtnetlink.RouteMessage {
	return &rtnetlink.RouteMessage{
		Family: family(gateway), Table: unix.RT_TABLE_MAIN, Protocol: unix.RTPROT_STATIC, Type: unix.RTN_UNICAST,
		Attributes: rtnetlink.RouteAttributes{Gateway: net.IP(gateway.AsSlice()), OutIface: index},
	}
}

func family(ip netip.Addr) uint8 {
	if ip.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}
