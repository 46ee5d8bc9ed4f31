package cli

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/egress"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/sandbox"
)

// envHostPorts names the ports of the host's loopback that sandboxes with a
// network reach.
const envHostPorts = "III_SANDBOX_HOST_PORTS"

// networkFlags say what a sandbox's network is like.
type networkFlags struct {
	network bool
	allow   []string
	publish []string
}

func (n *networkFlags) register(flags *pflag.FlagSet) {
	flags.BoolVar(&n.network, "network", false, "give the sandbox a network: the internet, but nothing of this host (also --net)")
	flags.StringArrayVar(&n.allow, "allow", nil, "reach nothing but HOST[:PORT], *.DOMAIN[:PORT] or CIDR[:PORT]; PORT may be a range (repeatable; with a network)")
	flags.StringArrayVar(&n.publish, "publish", nil, "lead port HOST of 127.0.0.1 to port GUEST, as in 8080:80; 80 alone takes a free one (repeatable; with a network)")
	flags.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		if name == "net" {
			name = "network"
		}
		return pflag.NormalizedName(name)
	})
}

// apply puts what the flags say into the request.
func (n *networkFlags) apply(req *sandbox.BootRequest) error {
	req.Network = n.network || len(n.allow) > 0 || len(n.publish) > 0
	if len(n.allow) > 0 {
		req.Policy = &egress.Policy{Mode: egress.Restricted}
		for _, text := range n.allow {
			req.Policy.Allow = append(req.Policy.Allow, allowRule(text))
		}
		if err := req.Policy.Validate(); err != nil {
			return usagef("--allow: %w", err)
		}
	}
	for _, text := range n.publish {
		port, err := publishedPort(text)
		if err != nil {
			return err
		}
		req.Publish = append(req.Publish, port)
	}
	return nil
}

// allowRule reads HOST[:PORT] and its kin; what is wrong with it the policy tells.
func allowRule(text string) egress.Rule {
	host, port, hasPort := text, "", false
	if rest, ok := strings.CutPrefix(text, "["); ok {
		if address, behind, closed := strings.Cut(rest, "]"); closed && (behind == "" || behind[0] == ':') {
			host = address
			port, hasPort = strings.CutPrefix(behind, ":")
		}
	} else if strings.Count(text, ":") == 1 {
		host, port, hasPort = strings.Cut(text, ":")
	}
	rule := egress.Rule{Name: host}
	_, notAddress := netip.ParseAddr(host)
	if _, notPrefix := netip.ParsePrefix(host); notAddress == nil || notPrefix == nil || strings.Contains(host, "/") {
		rule = egress.Rule{CIDR: host}
	}
	if hasPort { // an empty one is a mistake, not every port
		rule.Ports = []string{port}
	}
	return rule
}

func publishedPort(text string) (sandbox.PublishedPort, error) {
	host, guest, both := strings.Cut(text, ":")
	if !both {
		host, guest = "0", text
	}
	h, errHost := strconv.ParseUint(host, 10, 16)
	g, errGuest := strconv.ParseUint(guest, 10, 16)
	if errHost != nil || errGuest != nil || g == 0 || both && h == 0 {
		return sandbox.PublishedPort{}, usagef("--publish %q: write HOST:GUEST as in 8080:80, or GUEST alone for a free port of the host", text)
	}
	return sandbox.PublishedPort{Host: uint16(h), Guest: uint16(g)}, nil
}

// hostPorts reads the operator's ports: numbers parted by commas or spaces.
func hostPorts(getenv func(string) string) ([]uint16, error) {
	var ports []uint16
	for field := range strings.FieldsFuncSeq(getenv(envHostPorts), func(r rune) bool { return r == ',' || r == ' ' }) {
		port, err := strconv.ParseUint(field, 10, 16)
		if err != nil || port == 0 {
			return nil, fmt.Errorf("%s has %q: write ports of this host parted by commas, as in 8000,5432", envHostPorts, field)
		}
		ports = append(ports, uint16(port))
	}
	if len(ports) > egress.MaxHostPorts {
		return nil, fmt.Errorf("%s has %d ports: at most %d can be opened", envHostPorts, len(ports), egress.MaxHostPorts)
	}
	return ports, nil
}
