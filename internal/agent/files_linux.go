package agent

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	guestv1 "github.com/iii-hq/workers/sandbox-libkrun/api/guest/v1"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/agent/fsops"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
)

const (
	// maxFileCalls is how many file operations run at a time, with those that the
	// kernel does not answer: each may hold a thread.
	maxFileCalls = 128
	// fileStall is how long an upload may say nothing, and a disk that is read.
	fileStall = 30 * time.Second
	// undoTime is how long a call that was ended waits for its operation to clean
	// up; after that the operation does so by itself, whenever the kernel lets it.
	undoTime = time.Second
	// batchItems and batchBytes bound a message of grep and sed.
	batchItems = 256
	batchBytes = 256 << 10
	// maxErrorPath is how much of a path an error repeats.
	maxErrorPath = 4096
)

// Files is the agent's FileService, see api/proto/guest/v1/files.proto. Make it
// with NewFiles.
type Files struct {
	guestv1.UnimplementedFileServiceServer

	log     *slog.Logger
	slots   chan struct{}
	stall   time.Duration
	buffers sync.Pool
}

// NewFiles makes the service. It starts nothing.
func NewFiles(log *slog.Logger) *Files {
	return &Files{
		log:     log,
		slots:   make(chan struct{}, maxFileCalls),
		stall:   fileStall,
		buffers: sync.Pool{New: func() any { return new([maxChunk]byte) }},
	}
}

// Register puts the service on r.
func (f *Files) Register(r grpc.ServiceRegistrar) {
	guestv1.RegisterFileServiceServer(r, f)
}

// start runs op in a goroutine of its own, as soon as a slot is free, so that an
// operation stuck in the kernel does not hold the call. The channel gets op's
// error once.
func (f *Files) start(ctx context.Context, op func() error) (<-chan error, error) {
	select {
	case f.slots <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	done := make(chan error, 1)
	go func() {
		defer func() { <-f.slots }()
		done <- op()
	}()
	return done, nil
}

// undone waits a little for an operation whose context has ended.
func (f *Files) undone(name string, done <-chan error) {
	bound := time.NewTimer(undoTime)
	defer bound.Stop()
	select {
	case err := <-done:
		f.log.Debug("a file operation was ended", "operation", name, "error", err)
	case <-bound.C:
		f.log.Warn("a file operation does not end with its call", "operation", name)
	}
}

// single runs an operation with one result.
func single[T any](ctx context.Context, f *Files, name string, op func(context.Context) (T, error)) (T, error) {
	var result, none T
	done, err := f.start(ctx, func() (err error) {
		result, err = op(ctx)
		return err
	})
	if err != nil {
		return none, f.status(name, err)
	}
	select {
	case err := <-done:
		if err != nil {
			return none, f.status(name, err)
		}
		return result, nil
	case <-ctx.Done():
		f.undone(name, done)
		return none, f.status(name, ctx.Err())
	}
}

// many runs an operation with a stream of results: what op emits is sent in
// order. With stall, op may take that long from one result to the next.
func many[T any](
	ctx context.Context, f *Files, name string, stall time.Duration,
	op func(ctx context.Context, emit func(T) error) error, send func(T) error,
) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	items := make(chan T)
	done, err := f.start(ctx, func() error {
		return op(ctx, func(v T) error {
			select {
			case items <- v:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
	})
	if err != nil {
		return f.status(name, err)
	}
	var stalled <-chan time.Time
	if stall > 0 {
		timer := time.NewTimer(stall)
		defer timer.Stop()
		stalled = timer.C
		sendNow := send
		send = func(v T) error {
			err := sendNow(v)
			timer.Reset(stall)
			return err
		}
	}
	for {
		select {
		case v := <-items:
			if err = send(v); err == nil {
				continue
			}
		case err := <-done:
			return f.status(name, err)
		case <-stalled:
			err = fault.FileRefused("", "the file system gave nothing for "+stall.String(), nil)
		case <-ctx.Done():
			err = ctx.Err()
		}
		cancel()
		f.undone(name, done)
		return f.status(name, err)
	}
}

// status makes an error what the protocol says.
func (f *Files) status(name string, err error) error {
	var file *fault.Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &file):
		return fileStatus(file)
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return status.FromContextError(err).Err()
	}
	if _, ok := status.FromError(err); ok {
		return err
	}
	f.log.Error("a file operation failed without a class", "operation", name, "error", err)
	return status.Error(codes.Internal, strings.ToValidUTF8(err.Error(), "\uFFFD"))
}

func fileStatus(e *fault.Error) error {
	message := strings.ToValidUTF8(e.Message, "\uFFFD")
	st := status.New(codes.FailedPrecondition, message)
	detailed, err := st.WithDetails(&guestv1.FileError{
		Code:          string(e.Code),
		Path:          []byte(e.Path[:min(len(e.Path), maxErrorPath)]),
		Message:       message,
		ParentMissing: e.ParentMissing(),
	})
	if err != nil {
		return st.Err()
	}
	return detailed.Err()
}

// Stat implements the service.
func (f *Files) Stat(ctx context.Context, req *guestv1.StatRequest) (*guestv1.StatResponse, error) {
	entry, err := single(ctx, f, "stat", func(context.Context) (fsops.Entry, error) {
		return fsops.Stat(string(req.GetPath()))
	})
	if err != nil {
		return nil, err
	}
	return &guestv1.StatResponse{Entry: wireEntry(entry)}, nil
}

func wireEntry(e fsops.Entry) *guestv1.FileEntry {
	types := [...]guestv1.FileType{
		fsops.Other:     guestv1.FileType_FILE_TYPE_OTHER,
		fsops.Regular:   guestv1.FileType_FILE_TYPE_REGULAR,
		fsops.Directory: guestv1.FileType_FILE_TYPE_DIRECTORY,
		fsops.Symlink:   guestv1.FileType_FILE_TYPE_SYMLINK,
	}
	return &guestv1.FileEntry{
		Name: []byte(e.Name), Type: types[e.Type], Size: e.Size, Mode: e.Mode, MtimeUnix: e.MtimeUnix,
	}
}

// ListDir implements the service.
func (f *Files) ListDir(req *guestv1.ListDirRequest, stream guestv1.FileService_ListDirServer) error {
	return many(stream.Context(), f, "list", f.stall, func(ctx context.Context, emit func([]fsops.Entry) error) error {
		return fsops.List(ctx, string(req.GetPath()), emit)
	}, func(entries []fsops.Entry) error {
		out := &guestv1.ListDirResponse{Entries: make([]*guestv1.FileEntry, len(entries))}
		for i, e := range entries {
			out.Entries[i] = wireEntry(e)
		}
		return stream.Send(out)
	})
}

// MakeDir implements the service.
func (f *Files) MakeDir(ctx context.Context, req *guestv1.MakeDirRequest) (*guestv1.MakeDirResponse, error) {
	created, err := single(ctx, f, "mkdir", func(context.Context) (bool, error) {
		return fsops.MakeDir(string(req.GetPath()), req.GetMode(), req.GetParents())
	})
	if err != nil {
		return nil, err
	}
	return &guestv1.MakeDirResponse{Created: created}, nil
}

// Remove implements the service.
func (f *Files) Remove(ctx context.Context, req *guestv1.RemoveRequest) (*guestv1.RemoveResponse, error) {
	return single(ctx, f, "remove", func(ctx context.Context) (*guestv1.RemoveResponse, error) {
		return &guestv1.RemoveResponse{}, fsops.Remove(ctx, string(req.GetPath()), req.GetRecursive())
	})
}

// Chmod implements the service.
func (f *Files) Chmod(ctx context.Context, req *guestv1.ChmodRequest) (*guestv1.ChmodResponse, error) {
	updated, err := single(ctx, f, "chmod", func(ctx context.Context) (uint64, error) {
		return fsops.Chmod(ctx, string(req.GetPath()), fsops.ChmodOptions{
			Mode: req.GetMode(), UID: req.Uid, GID: req.Gid, Recursive: req.GetRecursive(),
		})
	})
	if err != nil {
		return nil, err
	}
	return &guestv1.ChmodResponse{Updated: updated}, nil
}

// Move implements the service.
func (f *Files) Move(ctx context.Context, req *guestv1.MoveRequest) (*guestv1.MoveResponse, error) {
	return single(ctx, f, "move", func(ctx context.Context) (*guestv1.MoveResponse, error) {
		return &guestv1.MoveResponse{}, fsops.Move(ctx, string(req.GetSrc()), string(req.GetDst()), req.GetOverwrite())
	})
}

// chunk is what ReadFile emits: the header, or data in a buffer of the pool.
type chunk struct {
	header *guestv1.ReadFileHeader
	buffer *[maxChunk]byte
	size   int
}

// ReadFile implements the service.
func (f *Files) ReadFile(req *guestv1.ReadFileRequest, stream guestv1.FileService_ReadFileServer) error {
	return many(stream.Context(), f, "read", f.stall, func(ctx context.Context, emit func(chunk) error) error {
		r, err := fsops.Open(ctx, string(req.GetPath()))
		if err != nil {
			return err
		}
		defer r.Close()
		header := &guestv1.ReadFileHeader{Size: r.Size, Mode: r.Mode, MtimeUnix: r.MtimeUnix}
		if err := emit(chunk{header: header}); err != nil {
			return err
		}
		for {
			buffer, _ := f.buffers.Get().(*[maxChunk]byte)
			n, err := r.Read(buffer[:])
			if err != nil {
				f.buffers.Put(buffer)
				if errors.Is(err, io.EOF) {
					return nil
				}
				return err
			}
			if err := emit(chunk{buffer: buffer, size: n}); err != nil {
				return err
			}
		}
	}, func(c chunk) error {
		if c.header != nil {
			return stream.Send(&guestv1.ReadFileResponse{Response: &guestv1.ReadFileResponse_Header{Header: c.header}})
		}
		err := stream.Send(&guestv1.ReadFileResponse{Response: &guestv1.ReadFileResponse_Chunk{Chunk: c.buffer[:c.size]}})
		f.buffers.Put(c.buffer)
		return err
	})
}
