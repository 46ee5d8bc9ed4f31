// Package agent is the service that the guest's PID 1 offers to its shim:
// api/proto/guest/v1 on the link that agent/boot opened. It also runs inside an
// ordinary process, with a Table of mode OwnOnly, for tests without a VM.
package agent
