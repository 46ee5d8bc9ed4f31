package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// tryWait bounds each try: what is possible is possible at once.
const tryWait = 3 * time.Second

// finding is the outcome of an escape.
type finding struct {
	// Interfaces are those but lo, Routes the default routes and those to others.
	Interfaces, Routes []string
	// NetworkDevices are the virtio network devices, also without a driver.
	NetworkDevices []string
	// Reached are the tries that reached somebody: empty where all is well.
	Reached []string
	// Tried are the names of all tries.
	Tried []string
}

// A try reports whether it reached anybody.
type try struct {
	name string
	do   func() bool
}

// escape tries what a guest without a network may try to reach something. secrets
// are addresses at which the host has a server.
func escape(secrets []string) finding {
	var out finding
	if links, err := net.Interfaces(); err == nil {
		for _, l := range links {
			if l.Flags&net.FlagLoopback == 0 {
				out.Interfaces = append(out.Interfaces, l.Name)
			}
		}
	}
	out.Routes = routes()
	for _, dir := range glob("/sys/bus/virtio/devices/*") {
		if id, err := os.ReadFile(dir + "/device"); err == nil && strings.TrimSpace(string(id)) == "0x0001" {
			out.NetworkDevices = append(out.NetworkDevices, filepath.Base(dir))
		}
	}
	var mu sync.Mutex
	var tries sync.WaitGroup
	for _, t := range allTries(secrets) {
		out.Tried = append(out.Tried, t.name)
		tries.Go(func() {
			if t.do() {
				mu.Lock()
				defer mu.Unlock()
				out.Reached = append(out.Reached, t.name)
			}
		})
	}
	tries.Wait()
	return out
}

func glob(pattern string) []string {
	names, _ := filepath.Glob(pattern) // the pattern is well-formed
	return names
}

// routes reads the kernel's tables, but for what concerns lo.
func routes() []string {
	var out []string
	for _, table := range []string{"/proc/net/route", "/proc/net/ipv6_route"} {
		text, err := os.ReadFile(table)
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(text)) {
			fields := strings.Fields(line)
			device := ""
			if len(fields) > 0 {
				device = fields[len(fields)-1]
				if table == "/proc/net/route" {
					device = fields[0]
				}
			}
			if device != "" && device != "lo" && device != "Iface" {
				out = append(out, strings.Join(fields, " "))
			}
		}
	}
	return out
}

// elsewhere are addresses at which VMMs, their networks and clouds answer: slirp,
// passt and gvproxy, other gateways of ours, the metadata services, and the
// internet's best-known name server.
func elsewhere() []string {
	return []string{
		"10.0.2.2", "10.0.2.3", "192.168.127.1", "192.168.127.254", "192.168.122.1", "172.17.0.1", "100.96.0.1", "198.18.0.1",
		"169.254.169.254", "169.254.1.1", "8.8.8.8", "224.0.0.1", "255.255.255.255", "0.0.0.0", "127.0.0.1", "127.0.0.2",
		"::1", "::", "fd9c:3f1e:7a52::1", "fe80::1%lo", "fd00:ec2::254", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2001:4860:4860::8888",
	}
}

func allTries(secrets []string) []try {
	var tries []try
	hosts := elsewhere()
	ports := map[string]bool{"53": true, "80": true}
	for _, secret := range secrets {
		if host, port, err := net.SplitHostPort(secret); err == nil {
			hosts, ports[port] = append(hosts, host), true
		}
	}
	for i, host := range hosts {
		id := uint16(i) + 1
		for port := range ports {
			address := net.JoinHostPort(host, port)
			tries = append(tries, try{"tcp " + address, func() bool { return connects(address) }},
				try{"udp " + address, func() bool { return answers(address) }})
		}
		tries = append(tries, try{"ping " + host, func() bool { return pings(host, id) }})
	}
	for _, name := range []string{"host.iii.internal", "host.docker.internal", "gateway", "example.com", "metadata.google.internal"} {
		tries = append(tries, try{"lookup " + name, func() bool { return resolves(name) }})
	}
	for _, port := range []uint32{0, 1, 22, 80, 111, 1023, 1025, 2375, 9999, 49134, 1 << 30, unix.VMADDR_PORT_ANY - 1} {
		for _, cid := range []uint32{unix.VMADDR_CID_HYPERVISOR, unix.VMADDR_CID_HOST, 3, 4} {
			tries = append(tries, try{fmt.Sprintf("vsock %d:%d", cid, port), func() bool { return vsockAnswers(cid, port) }})
		}
	}
	return append(tries,
		try{"a second link to the shim", func() bool { return vsockAnswers(unix.VMADDR_CID_HOST, 1024) }},
		try{"a raw frame on every device", rawFrame},
		try{"a raw packet with a foreign source", rawPacket},
		try{"a rescan of the buses", rescan},
		try{"abstract sockets of the host", abstractSockets},
	)
}

// connects makes a TCP connection. The guest itself listens nowhere.
func connects(address string) bool {
	c, err := net.DialTimeout("tcp", address, tryWait)
	if err != nil {
		return false
	}
	_ = c.Close()
	return true
}

// answers sends a DNS question, which most things on these ports answer.
func answers(address string) bool {
	c, err := net.DialTimeout("udp", address, tryWait)
	if err != nil {
		return false
	}
	defer c.Close() //nolint:errcheck // a try
	question := []byte("\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x07example\x03com\x00\x00\x01\x00\x01")
	if _, err := c.Write(question); err != nil {
		return false
	}
	_ = c.SetReadDeadline(time.Now().Add(tryWait))
	_, err = c.Read(make([]byte, 1500))
	return err == nil
}

// pings sends an echo request that no process of this guest's loopback counts for.
func pings(host string, id uint16) bool {
	ip := net.ParseIP(host)
	if ip == nil || ip.To4() == nil || ip.IsLoopback() || ip.IsUnspecified() {
		return false
	}
	c, err := net.DialTimeout("ip4:icmp", host, tryWait)
	if err != nil {
		return false
	}
	defer c.Close()                           //nolint:errcheck // a try
	request := []byte{8, 0, 0, 0, 0, 0, 0, 0} // with a checksum, and an id
	binary.BigEndian.PutUint16(request[2:], ^(8<<8 + id))
	binary.BigEndian.PutUint16(request[4:], id)
	if _, err := c.Write(request); err != nil {
		return false
	}
	_ = c.SetReadDeadline(time.Now().Add(tryWait))
	for packet := make([]byte, 1500); ; {
		n, err := c.Read(packet)
		if err != nil {
			return false
		}
		if isEchoReply(packet[:n], id) {
			return true
		}
	}
}

// isEchoReply tells the answer to a request of this id from other packets: until it
// is connected, a raw socket gets what other tries cause, too. Packets of raw sockets
// have their IP header.
func isEchoReply(packet []byte, id uint16) bool {
	if len(packet) > 0 && packet[0]>>4 == 4 {
		packet = packet[min(int(packet[0]&0xf)*4, len(packet)):]
	}
	return len(packet) >= 8 && packet[0] == 0 && packet[1] == 0 && binary.BigEndian.Uint16(packet[4:]) == id
}

func resolves(name string) bool {
	ctx, cancel := context.WithTimeout(context.Background(), 2*tryWait)
	defer cancel()
	_, err := net.DefaultResolver.LookupHost(ctx, name)
	return err == nil
}

// vsockAnswers is true where the other end accepts and then says anything, or
// takes what it is told without hanging up.
func vsockAnswers(cid, port uint32) bool {
	fd, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd) //nolint:errcheck // a try
	wait := unix.NsecToTimeval(int64(tryWait))
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait)
	_ = unix.SetsockoptTimeval(fd, unix.AF_VSOCK, unix.SO_VM_SOCKETS_CONNECT_TIMEOUT, &wait)
	if err := unix.Connect(fd, &unix.SockaddrVM{CID: cid, Port: port}); err != nil {
		return false
	}
	if _, err := unix.Write(fd, []byte("GET / HTTP/1.0\r\n\r\n")); err != nil {
		return false
	}
	n, err := unix.Read(fd, make([]byte, 100))
	return err == nil && n > 0
}

// rawFrame asks by ARP, on every device but lo, who else is there.
func rawFrame() bool {
	links, err := net.Interfaces()
	if err != nil {
		return false
	}
	for _, l := range links {
		if l.Flags&net.FlagLoopback == 0 && asks(l) {
			return true
		}
	}
	return false
}

func asks(l net.Interface) bool {
	const arp = 0x0806
	protocol := int(binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, arp)))
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return false
	}
	defer unix.Close(fd) //nolint:errcheck // a try
	wait := unix.NsecToTimeval(int64(tryWait))
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait)
	frame := append([]byte("\xff\xff\xff\xff\xff\xff"), l.HardwareAddr...)
	frame = append(frame, "\x08\x06\x00\x01\x08\x00\x06\x04\x00\x01"...)
	frame = append(append(frame, l.HardwareAddr...), 198, 18, 0, 2, 0, 0, 0, 0, 0, 0, 198, 18, 0, 1)
	if err := unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: l.Index, Protocol: uint16(protocol)}); err != nil {
		return false
	}
	n, _, err := unix.Recvfrom(fd, make([]byte, 100), 0)
	return err == nil && n > 0
}

// rawPacket sends a TCP segment with a source of its own making.
func rawPacket() bool {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err != nil {
		return false
	}
	defer unix.Close(fd) //nolint:errcheck // a try
	packet := make([]byte, 40)
	packet[0], packet[8], packet[9] = 0x45, 64, unix.IPPROTO_TCP
	copy(packet[12:], []byte{10, 9, 8, 7, 8, 8, 8, 8})
	// That it could be sent says that there is a route.
	return unix.Sendto(fd, packet, 0, &unix.SockaddrInet4{Addr: [4]byte{8, 8, 8, 8}}) == nil
}

// rescan looks for a device that the VMM may have kept back.
func rescan() bool {
	before := len(glob("/sys/bus/virtio/devices/*"))
	_ = os.WriteFile("/sys/bus/pci/rescan", []byte("1"), 0o200)
	return len(glob("/sys/bus/virtio/devices/*")) > before
}

// abstractSockets connects to names that hosts often have, which would be seen if
// the guest were a process of theirs.
func abstractSockets() bool {
	for _, name := range []string{"@/tmp/.X11-unix/X0", "@/org/kernel/udev", "/run/docker.sock", "/run/dbus/system_bus_socket"} {
		if c, err := net.DialTimeout("unix", name, tryWait); err == nil {
			_ = c.Close()
			return true
		}
	}
	return false
}
