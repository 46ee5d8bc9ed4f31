// Package egress is the pure policy of a VM's network: may this packet leave?
// It holds no socket and asks nobody; the gateway tells it the host's own
// addresses and the DNS answers that it gave the guest.
//
// Some destinations are denied under every policy: the host's loopback, the
// host's own addresses, link-local addresses and with them cloud metadata, other
// well-known metadata addresses, multicast, broadcast, and what is no address of
// a host. Only what the operator names one by one opens them: HostPorts and Extra.
// A policy is JSON inside the boot spec.
package egress

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// Mode is how much a VM reaches.
type Mode string

// The modes of a policy.
const (
	// Off is no network at all: the VM has no interface but lo.
	Off Mode = "off"
	// Open is everything but what is always denied.
	Open Mode = "open"
	// Restricted is what the rules of Allow name, and nothing else.
	Restricted Mode = "restricted"
)

// Protocol is a transport protocol.
type Protocol string

// The transport protocols that leave a VM.
const (
	TCP Protocol = "tcp"
	UDP Protocol = "udp"
)

// Limits of a policy.
const (
	MaxRules     = 512 // of Allow
	MaxPorts     = 64  // of one rule
	MaxHostPorts = 64
	MaxExtra     = 16
)

// Policy is what one VM may reach. The zero value is not valid: Mode is required.
type Policy struct {
	Mode Mode `json:"mode"`
	// Allow is what a Restricted policy lets through, and empty in other modes.
	// No rule opens what is always denied.
	Allow []Rule `json:"allow,omitempty"`
	// HostPorts are TCP ports of the host's loopback that the guest reaches at the
	// gateway's address, in every mode but Off. From the operator alone.
	HostPorts []uint16 `json:"host_ports,omitempty"`
	// Extra are exact destinations that are reached over TCP in every mode but Off,
	// even where they are the host's own addresses. From the operator alone.
	Extra []Endpoint `json:"extra,omitempty"`
}

// Rule lets through one range of addresses or one name. Exactly one of CIDR and
// Name is set.
type Rule struct {
	// CIDR is an IPv4 or IPv6 prefix, or a single address.
	CIDR string `json:"cidr,omitempty"`
	// Name is a DNS name, "example.com", or all names below one at any depth,
	// "*.example.com" (without example.com itself); "*" is every name. The guest
	// reaches the addresses that the gateway's DNS answered for it, for as long as
	// the answer holds.
	Name string `json:"name,omitempty"`
	// Ports are single ports, "443", and ranges, "8000-8100". None is every port.
	Ports []string `json:"ports,omitempty"`
	// Protocol is TCP, UDP, or empty for both.
	Protocol Protocol `json:"protocol,omitempty"`
}

// Endpoint is one host and TCP port.
type Endpoint struct {
	// Host is an IP address or a DNS name without wildcard.
	Host string `json:"host"`
	Port uint16 `json:"port"`
}

// Validate reports the first fault of p, naming the field and what to write
// instead. A valid policy compiles (New).
func (p Policy) Validate() error {
	_, err := compile(p)
	return err
}

// compiled is a policy in the form that questions are asked of.
type compiled struct {
	mode  Mode
	cidrs []cidrRule
	names []nameRule
	extra []netip.AddrPort
}

type match struct {
	proto Protocol // "" is any
	ports []portRange
}

type portRange struct{ first, last uint16 }

type cidrRule struct {
	prefix netip.Prefix
	match
}

// A nameRule matches name, or with wild every name that ends in it.
type nameRule struct {
	name string // lower case, without the final dot; with wild begins with one
	wild bool
	// operator marks a rule made of an Extra.
	operator bool
	match
}

func compile(p Policy) (compiled, error) {
	c := compiled{mode: p.Mode}
	switch p.Mode {
	case Off, Open, Restricted:
	case "":
		return c, errors.New(`mode is missing: use "off", "open" or "restricted"`)
	default:
		return c, fmt.Errorf(`mode %q is unknown: use "off", "open" or "restricted"`, p.Mode)
	}
	if p.Mode != Restricted && len(p.Allow) > 0 {
		return c, fmt.Errorf(`allow has no meaning in mode %q: use mode "restricted", or leave it out`, p.Mode)
	}
	if p.Mode == Off && len(p.HostPorts)+len(p.Extra) > 0 {
		return c, errors.New(`host_ports and extra need a network: use mode "restricted" or "open", or leave them out`)
	}
	for _, limit := range []struct {
		field    string
		has, max int
	}{{"allow", len(p.Allow), MaxRules}, {"host_ports", len(p.HostPorts), MaxHostPorts}, {"extra", len(p.Extra), MaxExtra}} {
		if limit.has > limit.max {
			return c, fmt.Errorf("%s has %d entries: at most %d are allowed, merge some", limit.field, limit.has, limit.max)
		}
	}
	for i, rule := range p.Allow {
		if err := c.addRule(rule); err != nil {
			return c, fmt.Errorf("allow[%d].%w", i, err)
		}
	}
	for i, port := range p.HostPorts {
		if port == 0 {
			return c, fmt.Errorf("host_ports[%d] is 0: name a port from 1 to 65535", i)
		}
	}
	for i, extra := range p.Extra {
		if err := c.addExtra(extra); err != nil {
			return c, fmt.Errorf("extra[%d].%w", i, err)
		}
	}
	return c, nil
}

func (c *compiled) addRule(rule Rule) error {
	m, err := rule.match()
	if err != nil {
		return err
	}
	switch {
	case rule.CIDR != "" && rule.Name != "":
		return errors.New("cidr and name are both set: use one rule for each")
	case rule.CIDR != "":
		prefix, err := parsePrefix(rule.CIDR)
		if err != nil {
			return err
		}
		if why := alwaysDenied(prefix); why != "" {
			return fmt.Errorf("cidr %s is never reachable (%s): a port of the host's loopback is opened by its operator, with III_SANDBOX_HOST_PORTS", prefix, why)
		}
		c.cidrs = append(c.cidrs, cidrRule{prefix: prefix, match: m})
	case rule.Name != "":
		name, wild, err := parseName(rule.Name)
		if err != nil {
			return err
		}
		c.names = append(c.names, nameRule{name: name, wild: wild, match: m})
	default:
		return errors.New(`cidr and name are both missing: name what is allowed, as in {"name": "example.com"}`)
	}
	return nil
}

func (c *compiled) addExtra(extra Endpoint) error {
	if extra.Port == 0 {
		return errors.New("port is 0: name a port from 1 to 65535")
	}
	if addr, err := netip.ParseAddr(extra.Host); err == nil {
		addr = addr.Unmap()
		if addr.Zone() != "" || !addr.IsGlobalUnicast() {
			return fmt.Errorf("host %s is not an address that other hosts have: for the host's loopback use host_ports", extra.Host)
		}
		c.extra = append(c.extra, netip.AddrPortFrom(addr, extra.Port))
		return nil
	}
	name, wild, err := parseName(extra.Host)
	if err != nil || wild {
		return fmt.Errorf("host %q is neither an IP address nor a DNS name: write one", extra.Host)
	}
	c.names = append(c.names, nameRule{
		name: name, operator: true,
		match: match{proto: TCP, ports: []portRange{{extra.Port, extra.Port}}},
	})
	return nil
}

func (r Rule) match() (match, error) {
	m := match{proto: r.Protocol}
	switch r.Protocol {
	case "", TCP, UDP:
	default:
		return m, fmt.Errorf(`protocol %q is unknown: use "tcp", "udp", or leave it out for both`, r.Protocol)
	}
	if len(r.Ports) > MaxPorts {
		return m, fmt.Errorf("ports has %d entries: at most %d are allowed, merge some into ranges", len(r.Ports), MaxPorts)
	}
	for i, text := range r.Ports {
		first, last, isRange := strings.Cut(text, "-")
		if !isRange {
			last = first
		}
		low, errLow := strconv.ParseUint(first, 10, 16)
		high, errHigh := strconv.ParseUint(last, 10, 16)
		if errLow != nil || errHigh != nil || low == 0 || low > high {
			return m, fmt.Errorf(`ports[%d] %q is not a port: write "443" or a range, "8000-8100"`, i, text)
		}
		m.ports = append(m.ports, portRange{uint16(low), uint16(high)})
	}
	return m, nil
}

func (m match) covers(proto Protocol, port uint16) bool {
	if m.proto != "" && m.proto != proto {
		return false
	}
	if len(m.ports) == 0 {
		return true
	}
	for _, r := range m.ports {
		if r.first <= port && port <= r.last {
			return true
		}
	}
	return false
}

// parsePrefix reads a prefix or an address. Host bits and IPv4 written as IPv6
// are refused: it is not plain what they mean.
func parsePrefix(text string) (netip.Prefix, error) {
	prefix, err := netip.ParsePrefix(text)
	if err != nil {
		addr, errAddr := netip.ParseAddr(text)
		if errAddr != nil || addr.Zone() != "" {
			return prefix, fmt.Errorf(`cidr %q is not a range of addresses: write one like "203.0.113.0/24" or "2001:db8::/32"`, text)
		}
		prefix = netip.PrefixFrom(addr, addr.BitLen())
	}
	if prefix.Addr().Is4In6() {
		return prefix, fmt.Errorf("cidr %s is IPv4 written as IPv6: write it as IPv4", text)
	}
	if prefix != prefix.Masked() {
		return prefix, fmt.Errorf("cidr %s has bits behind its prefix: write %s", text, prefix.Masked())
	}
	return prefix, nil
}

// parseName reads a rule's name.
func parseName(text string) (name string, wild bool, err error) {
	if text == "*" {
		return "", true, nil
	}
	rest, wild := strings.CutPrefix(text, "*.")
	name = canonicalName(rest)
	if !validName(name) {
		return "", false, fmt.Errorf(`name %q is not a DNS name: write one like "example.com" or "*.example.com"`, text)
	}
	if _, err := netip.ParseAddr(name); err == nil {
		return "", false, fmt.Errorf("name %s is an address: write it as cidr", text)
	}
	// No name ends in a number (RFC 3696, 2): it is an address cut short, or one in
	// a form that programs read differently.
	if last := name[strings.LastIndexByte(name, '.')+1:]; '0' <= last[0] && last[0] <= '9' && isNumber(last) {
		return "", false, fmt.Errorf("name %s is no name, since it ends in a number: write an address in full, as cidr", text)
	}
	if wild {
		name = "." + name
	}
	return name, wild, nil
}

// canonicalName is a name in lower case without its final dot. In DNS that is
// about ASCII alone: other letters are others, however they look.
func canonicalName(name string) string {
	b := []byte(strings.TrimSuffix(name, "."))
	for i, c := range b {
		if 'A' <= c && c <= 'Z' {
			b[i] = c + 'a' - 'A'
		}
	}
	return string(b)
}

func isNumber(label string) bool {
	_, err := strconv.ParseUint(label, 0, 64)
	return err == nil
}

func validName(name string) bool {
	if name == "" || len(name) > 253 {
		return false
	}
	for label := range strings.SplitSeq(name, ".") {
		if label == "" || len(label) > 63 {
			return false
		}
		for _, b := range []byte(label) {
			if (b < 'a' || b > 'z') && (b < '0' || b > '9') && b != '-' && b != '_' {
				return false
			}
		}
	}
	return true
}

func (r nameRule) covers(name string) bool {
	if r.wild {
		return strings.HasSuffix(name, r.name) && len(name) > len(r.name)
	}
	return name == r.name
}
