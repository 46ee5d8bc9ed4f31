package netstack

import (
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/egress"
)

// hostAddrsAge is how old the list of the host's addresses may be when a flow is
// judged by it. What is added meanwhile is found when the socket is connected.
const hostAddrsAge = time.Second

// hostAddrs keeps a checker's list of the host's own addresses fresh.
type hostAddrs struct {
	list    func() ([]netip.Prefix, error)
	checker *egress.Checker
	log     *slog.Logger

	mu   sync.Mutex
	last time.Time
	bad  bool
}

// newHostAddrs lists the addresses once; without them no policy can be kept.
func newHostAddrs(list func() ([]netip.Prefix, error), checker *egress.Checker, log *slog.Logger) (*hostAddrs, error) {
	if list == nil {
		list = interfaceAddrs
	}
	h := &hostAddrs{list: list, checker: checker, log: log}
	addrs, err := list()
	if err != nil {
		return nil, fmt.Errorf("list the host's addresses: %w", err)
	}
	checker.SetHost(addrs)
	h.last = time.Now()
	return h, nil
}

// refresh lists them again when the list is old. While that fails, the last list
// holds.
func (h *hostAddrs) refresh() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if time.Since(h.last) < hostAddrsAge {
		return
	}
	h.last = time.Now()
	addrs, err := h.list()
	if err != nil {
		if !h.bad {
			h.log.Warn("the host's addresses cannot be listed: the last list holds", "err", err)
		}
		h.bad = true
		return
	}
	h.bad = false
	h.checker.SetHost(addrs)
}

func interfaceAddrs() ([]netip.Prefix, error) {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return nil, err
	}
	var all []netip.Prefix
	for _, addr := range addrs {
		if network, ok := addr.(*net.IPNet); ok {
			ip, _ := netip.AddrFromSlice(network.IP)
			bits, _ := network.Mask.Size()
			all = append(all, netip.PrefixFrom(ip.Unmap(), bits))
		}
	}
	return all, nil
}

// isOwn tells whether a connected socket ended at the host itself: then both its
// ends have the same address.
func isOwn(conn net.Conn) bool {
	local, errLocal := netip.ParseAddrPort(conn.LocalAddr().String())
	remote, errRemote := netip.ParseAddrPort(conn.RemoteAddr().String())
	return errLocal == nil && errRemote == nil && local.Addr().Unmap().WithZone("") == remote.Addr().Unmap().WithZone("")
}
