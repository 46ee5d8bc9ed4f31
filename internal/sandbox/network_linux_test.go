package sandbox_test

import (
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/sandbox"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/vmtest"
)

// URLs of the host's loopback lead to the gateway where the operator has opened
// their port, and only then.
func TestCreate_LeadsLoopbackURLsToTheGateway(t *testing.T) {
	t.Parallel()
	const gateway = "198.18.0.1"
	values := map[string]string{ // what is given, and what a sandbox with a network gets
		"http://localhost:8000":          "http://" + gateway + ":8000",
		"HTTP://LocalHost:8000/x?y#z":    "HTTP://" + gateway + ":8000/x?y#z",
		"ws://127.0.0.1:8000/":           "ws://" + gateway + ":8000/",
		"http://[::1]:8000":              "http://" + gateway + ":8000",
		"http://0.0.0.0:8000":            "http://" + gateway + ":8000",
		"redis://u:p@localhost:8000/0":   "redis://u:p@" + gateway + ":8000/0",
		"http://localhost/x":             "http://" + gateway + "/x",
		"wss://localhost":                "wss://localhost", // 443 is not open
		"postgres://localhost/x":         "postgres://localhost/x",
		"http://localhost:8001":          "http://localhost:8001",
		"http://localhost:80000":         "http://localhost:80000",
		"http://localhost.example:8000":  "http://localhost.example:8000",
		"http://localhost:8000.example":  "http://localhost:8000.example",
		"http://127.0.0.10:8000":         "http://127.0.0.10:8000",
		"http://example/?u=localhost:80": "http://example/?u=localhost:80",
		"localhost:8000":                 "localhost:8000",
		"nats://localhost:8000,nats://localhost:8001,nats://127.0.0.1:80": "nats://" + gateway + ":8000,nats://localhost:8001,nats://" + gateway + ":80",
		`{"url":"http://localhost:8000"}`:                                 `{"url":"http://` + gateway + `:8000"}`,
		"http://localhost:8000 http://localhost:80":                       "http://" + gateway + ":8000 http://" + gateway + ":80",
	}
	h := newHost(t, &vmtest.Fake{}, func(c *sandbox.Config) { c.HostPorts = []uint16{8000, 80} })
	env := map[string]string{}
	var given []string
	for value := range values {
		key := fmt.Sprintf("V%d", len(given))
		given = append(given, value)
		env[key] = value
	}
	for _, network := range []bool{true, false} {
		made, err := h.Create(t.Context(), sandbox.CreateRequest{Image: "python", Network: network, Env: sandbox.Env{Map: env}})
		if err != nil {
			t.Fatal(err)
		}
		reply, err := h.Exec(t.Context(), shell(made.SandboxID, "env"))
		if err != nil {
			t.Fatal(err)
		}
		for i, value := range given {
			want := value
			if network {
				want = values[value]
			}
			if line := fmt.Sprintf("V%d=%s\n", i, want); !strings.Contains(reply.Stdout, line) {
				t.Errorf("network %v: %q did not become %q", network, value, want)
			}
		}
	}
}

func TestCreate_Publishes(t *testing.T) {
	t.Parallel()
	h := newHost(t, &vmtest.Fake{}, nil)
	req := sandbox.CreateRequest{Image: "python", Network: true, Publish: []sandbox.PublishedPort{{Guest: 80}}}
	made, err := h.Create(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	if len(made.Published) != 1 || made.Published[0].Host == 0 || made.Published[0].Guest != 80 {
		t.Fatalf("published: %+v", made.Published)
	}
	address := fmt.Sprintf("127.0.0.1:%d", made.Published[0].Host)
	conn, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	if err := conn.Close(); err != nil {
		t.Error(err)
	}
	// A port that is taken is a boot that fails, and says which.
	req.Publish[0].Host = made.Published[0].Host
	_, err = h.Create(t.Context(), req)
	wantCode(t, err, fault.S300, address, "publish another port")
	if _, err := h.Stop(t.Context(), made.SandboxID, true); err != nil {
		t.Fatal(err)
	}
	if conn, err := net.Dial("tcp", address); err == nil {
		_ = conn.Close()
		t.Error("the port outlived its sandbox")
	}
	if _, err := h.Create(t.Context(), req); err != nil {
		t.Errorf("the port is free again: %v", err)
	}
}
