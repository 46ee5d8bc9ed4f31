package agent

import (
	"context"
	"errors"
	"io"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	guestv1 "github.com/iii-hq/workers/sandbox-libkrun/api/guest/v1"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/agent/fsops"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
)

// received is a message of an upload, or the end of its stream.
type received struct {
	msg *guestv1.WriteFileRequest
	err error
}

// WriteFile implements the service.
func (f *Files) WriteFile(stream guestv1.FileService_WriteFileServer) error {
	ctx := stream.Context()
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	start := first.GetStart()
	if start == nil {
		return status.Error(codes.InvalidArgument, "the first message of WriteFile must be start")
	}
	// The receiver ends with the stream, that is when this method has returned.
	messages := make(chan received)
	go func() {
		for {
			msg, err := stream.Recv()
			select {
			case messages <- received{msg, err}:
			case <-ctx.Done():
				return
			}
			if err != nil {
				return
			}
		}
	}()
	size, err := single(ctx, f, task{name: "write", path: start.GetPath(), slots: f.writes}, func(ctx context.Context) (uint64, error) {
		return f.upload(ctx, start, messages)
	})
	if err != nil {
		return err
	}
	return stream.SendAndClose(&guestv1.WriteFileResponse{BytesWritten: size})
}

// upload writes what the messages bring and returns the file's size.
func (f *Files) upload(ctx context.Context, start *guestv1.WriteFileStart, messages <-chan received) (uint64, error) {
	path := string(start.GetPath())
	u, err := fsops.Create(path, fsops.WriteOptions{Mode: start.GetMode(), Parents: start.GetParents()})
	if err != nil {
		return 0, err
	}
	defer u.Close()
	timer := time.NewTimer(f.stall)
	defer timer.Stop()
	for {
		var r received
		select {
		case r = <-messages:
		case <-ctx.Done():
			return 0, ctx.Err()
		case <-timer.C:
			return 0, fault.UploadAborted(path, "the upload stalled: nothing came for "+f.stall.String(), nil)
		}
		timer.Reset(f.stall)
		switch {
		case errors.Is(r.err, io.EOF):
			return 0, fault.UploadAborted(path, "the upload closed early, before its commit: nothing was written", nil)
		case r.err != nil:
			return 0, r.err
		case r.msg.GetCommit() != nil:
			return u.Commit()
		}
		data, ok := r.msg.GetRequest().(*guestv1.WriteFileRequest_Chunk)
		if !ok || len(data.Chunk) > maxChunk {
			return 0, status.Error(codes.InvalidArgument, "after start WriteFile takes chunks of at most 64 KiB and one commit")
		}
		if _, err := u.Write(data.Chunk); err != nil {
			return 0, err
		}
	}
}
