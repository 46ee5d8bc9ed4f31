package sandbox

import (
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/egress"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
)

// PublishedPort is a TCP port of the host's 127.0.0.1 that leads to a port of a
// sandbox.
type PublishedPort = vm.PublishedPort

// network makes the network of a sandbox that asked for one. policy may be nil,
// for one that reaches all but what is always denied. hostPorts are the ports of
// the host's loopback that the operator opens to every sandbox with a network.
func network(policy *egress.Policy, publish []PublishedPort, hostPorts []uint16) (*vm.Network, error) {
	n := &vm.Network{Policy: egress.Policy{Mode: egress.Open}, Publish: publish}
	if policy != nil {
		n.Policy = *policy
	}
	if n.Policy.Mode == egress.Off {
		return nil, fault.InvalidRequest("network_policy.mode is off: leave the network out instead")
	}
	n.Policy.HostPorts = slices.Clone(hostPorts)
	if err := n.Policy.Validate(); err != nil {
		return nil, fault.InvalidRequest("network_policy.%v", err)
	}
	spec := bootspec.Network{Policy: n.Policy, Publish: publish}
	if err := spec.Validate(); err != nil {
		return nil, fault.InvalidRequest("%v", err)
	}
	return n, nil
}

// loopbackURL finds the beginnings of URLs that name the host's loopback, up to
// the port or what ends the authority (RFC 3986, 3.2).
var loopbackURL = regexp.MustCompile(`(?i)\b([a-z][a-z0-9+.-]*)(://(?:[^\s/?#@"',]*@)?)(localhost|127\.0\.0\.1|0\.0\.0\.0|\[::1\])(:[0-9]{1,5})?(?:$|[/?#\s"',;|)\]}])`)

// defaultPort is that of URLs that name none.
func defaultPort(scheme string) string {
	switch strings.ToLower(scheme) {
	case "http", "ws":
		return "80"
	case "https", "wss":
		return "443"
	}
	return ""
}

// rewriteLoopback returns env with URLs of the host's loopback leading to the
// gateway instead, where the port is one of those open: in the guest, loopback is
// its own. All others stay as they are.
func rewriteLoopback(env []string, open []uint16) []string {
	if len(open) == 0 {
		return env
	}
	gateway := bootspec.NewInterface(bootspec.DefaultMTU, true).Gateways[0].String()
	out := make([]string, len(env))
	for i, kv := range env {
		key, value, _ := strings.Cut(kv, "=")
		out[i] = key + "=" + rewriteValue(value, open, gateway)
	}
	return out
}

func rewriteValue(value string, open []uint16, gateway string) string {
	var out strings.Builder
	for {
		m := loopbackURL.FindStringSubmatchIndex(value)
		if m == nil {
			out.WriteString(value)
			return out.String()
		}
		part := func(n int) string {
			if m[2*n] < 0 {
				return ""
			}
			return value[m[2*n]:m[2*n+1]]
		}
		port := strings.TrimPrefix(part(4), ":")
		if port == "" {
			port = defaultPort(part(1))
		}
		host := part(3)
		if n, err := strconv.ParseUint(port, 10, 16); err == nil && slices.Contains(open, uint16(n)) {
			host = gateway
		}
		// What ends the match may begin the next one.
		out.WriteString(value[:m[6]] + host)
		value = value[m[7]:]
	}
}
