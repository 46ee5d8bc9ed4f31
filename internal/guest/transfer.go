package guest

import (
	"context"
	"errors"
	"io"

	"google.golang.org/grpc"

	guestv1 "github.com/iii-hq/workers/sandbox-libkrun/api/guest/v1"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
)

// fileChunk is the most data in one message.
const fileChunk = 64 << 10

func isEOF(err error) bool { return errors.Is(err, io.EOF) }

// File is a file of the guest being read. It is not for concurrent use. The
// agent reads ahead only as far as the reader follows.
type File struct {
	// Size in bytes as the file system tells it; a file of /proc tells 0, and a
	// file may grow while it is read.
	Size uint64
	// Mode is the 12 permission bits, MtimeUnix in seconds since 1970.
	Mode      uint32
	MtimeUnix int64

	ctx    context.Context //nolint:containedctx // the lifetime of the call under the file
	cancel context.CancelFunc
	path   string
	stream grpc.ServerStreamingClient[guestv1.ReadFileResponse]
	rest   []byte
	err    error
}

// OpenFile begins to read the regular file at path, following links. ctx bounds
// the whole transfer. The caller closes the File.
func (c *Client) OpenFile(ctx context.Context, path string) (_ *File, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer func() {
		if err != nil {
			cancel()
		}
	}()
	stream, err := c.files.ReadFile(ctx, &guestv1.ReadFileRequest{Path: []byte(path)})
	if err != nil {
		return nil, fileError(ctx, "read", path, err)
	}
	first, err := stream.Recv()
	if err != nil && !isEOF(err) {
		return nil, fileError(ctx, "read", path, err)
	}
	header := first.GetHeader()
	if header == nil {
		return nil, fault.FileRefused(path, errProtocol.Error(), errProtocol)
	}
	return &File{
		Size: header.GetSize(), Mode: header.GetMode() & 0o7777, MtimeUnix: header.GetMtimeUnix(),
		ctx: ctx, cancel: cancel, path: path, stream: stream,
	}, nil
}

// Read implements io.Reader. io.EOF means that the content is complete; any other
// error is a fault, or the end of the context.
func (f *File) Read(p []byte) (int, error) {
	for len(f.rest) == 0 && f.err == nil {
		msg, err := f.stream.Recv()
		switch {
		case isEOF(err):
			f.err = io.EOF
		case err != nil:
			f.err = fileError(f.ctx, "read", f.path, err)
		default:
			f.rest = msg.GetChunk()
		}
	}
	if len(f.rest) == 0 {
		return 0, f.err
	}
	n := copy(p, f.rest)
	f.rest = f.rest[n:]
	return n, nil
}

// Close ends the transfer, complete or not. It always returns nil.
func (f *File) Close() error {
	f.cancel()
	return nil
}

// WriteOptions is how a file is written.
type WriteOptions struct {
	// Mode is the file's mode in the end.
	Mode uint32
	// Parents makes missing directories above it.
	Parents bool
}

// WriteFile makes or replaces the file at path with what body gives up to io.EOF,
// in one step, and returns its size in bytes. On any error nothing is written;
// an error of body is S218 unless it is a fault itself. When the guest refuses
// the file the call returns at once: a Read of body may then still be under way,
// and the caller makes it return, by closing what is below.
func (c *Client) WriteFile(ctx context.Context, path string, opts WriteOptions, body io.Reader) (uint64, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.files.WriteFile(ctx)
	if err != nil {
		return 0, fileError(ctx, "write", path, err)
	}
	start := &guestv1.WriteFileStart{Path: []byte(path), Mode: opts.Mode, Parents: opts.Parents}
	sent := make(chan error, 1)
	go func() { sent <- sendFile(stream, start, body) }()
	var reply guestv1.WriteFileResponse
	answered := make(chan error, 1)
	go func() { answered <- stream.RecvMsg(&reply) }()
	for {
		select {
		case err := <-answered:
			if err != nil {
				return 0, fileError(ctx, "write", path, err)
			}
			return reply.GetBytesWritten(), nil
		case err := <-sent:
			sent = nil
			var broken *bodyError
			if errors.As(err, &broken) {
				cancel()
				return 0, broken.fault(path)
			}
			// Sent, or the guest has ended the call: the answer says which.
		}
	}
}

// bodyError is a body that could not be read.
type bodyError struct{ err error }

func (e *bodyError) Error() string { return e.err.Error() }

func (e *bodyError) fault(path string) error {
	var known *fault.Error
	if errors.As(e.err, &known) || errors.Is(e.err, context.Canceled) {
		return e.err
	}
	return fault.UploadAborted(path, "the upload was aborted: "+e.err.Error(), e.err)
}

func sendFile(stream grpc.ClientStreamingClient[guestv1.WriteFileRequest, guestv1.WriteFileResponse], start *guestv1.WriteFileStart, body io.Reader) error {
	if err := stream.Send(&guestv1.WriteFileRequest{Request: &guestv1.WriteFileRequest_Start{Start: start}}); err != nil {
		return err
	}
	for {
		// Not reused: the transport may still hold the last one.
		buffer := make([]byte, fileChunk)
		n, err := body.Read(buffer)
		if n > 0 {
			chunk := &guestv1.WriteFileRequest_Chunk{Chunk: buffer[:n]}
			if err := stream.Send(&guestv1.WriteFileRequest{Request: chunk}); err != nil {
				return err
			}
		}
		if isEOF(err) {
			break
		}
		if err != nil {
			return &bodyError{err}
		}
	}
	commit := &guestv1.WriteFileRequest_Commit{Commit: &guestv1.WriteFileCommit{}}
	if err := stream.Send(&guestv1.WriteFileRequest{Request: commit}); err != nil {
		return err
	}
	return stream.CloseSend()
}
