package netstack

import (
	"errors"
	"net/netip"
)

// Publish listens on a loopback address of the host, port 0 for any free one, and
// connects what it accepts to a TCP port of the guest, by IPv4. It returns the
// address that it listens on. Whether anything listens in the guest is found at
// each connection anew. Host addresses other than loopback are refused.
func (g *Gateway) Publish(host netip.AddrPort, guestPort uint16) (netip.AddrPort, error) {
	return netip.AddrPort{}, errors.ErrUnsupported
}

// Unpublish stops listening on an address that Publish returned and closes its
// connections. Unknown addresses are an error.
func (g *Gateway) Unpublish(host netip.AddrPort) error { return errors.ErrUnsupported }

// Published lists the published ports by host address.
func (g *Gateway) Published() []Forward { return nil }

// Stats returns the totals so far.
func (g *Gateway) Stats() Stats { return Stats{} }
