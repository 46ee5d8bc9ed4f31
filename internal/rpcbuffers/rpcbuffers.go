// Package rpcbuffers sets the sizes of gRPC's message buffers. All three programs
// of this module call Use, since each of them holds what passes between a caller
// and a guest.
package rpcbuffers

import (
	"google.golang.org/grpc/experimental"
	"google.golang.org/grpc/mem"
)

// chunk holds a message with 64 KiB of data, the most that one carries
// (api/proto/guest/v1), and the fields around it.
const chunk = 64<<10 + 512

// Use gives gRPC buffers that fit our messages. Its own have 32 KiB or 1 MiB: a
// chunk would take 1 MiB, zeroed for each, and a hundred readers that have
// stopped reading all the memory of a small guest. It must be called once, before
// anything else of gRPC.
func Use() {
	experimental.SetDefaultBufferPool(mem.NewTieredBufferPool(256, 4<<10, 16<<10, 32<<10, chunk, 256<<10, 1<<20))
}
