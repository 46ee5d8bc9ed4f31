// Package agentlink is what the two ends of a guest link share before HTTP/2
// begins on it: the frame on the console port iii.env that carries the guest's
// environment, the resynchronisation of a serial link, and the greeting by which
// the agent proves that it is the agent.
//
// Order on a link: on a serial port first [ResyncHost] with [ResyncGuest], on
// every link then [Greet] with [Welcome], then HTTP/2 with the agent as the
// server. Nothing here logs, and no error text contains a token or a payload.
package agentlink

import (
	"io"
	"time"
)

// ProtocolVersion is the version of the frame, of the greeting and of the
// guest.v1 service. Both ends refuse another one and name both versions.
const ProtocolVersion = 1

// Names of the virtio-console ports, as the guest finds them in
// /sys/class/virtio-ports/*/name.
const (
	// EnvPort carries one env frame from host to guest.
	EnvPort = "iii.env"
	// AgentPort is the link where the VMM has no vsock.
	AgentPort = "iii.agent"
)

// VsockPort is the port of the host that the agent dials where the VMM has
// vsock.
const VsockPort = 1024

// StatusNoAgent is the exit status that the agent gives a VMM that ends with what
// its guest told it (libkrun), from its first moment on; at an orderly end it
// gives 0. So this is what the VM of an agent that died ends with. No VMM uses it
// for anything else: libkrun's own are 125 to 127 and 148 to 153.
const StatusNoAgent = 99

// MaxEnv is the most bytes that the payload of an env frame may have.
const MaxEnv = 1 << 20

// Conn is one end of a link. net.Conn is one; a guest's port file is one when
// its Read waits while the host end is not connected instead of returning
// io.EOF.
type Conn interface {
	io.ReadWriter
	SetDeadline(t time.Time) error
}
