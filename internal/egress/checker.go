package egress

import (
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// How long an address answered for a name stays reachable: as long as the answer
// says, but within these bounds. The guest's programs need time to connect after
// an answer with a TTL of 0, and a week's TTL would be a hole that outlives what
// it was for.
const (
	MinPin = 30 * time.Second
	MaxPin = time.Hour
)

// MaxPins is the most pinned pairs of name and address. Beyond it those that end
// first are forgotten: the guest has to ask again.
const MaxPins = 4096

// Denial is why something may not leave. It is an error.
type Denial struct {
	Reason Reason
}

func (d *Denial) Error() string { return string(d.Reason) }

// Checker answers for one VM what its policy allows. It is safe for concurrent
// use.
type Checker struct {
	policy compiled

	mu    sync.Mutex
	host  map[netip.Addr]Reason
	pins  map[pin]time.Time // to the end of the pin
	names map[netip.Addr][]string
}

// A pin is one answer of DNS: addr is what a packet to it reaches.
type pin struct {
	name string
	addr netip.Addr
}

// New makes the checker of a policy, or tells what is wrong with it (Validate).
// Until SetHost it knows no address of the host.
func New(p Policy) (*Checker, error) {
	c, err := compile(p)
	if err != nil {
		return nil, err
	}
	return &Checker{policy: c, pins: map[pin]time.Time{}, names: map[netip.Addr][]string{}}, nil
}

// SetHost replaces the host's own addresses: each with the prefix of its network,
// whose broadcast address is denied too, and with IPv6 the address that is the
// host's where it is a router (subnet-router anycast, RFC 4291, 2.6.1).
func (c *Checker) SetHost(interfaces []netip.Prefix) {
	host := make(map[netip.Addr]Reason, 2*len(interfaces))
	for _, prefix := range interfaces {
		addr := prefix.Addr().WithZone("").Unmap()
		if addr.Is4() && prefix.Bits() < 31 {
			first := prefix.Masked().Addr()
			last := first.As4()
			for bit := prefix.Bits(); bit < 32; bit++ {
				last[bit/8] |= 0x80 >> (bit % 8)
			}
			// Both ends of the range are broadcast addresses, the first by BSD's
			// old use.
			host[first], host[netip.AddrFrom4(last)] = Broadcast, Broadcast
		}
		if addr.Is6() && prefix.Bits() < 127 {
			host[prefix.Masked().Addr().WithZone("")] = HostAddress
		}
	}
	for _, prefix := range interfaces {
		host[prefix.Addr().WithZone("").Unmap()] = HostAddress
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !maps.Equal(c.host, host) {
		c.host = host
	}
}

// AllowName tells whether the guest may ask DNS for a name, with or without its
// final dot. The denial is of type *Denial.
func (c *Checker) AllowName(name string) error {
	switch c.policy.mode {
	case Open:
		return nil
	case Restricted:
		if len(c.rules(canonicalName(name))) > 0 {
			return nil
		}
		return &Denial{NameDenied}
	}
	return &Denial{NoNetwork}
}

// rules are those that cover a name in canonical form.
func (c *Checker) rules(name string) []nameRule {
	var covering []nameRule
	for _, rule := range c.policy.names {
		if rule.covers(name) {
			covering = append(covering, rule)
		}
	}
	return covering
}

// Learn records that DNS answered the guest's question for name with addrs, good
// for ttl. Names that no rule covers are ignored.
func (c *Checker) Learn(name string, addrs []netip.Addr, ttl time.Duration) {
	name = canonicalName(name)
	if len(c.rules(name)) == 0 {
		return
	}
	end := time.Now().Add(min(max(ttl, MinPin), MaxPin))
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, addr := range addrs {
		for _, reached := range reaches(addr) {
			p := pin{name, reached}
			if old, ok := c.pins[p]; ok {
				if old.Before(end) {
					c.pins[p] = end
				}
				continue
			}
			if len(c.pins) >= MaxPins {
				c.forget()
			}
			c.pins[p] = end
			c.names[reached] = append(c.names[reached], name)
		}
	}
}

// forget drops the pins that end first, an eighth of all, so that it is not called
// again soon.
func (c *Checker) forget() {
	all := slices.SortedFunc(maps.Keys(c.pins), func(a, b pin) int { return c.pins[a].Compare(c.pins[b]) })
	for _, p := range all[:len(all)/8] {
		delete(c.pins, p)
		c.unname(p)
	}
}

func (c *Checker) unname(p pin) {
	left := slices.DeleteFunc(c.names[p.addr], func(name string) bool { return name == p.name })
	if len(left) == 0 {
		delete(c.names, p.addr)
		return
	}
	c.names[p.addr] = left
}

// Allow tells whether a packet of the guest may be sent to dst; the denial is of
// type *Denial. IPv6 addresses that carry an IPv4 one are judged as that.
func (c *Checker) Allow(proto Protocol, dst netip.AddrPort) error {
	if c.policy.mode == Off {
		return &Denial{NoNetwork}
	}
	if dst.Port() == 0 || !dst.Addr().IsValid() {
		return &Denial{Unspecified}
	}
	all := reaches(dst.Addr())
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, addr := range all {
		if err := c.allow(proto, netip.AddrPortFrom(addr, dst.Port())); err != nil {
			return err
		}
	}
	return nil
}

// MayBeHost tells whether dst, which is allowed, may turn out to be an address of
// the host: the operator named it (Extra).
func (c *Checker) MayBeHost(proto Protocol, dst netip.AddrPort) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return !slices.ContainsFunc(reaches(dst.Addr()), func(addr netip.Addr) bool {
		return !c.named(proto, netip.AddrPortFrom(addr, dst.Port()))
	})
}

// allow judges one address that is what it looks like.
func (c *Checker) allow(proto Protocol, dst netip.AddrPort) error {
	addr := dst.Addr()
	named := c.named(proto, dst)
	// The operator may name an address exactly; a name of his is one that others
	// answer for, which may mean the host but nothing stranger.
	if named && slices.Contains(c.policy.extra, dst) {
		return nil
	}
	if why := alwaysDenied(netip.PrefixFrom(addr, addr.BitLen())); why != "" {
		return &Denial{why}
	}
	if why := c.host[addr]; why != "" && (why != HostAddress || !named) {
		return &Denial{why}
	}
	if c.policy.mode == Open || named || c.covered(proto, dst) {
		return nil
	}
	return &Denial{NotAllowed}
}

// named tells whether the operator named dst.
func (c *Checker) named(proto Protocol, dst netip.AddrPort) bool {
	if proto != TCP {
		return false
	}
	return slices.Contains(c.policy.extra, dst) || c.pinned(proto, dst, true)
}

// covered tells whether a rule of Allow covers dst.
func (c *Checker) covered(proto Protocol, dst netip.AddrPort) bool {
	for _, rule := range c.policy.cidrs {
		if rule.prefix.Contains(dst.Addr()) && rule.covers(proto, dst.Port()) {
			return true
		}
	}
	return c.pinned(proto, dst, false)
}

// pinned tells whether a live answer for a name leads to dst, by a rule of the
// operator's or of any.
func (c *Checker) pinned(proto Protocol, dst netip.AddrPort, operator bool) bool {
	now := time.Now()
	for _, name := range c.names[dst.Addr()] {
		if now.After(c.pins[pin{name, dst.Addr()}]) {
			continue
		}
		for _, rule := range c.rules(name) {
			if rule.match.covers(proto, dst.Port()) && (rule.operator || !operator) {
				return true
			}
		}
	}
	return false
}
