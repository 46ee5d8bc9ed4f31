package guest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	guestv1 "github.com/iii-hq/workers/sandbox-libkrun/api/guest/v1"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
)

// fileTimeout bounds a file operation whose context has no deadline. Transfers
// have none: their progress is what bounds them.
const fileTimeout = 10 * time.Minute

// FileType is the kind of a file.
type FileType int

// The kinds of files.
const (
	OtherFile FileType = iota // a device, FIFO or socket
	RegularFile
	Directory
	Symlink
)

// Entry describes a file in the guest.
type Entry struct {
	// Name is the last element of its path, byte for byte.
	Name string
	Type FileType
	// Size is in bytes.
	Size uint64
	// Mode is the 12 permission bits, see FormatMode.
	Mode uint32
	// MtimeUnix is when the content changed last, in seconds since 1970.
	MtimeUnix int64
}

func newEntry(e *guestv1.FileEntry) Entry {
	out := Entry{Name: string(e.GetName()), Size: e.GetSize(), Mode: e.GetMode() & 0o7777, MtimeUnix: e.GetMtimeUnix()}
	switch e.GetType() {
	case guestv1.FileType_FILE_TYPE_REGULAR:
		out.Type = RegularFile
	case guestv1.FileType_FILE_TYPE_DIRECTORY:
		out.Type = Directory
	case guestv1.FileType_FILE_TYPE_SYMLINK:
		out.Type = Symlink
	}
	return out
}

// ParseMode reads a mode as the contract has it: octal digits, of which "" is 0,
// in 32 bits. Anything else is S210.
func ParseMode(mode string) (uint32, error) {
	digits := strings.TrimLeft(mode, "0")
	if digits == "" {
		return 0, nil
	}
	v, err := strconv.ParseUint(strings.TrimPrefix(digits, "+"), 8, 32)
	if err != nil {
		return 0, fault.BadMode(mode)
	}
	return uint32(v), nil
}

// FormatMode is the contract's text of a mode: octal, four digits or more.
func FormatMode(mode uint32) string { return fmt.Sprintf("%04o", mode) }

// fileError turns the end of a file operation on path into a fault. What is no
// fault of a file is S216; a call that its caller ended is that end.
func fileError(ctx context.Context, op, path string, err error) error {
	if err == nil {
		return nil
	}
	st, ok := status.FromError(err)
	if !ok {
		return fault.FileRefused(path, fmt.Sprintf("%s: %v", op, err), err)
	}
	for _, detail := range st.Details() {
		if e, ok := detail.(*guestv1.FileError); ok {
			return fault.FromGuest(e.GetCode(), string(e.GetPath()), e.GetMessage(), e.GetParentMissing(), nil)
		}
	}
	cause := callError(ctx, op, err)
	switch st.Code() {
	case codes.Unimplemented:
		return fault.AgentTooOld(op, cause)
	case codes.InvalidArgument:
		return fault.BadFileRequest("%s: %s", op, st.Message())
	case codes.DeadlineExceeded:
		return fault.FileRefused(path, op+" did not end within its time limit", cause)
	case codes.Canceled:
		if ctx.Err() != nil {
			return cause
		}
	}
	return fault.FileRefused(path, cause.Error(), cause)
}

// bounded gives ctx a deadline unless it has one.
func bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, fileTimeout)
}

// Stat describes what is at path, not following a link there.
func (c *Client) Stat(ctx context.Context, path string) (Entry, error) {
	ctx, cancel := bounded(ctx)
	defer cancel()
	reply, err := c.files.Stat(ctx, &guestv1.StatRequest{Path: []byte(path)})
	if err != nil {
		return Entry{}, fileError(ctx, "stat", path, err)
	}
	return newEntry(reply.GetEntry()), nil
}

// ListDir describes the entries of the directory at path, sorted by name. More
// than limit of them are S216: the caller could not hold them.
func (c *Client) ListDir(ctx context.Context, path string, limit int) ([]Entry, error) {
	ctx, cancel := bounded(ctx)
	defer cancel()
	stream, err := c.files.ListDir(ctx, &guestv1.ListDirRequest{Path: []byte(path)})
	if err != nil {
		return nil, fileError(ctx, "list", path, err)
	}
	entries := []Entry{}
	for {
		batch, err := stream.Recv()
		if isEOF(err) {
			break
		}
		if err != nil {
			return nil, fileError(ctx, "list", path, err)
		}
		if len(entries)+len(batch.GetEntries()) > limit {
			return nil, fault.FileRefused(path, fmt.Sprintf("has more than %d entries, too many for one reply: run find or ls in the sandbox", limit), nil)
		}
		for _, e := range batch.GetEntries() {
			entries = append(entries, newEntry(e))
		}
	}
	slices.SortFunc(entries, func(a, b Entry) int { return strings.Compare(a.Name, b.Name) })
	return entries, nil
}

// MakeDir makes the directory path with exactly mode. With parents it makes those
// above too, and reports false for a directory that is there already.
func (c *Client) MakeDir(ctx context.Context, path string, mode uint32, parents bool) (created bool, err error) {
	ctx, cancel := bounded(ctx)
	defer cancel()
	reply, err := c.files.MakeDir(ctx, &guestv1.MakeDirRequest{Path: []byte(path), Mode: mode, Parents: parents})
	return reply.GetCreated(), fileError(ctx, "mkdir", path, err)
}

// Remove removes what is at path; a directory with entries only when recursive.
func (c *Client) Remove(ctx context.Context, path string, recursive bool) error {
	ctx, cancel := bounded(ctx)
	defer cancel()
	_, err := c.files.Remove(ctx, &guestv1.RemoveRequest{Path: []byte(path), Recursive: recursive})
	return fileError(ctx, "rm", path, err)
}

// ChmodOptions is what Chmod sets.
type ChmodOptions struct {
	Mode uint32
	// UID and GID are set where not nil.
	UID, GID *uint32
	// Recursive goes on to everything below a directory, but not through links.
	Recursive bool
}

// Chmod sets mode and owner of path and returns how many entries it set.
func (c *Client) Chmod(ctx context.Context, path string, opts ChmodOptions) (updated uint64, err error) {
	ctx, cancel := bounded(ctx)
	defer cancel()
	reply, err := c.files.Chmod(ctx, &guestv1.ChmodRequest{
		Path: []byte(path), Mode: opts.Mode, Uid: opts.UID, Gid: opts.GID, Recursive: opts.Recursive,
	})
	return reply.GetUpdated(), fileError(ctx, "chmod", path, err)
}

// Move renames src to dst, also across file systems. Without overwrite dst must
// not exist.
func (c *Client) Move(ctx context.Context, src, dst string, overwrite bool) error {
	ctx, cancel := bounded(ctx)
	defer cancel()
	_, err := c.files.Move(ctx, &guestv1.MoveRequest{Src: []byte(src), Dst: []byte(dst), Overwrite: overwrite})
	return fileError(ctx, "mv", src, err)
}

// errProtocol is a guest that does not keep to the protocol.
var errProtocol = errors.New("the guest agent broke the protocol: adapter and guest-agent must be of one build")
