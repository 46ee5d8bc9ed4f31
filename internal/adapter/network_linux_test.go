package adapter_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/contract"
)

// A policy that a caller sends counts whether or not the extensions are shown; one
// that is wrong is never overlooked.
func TestNetworkPolicy(t *testing.T) {
	t.Parallel()
	h := newHost(t, setup{})
	restricted := func(rules ...obj) obj { return obj{"mode": "restricted", "allow": append([]obj{}, rules...)} }
	for _, tt := range []struct {
		policy any
		want   string
	}{
		{"restricted", "network_policy must be"},
		{obj{}, "network_policy.mode"},
		{obj{"mode": "ajar"}, "network_policy.mode"},
		{obj{"mode": "off"}, "network_policy.mode"},
		{restricted(obj{}), "network_policy.allow[0]"},
		{restricted(obj{"cidr": 7}), "network_policy.allow[0].cidr"},
		{restricted(obj{"name": "a", "ports": []int{443}}), "network_policy.allow[0].ports"},
		{restricted(obj{"name": "a", "ports": []string{"0"}}), "network_policy.allow[0].ports"},
		{restricted(obj{"cidr": "169.254.169.254"}), "network_policy.allow[0].cidr"},
		{restricted(obj{"name": "a", "protocol": "icmp"}), "network_policy.allow[0].protocol"},
	} {
		h.fails(t, "create", obj{"image": "python", "network": true, "network_policy": tt.policy}, "S001", tt.want)
	}
	h.fails(t, "create", obj{"image": "python", "network_policy": restricted()}, "S001", "network:true")
	for _, policy := range []any{nil, obj{"mode": "open"}, restricted(obj{"cidr": "203.0.113.0/24"}, obj{"name": "*.example.com", "ports": []string{"443", "8000-8100"}, "protocol": "tcp", "cidr": nil})} {
		id := h.create(t, obj{"network": true, "network_policy": policy})
		h.ok(t, "stop", obj{"sandbox_id": id, "wait": true})
	}
}

// Ports of the host are the operator's to give away.
func TestPublish(t *testing.T) {
	t.Parallel()
	request := obj{"image": "python", "network": true, "publish": []obj{{"guest_port": 80}}}
	newHost(t, setup{}).fails(t, "create", request, "S001", "III_SANDBOX_EXTENSIONS=1")

	h := newHost(t, setup{extensions: true})
	var reply struct {
		SandboxID string `json:"sandbox_id"`
		Published []struct {
			HostPort  int `json:"host_port"`
			GuestPort int `json:"guest_port"`
		}
	}
	raw, err := h.invoke("create", request)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(raw, &reply); err != nil {
		t.Fatal(err)
	}
	if len(reply.Published) != 1 || reply.Published[0].GuestPort != 80 {
		t.Fatalf("reply is %s", raw)
	}
	c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", reply.Published[0].HostPort))
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
	h.fails(t, "create", obj{"image": "python", "network": true, "publish": []obj{{"guest_port": 80, "host_port": reply.Published[0].HostPort}}}, "S300", "address already in use")
	h.fails(t, "create", obj{"image": "python", "network": true, "publish": []obj{{"guest_port": 70000}}}, "S001", "publish[0]")
	h.fails(t, "create", obj{"image": "python", "network": true, "publish": []obj{{"host_port": 1}}}, "S001", "publish[0].guest_port")
	h.fails(t, "create", obj{"image": "python", "publish": []obj{{"guest_port": 80}}}, "S001", "network:true")
	// A reply has nothing of it that was not asked for.
	raw, err = h.invoke("create", obj{"image": "python", "network": true})
	if err != nil || bytes.Contains(raw, []byte("published")) {
		t.Errorf("%s, %v", raw, err)
	}
}

// Only create differs, and only where the operator wants it.
func TestExtensions_AreInTheSchemasOnRequest(t *testing.T) {
	t.Parallel()
	h := newHost(t, setup{extensions: true})
	registered := map[string][2]json.RawMessage{}
	for _, f := range h.engine.Functions() {
		registered[f.ID] = [2]json.RawMessage{f.RequestFormat, f.ResponseFormat}
	}
	plain := contract.Functions()
	for i, f := range contract.Extended() {
		got := registered["sandbox-libkrun::"+f.Name]
		if !bytes.Equal(got[0], f.Request) || !bytes.Equal(got[1], f.Response) {
			t.Errorf("%s is registered as %s, %s", f.Name, got[0], got[1])
		}
		if same := bytes.Equal(f.Request, plain[i].Request) && bytes.Equal(f.Response, plain[i].Response); same == (f.Name == "create") {
			t.Errorf("%s: the same as without extensions: %v", f.Name, same)
		}
		for _, name := range []string{"network_policy", "publish"} {
			if bytes.Contains(plain[i].Request, []byte(`"`+name+`"`)) {
				t.Errorf("%s has %s in the contract's schema", f.Name, name)
			}
		}
	}
}
