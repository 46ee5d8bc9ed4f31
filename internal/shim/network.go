package shim

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"

	shimv1 "github.com/iii-hq/workers/sandbox-libkrun/api/shim/v1"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/cleanup"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/netstack"
)

// network is the gateway of a VM that has one. The VMM holds nothing but the
// other end of a socket pair: sockets of the host are the gateway's alone.
type network struct {
	gateway *netstack.Gateway
	// guest is the VMM's end.
	guest *os.File
}

// openNetwork starts the gateway, with nobody behind its link yet, and publishes
// the spec's ports.
func openNetwork(log *slog.Logger, spec *bootspec.Spec) (_ *network, err error) {
	var undo cleanup.Stack
	defer func() { err = undo.RunOnError(err) }()

	link, guest, err := socketPair("network")
	if err != nil {
		return nil, err
	}
	undo.Add(func() error {
		_ = guest.Close() // the second time where the VMM took it
		return nil
	})
	opts, err := networkOptions(spec)
	if err != nil {
		return nil, errors.Join(err, link.Close())
	}
	opts.Link, opts.Log = link, log
	gateway, err := netstack.Start(opts) // which owns the link
	if err != nil {
		return nil, fmt.Errorf("network: %w", err)
	}
	undo.Add(gateway.Close)
	for _, p := range spec.Network.Publish {
		host := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), p.Host)
		if _, err := gateway.Publish(host, p.Guest); err != nil {
			return nil, fmt.Errorf("network: %w: publish another port of the host, or have a free one chosen", err)
		}
	}
	return &network{gateway: gateway, guest: guest}, nil
}

func networkOptions(spec *bootspec.Spec) (netstack.Options, error) {
	nic := spec.Guest.Interface
	opts := netstack.Options{
		ID: spec.ID, Framing: netstack.Stream, MTU: nic.MTU, Policy: spec.Network.Policy,
	}
	var err, err2 error
	opts.GuestMAC, err = net.ParseMAC(nic.MAC)
	opts.GatewayMAC, err2 = net.ParseMAC(bootspec.GatewayMAC)
	for _, prefix := range nic.Addresses {
		if prefix.Addr().Is4() {
			opts.Guest4 = prefix
		} else {
			opts.Guest6 = prefix
		}
	}
	for _, ip := range nic.Gateways {
		if ip.Is4() {
			opts.Gateway4 = ip
		} else {
			opts.Gateway6 = ip
		}
	}
	return opts, errors.Join(err, err2)
}

// close ends the gateway and returns when nothing of it runs any more.
func (n *network) close() error {
	_ = n.guest.Close() // the second time where the VMM took it
	return n.gateway.Close()
}

// watch tells of a gateway that ends before its VM: the guest then has a device
// that nobody answers on, and lives on.
func (n *network) watch(ctx context.Context, log *slog.Logger) {
	select {
	case <-n.gateway.Done():
		if ctx.Err() == nil {
			log.Warn("the network's gateway ended before the VM")
		}
	case <-ctx.Done():
	}
}

// published are the ports that lead into the guest; nil is a VM without network.
func (n *network) published() []*shimv1.PublishedPort {
	if n == nil {
		return nil
	}
	var ports []*shimv1.PublishedPort
	for _, p := range n.gateway.Published() {
		ports = append(ports, &shimv1.PublishedPort{Host: uint32(p.Host.Port()), Guest: uint32(p.Guest)})
	}
	return ports
}

// stats is nil for a VM without network.
func (n *network) stats() *shimv1.NetworkStats {
	if n == nil {
		return nil
	}
	s := n.gateway.Stats()
	return &shimv1.NetworkStats{
		InBytes: s.BytesIn, OutBytes: s.BytesOut, TcpFlows: s.TCPFlows, UdpFlows: s.UDPFlows, LiveFlows: uint64(s.Live),
		DnsQueries: s.DNSQueries, Denied: s.Denied, IdleMs: uint64(s.Idle.Milliseconds()),
	}
}
