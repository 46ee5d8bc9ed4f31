package egress_test

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/egress"
)

func TestValidateSaysWhatToDo(t *testing.T) {
	t.Parallel()
	allow := func(rules ...egress.Rule) egress.Policy {
		return egress.Policy{Mode: egress.Restricted, Allow: rules}
	}
	tests := map[string]struct {
		policy egress.Policy
		want   []string // "" in front means valid
	}{
		"zero":                 {egress.Policy{}, []string{"mode is missing", `"restricted"`}},
		"unknown mode":         {egress.Policy{Mode: "closed"}, []string{`"closed" is unknown`, `"off"`}},
		"off":                  {egress.Policy{Mode: egress.Off}, nil},
		"open":                 {egress.Policy{Mode: egress.Open, HostPorts: []uint16{1}, Extra: []egress.Endpoint{{Host: "10.0.0.1", Port: 49134}, {Host: "engine", Port: 1}}}, nil},
		"open with rules":      {egress.Policy{Mode: egress.Open, Allow: []egress.Rule{{Name: "a.b"}}}, []string{"allow has no meaning", `"restricted"`}},
		"off with ports":       {egress.Policy{Mode: egress.Off, HostPorts: []uint16{80}}, []string{"host_ports and extra need a network"}},
		"nothing allowed":      {allow(), nil},
		"good rules":           {allow(egress.Rule{CIDR: "10.0.0.0/8"}, egress.Rule{CIDR: "2001:db8::/32"}, egress.Rule{CIDR: "1.1.1.1", Ports: []string{"443", "8000-8100"}, Protocol: "tcp"}, egress.Rule{Name: "*.Example.com."}, egress.Rule{Name: "*"}, egress.Rule{Name: "_sip._tcp.example.com"}), nil},
		"everything":           {allow(egress.Rule{CIDR: "0.0.0.0/0"}, egress.Rule{CIDR: "::/0"}), nil},
		"empty rule":           {allow(egress.Rule{CIDR: "10.0.0.0/8"}, egress.Rule{}), []string{"allow[1].cidr and name are both missing"}},
		"two in one":           {allow(egress.Rule{CIDR: "10.0.0.0/8", Name: "a.b"}), []string{"both set", "one rule for each"}},
		"no range":             {allow(egress.Rule{CIDR: "10.0.0/8"}), []string{"allow[0].cidr", "203.0.113.0/24"}},
		"bits behind":          {allow(egress.Rule{CIDR: "10.0.0.1/8"}), []string{"write 10.0.0.0/8"}},
		"IPv4 as IPv6":         {allow(egress.Rule{CIDR: "::ffff:10.0.0.0/104"}), []string{"write it as IPv4"}},
		"zone":                 {allow(egress.Rule{CIDR: "fe80::1%eth0"}), []string{"not a range"}},
		"loopback":             {allow(egress.Rule{CIDR: "127.0.0.1/32"}), []string{"never reachable", "III_SANDBOX_HOST_PORTS"}},
		"metadata":             {allow(egress.Rule{CIDR: "169.254.169.254"}), []string{"never reachable", "metadata"}},
		"multicast":            {allow(egress.Rule{CIDR: "ff02::/16"}), []string{"never reachable"}},
		"name with a wildcard": {allow(egress.Rule{Name: "a.*.com"}), []string{"not a DNS name", "*.example.com"}},
		"wildcard alone":       {allow(egress.Rule{Name: "*."}), []string{"not a DNS name"}},
		"half a label":         {allow(egress.Rule{Name: "*example.com"}), []string{"not a DNS name"}},
		"empty label":          {allow(egress.Rule{Name: "a..b"}), []string{"not a DNS name"}},
		"url":                  {allow(egress.Rule{Name: "https://example.com"}), []string{"not a DNS name"}},
		"address as name":      {allow(egress.Rule{Name: "10.0.0.1"}), []string{"write it as cidr"}},
		"half an address":      {allow(egress.Rule{Name: "10.1"}), []string{"ends in a number", "cidr"}},
		"address as a number":  {allow(egress.Rule{Name: "2130706433"}), []string{"ends in a number"}},
		"address in hex":       {allow(egress.Rule{Name: "example.0x7f"}), []string{"ends in a number"}},
		"digits in names":      {allow(egress.Rule{Name: "1.1.example.4com"}, egress.Rule{Name: "*.xn--p1ai"}), nil},
		"empty port":           {allow(egress.Rule{Name: "a.b", Ports: []string{""}}), []string{"ports[0]"}},
		"no such port":         {allow(egress.Rule{Name: "a.b", Ports: []string{"65536"}}), []string{"ports[0]", "8000-8100"}},
		"port 0":               {allow(egress.Rule{Name: "a.b", Ports: []string{"80", "0"}}), []string{"ports[1]"}},
		"backwards":            {allow(egress.Rule{Name: "a.b", Ports: []string{"90-80"}}), []string{"ports[0]"}},
		"protocol":             {allow(egress.Rule{Name: "a.b", Protocol: "icmp"}), []string{`"icmp" is unknown`}},
		"host port 0":          {egress.Policy{Mode: egress.Open, HostPorts: []uint16{80, 0}}, []string{"host_ports[1] is 0"}},
		"extra loopback":       {egress.Policy{Mode: egress.Open, Extra: []egress.Endpoint{{Host: "127.0.0.1", Port: 80}}}, []string{"extra[0].host", "host_ports"}},
		"extra mapped":         {egress.Policy{Mode: egress.Open, Extra: []egress.Endpoint{{Host: "::ffff:127.0.0.1", Port: 80}}}, []string{"extra[0].host"}},
		"extra port 0":         {egress.Policy{Mode: egress.Open, Extra: []egress.Endpoint{{Host: "a.b"}}}, []string{"extra[0].port is 0"}},
		"extra wildcard":       {egress.Policy{Mode: egress.Open, Extra: []egress.Endpoint{{Host: "*.b", Port: 80}}}, []string{"neither"}},
		"too many":             {allow(make([]egress.Rule, egress.MaxRules+1)...), []string{"at most 512"}},
		"too many ports":       {allow(egress.Rule{Name: "a.b", Ports: slices.Repeat([]string{"1"}, egress.MaxPorts+1)}), []string{"at most 64"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			err := test.policy.Validate()
			if (err != nil) != (len(test.want) > 0) {
				t.Fatalf("error is %v", err)
			}
			for _, want := range test.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q does not say %q", err, want)
				}
			}
			// What is refused makes no checker either.
			if _, errNew := egress.New(test.policy); (errNew != nil) != (err != nil) {
				t.Errorf("New: %v", errNew)
			}
		})
	}
}

func TestPolicyIsJSON(t *testing.T) {
	t.Parallel()
	const text = `{"mode":"restricted","allow":[{"cidr":"10.0.0.0/8","ports":["443","8000-8100"],"protocol":"tcp"},{"name":"*.example.com"}],"host_ports":[8080],"extra":[{"host":"engine","port":49134}]}`
	var policy egress.Policy
	if err := json.Unmarshal([]byte(text), &policy); err != nil {
		t.Fatal(err)
	}
	if err := policy.Validate(); err != nil {
		t.Error(err)
	}
	back, err := json.Marshal(policy)
	if err != nil || string(back) != text {
		t.Errorf("became %s, %v", back, err)
	}
}
