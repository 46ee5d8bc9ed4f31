package rpcbuffers_test

import (
	"testing"

	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto"

	guestv1 "github.com/iii-hq/workers/sandbox-libkrun/api/guest/v1"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/rpcbuffers"
)

// Not parallel: Use changes gRPC as a whole.
func TestUse_AChunkTakesLittleMoreThanItsData(t *testing.T) {
	rpcbuffers.Use()
	const size = 64 << 10
	for name, message := range map[string]any{
		"read":  &guestv1.ReadFileResponse{Response: &guestv1.ReadFileResponse_Chunk{Chunk: make([]byte, size)}},
		"write": &guestv1.WriteFileRequest{Request: &guestv1.WriteFileRequest_Chunk{Chunk: make([]byte, size)}},
		"exec":  &guestv1.ExecResponse{Response: &guestv1.ExecResponse_Stdout{Stdout: make([]byte, size)}},
	} {
		data, err := encoding.GetCodecV2("proto").Marshal(message)
		if err != nil {
			t.Fatal(err)
		}
		for _, part := range data {
			if got := cap(part.ReadOnlyData()); got > size+size/8 {
				t.Errorf("%s: a chunk of %d bytes takes a buffer of %d", name, size, got)
			}
		}
		data.Free()
	}
}
