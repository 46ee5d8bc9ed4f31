package agent

import (
	"context"
	"errors"
	"fmt"
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
	// kernel does not answer: each may hold a thread. maxTransfers bounds reads, and
	// writes, apart from the others: one whose client stands still keeps its place,
	// and some 300 KiB of memory.
	maxFileCalls = 128
	maxTransfers = 64
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

	log *slog.Logger
	// Each has room for the operations of its kind; slots is for all but two.
	slots, reads, writes chan struct{}
	stall                time.Duration
	buffers              sync.Pool
}

// NewFiles makes the service. It starts nothing.
func NewFiles(log *slog.Logger) *Files {
	return &Files{
		log:     log,
		slots:   make(chan struct{}, maxFileCalls),
		reads:   make(chan struct{}, maxTransfers),
		writes:  make(chan struct{}, maxTransfers),
		stall:   fileStall,
		buffers: sync.Pool{New: func() any { return new([maxChunk]byte) }},
	}
}

// Register puts the service on r.
func (f *Files) Register(r grpc.ServiceRegistrar) {
	guestv1.RegisterFileServiceServer(r, f)
}

// task says how an operation runs.
type task struct {
	name  string
	path  []byte
	slots chan struct{}
	// stall, where it is not 0, is how long it may take from one result to the next.
	stall time.Duration
}

// onPath is an operation that ends by itself.
func (f *Files) onPath(name string, path []byte) task {
	return task{name: name, path: path, slots: f.slots}
}

// start runs op in a goroutine of its own, as soon as a slot is free, so that an
// operation stuck in the kernel does not hold the call. The channel gets op's
// error once.
func (f *Files) start(ctx context.Context, t task, op func() error) (<-chan error, error) {
	bound := time.NewTimer(f.stall)
	defer bound.Stop()
	select {
	case t.slots <- struct{}{}:
	case <-bound.C:
		return nil, fault.FileRefused(string(t.path), fmt.Sprintf(
			"%s: %d operations like it are under way, and none has ended for %v: use or close their channels",
			t.name, cap(t.slots), f.stall), nil)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	done := make(chan error, 1)
	go func() {
		defer func() { <-t.slots }()
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
func single[T any](ctx context.Context, f *Files, t task, op func(context.Context) (T, error)) (T, error) {
	var result, none T
	done, err := f.start(ctx, t, func() (err error) {
		result, err = op(ctx)
		return err
	})
	if err != nil {
		return none, f.status(t.name, err)
	}
	select {
	case err := <-done:
		if err != nil {
			return none, f.status(t.name, err)
		}
		return result, nil
	case <-ctx.Done():
		f.undone(t.name, done)
		return none, f.status(t.name, ctx.Err())
	}
}

// many runs an operation with a stream of results: what op emits is sent in
// order.
func many[T any](
	ctx context.Context, f *Files, t task,
	op func(ctx context.Context, emit func(T) error) error, send func(T) error,
) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	items := make(chan T)
	done, err := f.start(ctx, t, func() error {
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
		return f.status(t.name, err)
	}
	var stalled <-chan time.Time
	if t.stall > 0 {
		timer := time.NewTimer(t.stall)
		defer timer.Stop()
		stalled = timer.C
		sendNow := send
		send = func(v T) error {
			err := sendNow(v)
			timer.Reset(t.stall)
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
			return f.status(t.name, err)
		case <-stalled:
			err = fault.FileRefused(string(t.path), "the file system gave nothing for "+t.stall.String(), nil)
		case <-ctx.Done():
			err = ctx.Err()
		}
		cancel()
		f.undone(t.name, done)
		return f.status(t.name, err)
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
	entry, err := single(ctx, f, f.onPath("stat", req.GetPath()), func(context.Context) (fsops.Entry, error) {
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
	return many(stream.Context(), f, task{"list", req.GetPath(), f.slots, f.stall}, func(ctx context.Context, emit func([]fsops.Entry) error) error {
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
	created, err := single(ctx, f, f.onPath("mkdir", req.GetPath()), func(context.Context) (bool, error) {
		return fsops.MakeDir(string(req.GetPath()), req.GetMode(), req.GetParents())
	})
	if err != nil {
		return nil, err
	}
	return &guestv1.MakeDirResponse{Created: created}, nil
}

// Remove implements the service.
func (f *Files) Remove(ctx context.Context, req *guestv1.RemoveRequest) (*guestv1.RemoveResponse, error) {
	return single(ctx, f, f.onPath("remove", req.GetPath()), func(ctx context.Context) (*guestv1.RemoveResponse, error) {
		return &guestv1.RemoveResponse{}, fsops.Remove(ctx, string(req.GetPath()), req.GetRecursive())
	})
}

// Chmod implements the service.
func (f *Files) Chmod(ctx context.Context, req *guestv1.ChmodRequest) (*guestv1.ChmodResponse, error) {
	updated, err := single(ctx, f, f.onPath("chmod", req.GetPath()), func(ctx context.Context) (uint64, error) {
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
	return single(ctx, f, f.onPath("move", req.GetSrc()), func(ctx context.Context) (*guestv1.MoveResponse, error) {
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
	return many(stream.Context(), f, task{"read", req.GetPath(), f.reads, f.stall}, func(ctx context.Context, emit func(chunk) error) error {
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
