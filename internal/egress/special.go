package egress

import "net/netip"

// Reason says why something is denied, in words for a log.
type Reason string

// The reasons of a denial.
const (
	NoNetwork    Reason = "the VM has no network"
	NotAllowed   Reason = "not allowed by the policy"
	NameDenied   Reason = "name not allowed by the policy"
	HostLoopback Reason = "the host's loopback"
	HostAddress  Reason = "an address of the host"
	LinkLocal    Reason = "link-local, where cloud metadata is"
	Metadata     Reason = "cloud metadata"
	Multicast    Reason = "multicast"
	Broadcast    Reason = "broadcast"
	Unspecified  Reason = "not an address of a host"
)

type special struct {
	prefix netip.Prefix
	reason Reason
}

// specials are the ranges that are always denied, the narrow ones first.
// Read-only. Sources: the IANA special-purpose address registries, and the
// clouds' documentation of their metadata services.
var specials = []special{
	{netip.MustParsePrefix("100.100.100.200/32"), Metadata}, // Alibaba
	{netip.MustParsePrefix("168.63.129.16/32"), Metadata},   // Azure
	{netip.MustParsePrefix("192.0.0.0/24"), Metadata},       // protocol assignments; Oracle
	{netip.MustParsePrefix("fd00:ec2::/32"), Metadata},      // AWS
	{netip.MustParsePrefix("fd20:ce::254/128"), Metadata},   // Google
	{netip.MustParsePrefix("fd00:42::42/128"), Metadata},    // Scaleway
	{netip.MustParsePrefix("255.255.255.255/32"), Broadcast},
	{netip.MustParsePrefix("0.0.0.0/8"), Unspecified},
	{netip.MustParsePrefix("127.0.0.0/8"), HostLoopback},
	{netip.MustParsePrefix("169.254.0.0/16"), LinkLocal},
	{netip.MustParsePrefix("224.0.0.0/4"), Multicast},
	{netip.MustParsePrefix("240.0.0.0/4"), Unspecified}, // reserved
	{netip.MustParsePrefix("::/128"), Unspecified},
	{netip.MustParsePrefix("::1/128"), HostLoopback},
	{netip.MustParsePrefix("fe80::/10"), LinkLocal},
	{netip.MustParsePrefix("ff00::/8"), Multicast},
}

// alwaysDenied tells why nothing of prefix is ever reachable, "" when some is.
func alwaysDenied(prefix netip.Prefix) Reason {
	for _, s := range specials {
		if s.prefix.Bits() <= prefix.Bits() && s.prefix.Contains(prefix.Addr()) {
			return s.reason
		}
	}
	return ""
}

// The forms of IPv6 that carry an IPv4 address. Read-only.
var (
	compatible = netip.MustParsePrefix("::/96")           // RFC 4291, 2.5.5.1
	translated = netip.MustParsePrefix("::ffff:0:0:0/96") // RFC 2765
	nat64      = netip.MustParsePrefix("64:ff9b::/96")    // RFC 6052
	localNAT64 = netip.MustParsePrefix("64:ff9b:1::/48")  // RFC 8215
	teredo     = netip.MustParsePrefix("2001::/32")       // RFC 4380
	sixToFour  = netip.MustParsePrefix("2002::/16")       // RFC 3056
)

// reaches are the addresses that a packet to addr may arrive at: itself, or for
// an IPv6 address that carries an IPv4 one, that. Where a host may treat it as
// either, both.
func reaches(addr netip.Addr) []netip.Addr {
	addr = addr.WithZone("").Unmap()
	if addr.Is4() {
		return []netip.Addr{addr}
	}
	b := addr.As16()
	v4 := func(at int) netip.Addr { return netip.AddrFrom4([4]byte(b[at : at+4])) }
	switch {
	case addr.IsUnspecified(), addr.IsLoopback():
		return []netip.Addr{addr}
	case compatible.Contains(addr), translated.Contains(addr), nat64.Contains(addr):
		return []netip.Addr{v4(12)}
	case sixToFour.Contains(addr):
		return []netip.Addr{v4(2)}
	case teredo.Contains(addr):
		client := v4(12).As4()
		for i := range client {
			client[i] ^= 0xff
		}
		return []netip.Addr{addr, v4(4), netip.AddrFrom4(client)}
	case localNAT64.Contains(addr):
		// Behind a prefix of 96 bits, or 48, 56 or 64, where byte 8 is none of the
		// address; a reading as 0.0.0.0/8 means nothing.
		all := []netip.Addr{addr}
		for _, v4 := range [][4]byte{v4(12).As4(), {b[6], b[7], b[9], b[10]}, {b[7], b[9], b[10], b[11]}, {b[9], b[10], b[11], b[12]}} {
			if v4[0] != 0 {
				all = append(all, netip.AddrFrom4(v4))
			}
		}
		return all
	case b[8]&^2 == 0 && b[9] == 0 && b[10] == 0x5e && b[11] == 0xfe: // ISATAP, RFC 5214
		return []netip.Addr{addr, v4(12)}
	}
	return []netip.Addr{addr}
}
