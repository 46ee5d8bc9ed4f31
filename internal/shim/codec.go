package shim

import (
	"fmt"

	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // registers the codec behind rawCodec
	"google.golang.org/grpc/mem"
)

// frame is a message that is passed on as it came.
type frame struct {
	// data is counted once for its holder; sending it gives that up.
	data mem.BufferSlice
}

// rawCodec leaves a *frame as it is and everything else to the codec "proto",
// whose name it bears: the other end shall not see a difference.
type rawCodec struct{}

func (rawCodec) Name() string { return "proto" }

func (rawCodec) Marshal(v any) (mem.BufferSlice, error) {
	if f, ok := v.(*frame); ok {
		data := f.data
		f.data = nil
		return data, nil
	}
	return proto().Marshal(v)
}

func (rawCodec) Unmarshal(data mem.BufferSlice, v any) error {
	if f, ok := v.(*frame); ok {
		data.Ref()
		f.data = data
		return nil
	}
	return proto().Unmarshal(data, v)
}

func proto() encoding.CodecV2 { return encoding.GetCodecV2("proto") }

var _ fmt.Stringer = (*frame)(nil)

// String keeps what is passed on out of every log.
func (f *frame) String() string { return fmt.Sprintf("frame of %d bytes", f.data.Len()) }
