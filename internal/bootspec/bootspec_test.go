package bootspec_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/egress"
)

func valid() *bootspec.Spec {
	return &bootspec.Spec{
		Version: bootspec.Version, ID: "vm", VMM: bootspec.QEMU, Lifetime: bootspec.Detached, IdleTimeoutMs: 1500,
		Dir: "/dir", Socket: "/run/vm.sock", CPUs: 2, MemoryMiB: 512,
		Lower: bootspec.Disk{Path: "/lower", ReadOnly: true}, Upper: bootspec.Disk{Path: "/upper", Durable: true},
		QEMU: &bootspec.QEMUSpec{Binary: "/qemu", Machine: "microvm", TSCKHz: 2_400_000, Kernel: "/vmlinux", Initramfs: "/initramfs"},
		Guest: bootspec.Guest{
			Version: bootspec.Version, Token: strings.Repeat("0f", 16), Hostname: "sandbox", Env: []string{"A=1", "B=<&>\n\u2028"}, NoFile: 1024,
			Interface: bootspec.NewInterface(1500, true),
		},
		Network: &bootspec.Network{Policy: open(), Publish: []bootspec.PublishedPort{{Host: 8080, Guest: 80}, {Guest: 443}, {Guest: 444}}},
	}
}

func open() egress.Policy { return egress.Policy{Mode: egress.Open, HostPorts: []uint16{8000}} }

func encode(t testing.TB, s *bootspec.Spec) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := bootspec.Write(&b, s); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestRoundTrip(t *testing.T) {
	t.Parallel()
	r := iotest.HalfReader(bytes.NewReader(append(encode(t, valid()), "next"...)))
	got, err := bootspec.Read(r)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, valid()) {
		t.Errorf("it came back as %+v", got)
	}
	if rest, err := io.ReadAll(r); err != nil || string(rest) != "next" {
		t.Errorf("behind it: %q, %v", rest, err)
	}
	if got.IdleTimeout() != 1500*time.Millisecond {
		t.Errorf("idle timeout is %v", got.IdleTimeout())
	}
}

func TestValidateNamesEveryFault(t *testing.T) {
	t.Parallel()
	for want, change := range map[string]func(*bootspec.Spec){
		"version is 1":          func(s *bootspec.Spec) { s.Version = 1 },
		"id is empty":           func(s *bootspec.Spec) { s.ID = "" },
		"lifetime is":           func(s *bootspec.Spec) { s.Lifetime = "eternal" },
		"idle_timeout_ms":       func(s *bootspec.Spec) { s.IdleTimeoutMs = -1 },
		"cpus is 0":             func(s *bootspec.Spec) { s.CPUs = 0 },
		"cpus is 256":           func(s *bootspec.Spec) { s.CPUs = 256 },
		"memory_mib is 63":      func(s *bootspec.Spec) { s.MemoryMiB = 63 },
		"memory_mib is 1048577": func(s *bootspec.Spec) { s.MemoryMiB = 1<<20 + 1 },
		"lower.path is empty":   func(s *bootspec.Spec) { s.Lower.Path = "" },
		"upper.path is \"up\"":  func(s *bootspec.Spec) { s.Upper.Path = "up" },
		"socket is":             func(s *bootspec.Spec) { s.Socket = "/a\nb" },
		"qemu.kernel is":        func(s *bootspec.Spec) { s.QEMU.Kernel = "/a\x00" },
		"qemu part is missing":  func(s *bootspec.Spec) { s.QEMU = nil },
		"qemu.tsc_khz":          func(s *bootspec.Spec) { s.QEMU.TSCKHz = 0 },
		"libkrun.firmware is \"fw\"": func(s *bootspec.Spec) {
			s.Libkrun = &bootspec.LibkrunSpec{Library: "/lib", Firmware: "fw", Root: "/root"}
		},
		"libkrun.root is empty":     func(s *bootspec.Spec) { s.Libkrun = &bootspec.LibkrunSpec{Library: "/lib", Firmware: "/fw"} },
		"guest.interface must both": func(s *bootspec.Spec) { s.Guest.Interface = nil },
		"network: policy: mode":     func(s *bootspec.Spec) { s.Network.Policy.Mode = "ajar" },
		"policy: mode is off":       func(s *bootspec.Spec) { s.Network.Policy = egress.Policy{Mode: egress.Off} },
		"publish[0].guest is 0":     func(s *bootspec.Spec) { s.Network.Publish[0].Guest = 0 },
		"published twice":           func(s *bootspec.Spec) { s.Network.Publish[1].Host = 8080 },
		"publish has 65": func(s *bootspec.Spec) {
			s.Network.Publish = slices.Repeat([]bootspec.PublishedPort{{Guest: 1}}, 65)
		},
		"interface: mac":                  func(s *bootspec.Spec) { s.Guest.Interface.MAC = "01:00:5e:00:00:01" },
		"mtu is 1279":                     func(s *bootspec.Spec) { s.Guest.Interface.MTU = 1279 },
		"mtu is 65521":                    func(s *bootspec.Spec) { s.Guest.Interface.MTU = 65521 },
		"0 addresses":                     func(s *bootspec.Spec) { s.Guest.Interface.Addresses = nil },
		"addresses[0] is 127":             func(s *bootspec.Spec) { s.Guest.Interface.Addresses[0] = netip.MustParsePrefix("127.0.0.1/8") },
		"addresses[1] is the":             func(s *bootspec.Spec) { s.Guest.Interface.Addresses[1] = s.Guest.Interface.Addresses[0] },
		"198.18.0.2/30, which no gateway": func(s *bootspec.Spec) { s.Guest.Interface.Gateways[0] = netip.MustParseAddr("10.0.0.1") },
		"fd9c:3f1e:7a52::2/64, which":     func(s *bootspec.Spec) { s.Guest.Interface.Gateways[1] = s.Guest.Interface.Gateways[0] },
		"name_servers[0] is 0.0.0.0": func(s *bootspec.Spec) {
			s.Guest.Interface.NameServers = []netip.Addr{netip.IPv4Unspecified()}
		},
		"vmm is \"xen\"":        func(s *bootspec.Spec) { s.VMM = "xen" },
		"guest: version is 0":   func(s *bootspec.Spec) { s.Guest.Version = 0 },
		"token is not":          func(s *bootspec.Spec) { s.Guest.Token = "short" },
		"hostname \"-x\"":       func(s *bootspec.Spec) { s.Guest.Hostname = "-x" },
		"hostname \"\"":         func(s *bootspec.Spec) { s.Guest.Hostname = "" },
		"env[1] is not":         func(s *bootspec.Spec) { s.Guest.Env = []string{"A=", "=B"} },
		"env[0] (A) has a NUL":  func(s *bootspec.Spec) { s.Guest.Env = []string{"A=secret\x00"} },
		"env[0] (\"A\") is not": func(s *bootspec.Spec) { s.Guest.Env = []string{"A=secret\xff"} },
		"bytes as JSON":         func(s *bootspec.Spec) { s.Guest.Env = []string{"A=" + strings.Repeat("\x01", bootspec.MaxEnv-3)} },
		"more than 262144":      func(s *bootspec.Spec) { s.Guest.Env = []string{"A=" + strings.Repeat("x", bootspec.MaxEnv)} },
	} {
		s := valid()
		change(s)
		err := s.Validate()
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error is %v", want, err)
			continue
		}
		if strings.Contains(err.Error(), "secret") {
			t.Errorf("the error shows a value: %v", err)
		}
	}
	several := valid()
	several.CPUs, several.Lower.Path = 0, ""
	if err := several.Validate(); err == nil || strings.Count(err.Error(), "\n") != 1 {
		t.Errorf("two faults: %v", err)
	}
	if err := valid().Validate(); err != nil {
		t.Errorf("a valid spec: %v", err)
	}
}

func TestReadRefuses(t *testing.T) {
	t.Parallel()
	good := encode(t, valid())
	for name, tt := range map[string]struct{ in, want string }{
		"magic":      {"IIISPEC9" + string(good[8:]), "begins with"},
		"length":     {"IIISPEC1xxxxxxxx", "not a hexadecimal"},
		"too long":   {"IIISPEC1fffffff0", "not a hexadecimal number up to"},
		"field":      {framed(`{"version":2,"colour":"red"}`), "unknown field"},
		"older":      {framed(`{"version":1,"colour":"red"}`), "version is 1"},
		"two values": {framed(`{"version":2}{}`), "more than one"},
		"no object":  {framed(`[]`), "cannot unmarshal"},
		"invalid":    {framed(`{"version":2}`), "id is empty"},
	} {
		if _, err := bootspec.Read(strings.NewReader(tt.in)); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for n := range good {
		if _, err := bootspec.Read(bytes.NewReader(good[:n])); !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Fatalf("%d of %d bytes: %v", n, len(good), err)
		}
	}
}

func framed(body string) string {
	const hex = "0123456789abcdef"
	n := len(body)
	return "IIISPEC1000000" + string([]byte{hex[n>>4&15], hex[n&15]}) + body
}

func TestWriteRefusesTooMuch(t *testing.T) {
	t.Parallel()
	s := valid()
	s.Guest.Env = []string{"A=" + strings.Repeat("x", bootspec.MaxSize)}
	var b bytes.Buffer
	if err := bootspec.Write(&b, s); err == nil || b.Len() != 0 {
		t.Errorf("wrote %d bytes, %v", b.Len(), err)
	}
}

// The largest environment that Validate takes fits a document, however it has
// to be quoted.
func TestLargestEnvironmentFits(t *testing.T) {
	t.Parallel()
	s := valid()
	s.Guest.Env = []string{"A=" + strings.Repeat("\"", bootspec.MaxEnv-3)}
	if err := s.Validate(); err != nil {
		t.Fatal(err)
	}
	if _, err := bootspec.Read(bytes.NewReader(encode(t, s))); err != nil {
		t.Error(err)
	}
}

func TestRedactedKeepsNoSecret(t *testing.T) {
	t.Parallel()
	s := valid()
	body, err := json.Marshal(s.Redacted())
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(body, []byte(s.Guest.Token)) || bytes.Contains(body, []byte("A=1")) {
		t.Errorf("redacted: %s", body)
	}
	parsed, err := bootspec.Parse(body)
	if err != nil {
		t.Fatal(err)
	}
	parsed.Guest.Token, parsed.Guest.Env = s.Guest.Token, s.Guest.Env
	if !reflect.DeepEqual(parsed, s) {
		t.Errorf("with its secrets back it is %+v", parsed)
	}
}

func TestStatusesAreTheClasses(t *testing.T) {
	t.Parallel()
	seen := map[int]bool{}
	for _, class := range []bootspec.EndClass{bootspec.EndBadSpec, bootspec.EndRefused, bootspec.EndCrashed, bootspec.EndGuest, bootspec.EndKilled} {
		status := class.ExitStatus()
		if back, ok := bootspec.ClassOfStatus(status); !ok || back != class || seen[status] {
			t.Errorf("%s is status %d is %s", class, status, back)
		}
		seen[status] = true
	}
	for _, status := range []int{1, 2, 255, -1} {
		if class, ok := bootspec.ClassOfStatus(status); ok {
			t.Errorf("status %d is %s", status, class)
		}
	}
}

func FuzzRead(f *testing.F) {
	f.Add(encode(f, valid()))
	f.Add([]byte("IIISPEC1000000"))
	f.Add([]byte(framed(`{"version":2,"qemu":null}`)))
	f.Add([]byte(framed(`{"version":2,"vmm":"qemu","guest":{"env":[null]}}`)))
	f.Fuzz(func(t *testing.T, in []byte) {
		s, err := bootspec.Read(bytes.NewReader(in))
		if err != nil {
			return
		}
		again, err := bootspec.Read(bytes.NewReader(encode(t, s)))
		if err != nil || !reflect.DeepEqual(normal(s), normal(again)) {
			t.Errorf("%+v came back as %+v, %v", s, again, err)
		}
	})
}

// normal drops the difference between an empty and no environment.
func normal(s *bootspec.Spec) *bootspec.Spec {
	c := *s
	if len(c.Guest.Env) == 0 {
		c.Guest.Env = nil
	}
	return &c
}

func FuzzParseGuest(f *testing.F) {
	body, err := json.Marshal(valid().Guest)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(body)
	f.Add([]byte(`{}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		g, err := bootspec.ParseGuest(in)
		if err == nil && g.Validate() != nil {
			t.Errorf("accepted an invalid guest: %+v", g)
		}
	})
}
