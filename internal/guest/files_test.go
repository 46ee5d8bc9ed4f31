package guest_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	guestv1 "github.com/iii-hq/workers/sandbox-libkrun/api/guest/v1"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/guest"
)

// fileStub is a file service whose answers a test scripts.
type fileStub struct {
	guestv1.UnimplementedFileServiceServer
	stat  func(context.Context) (*guestv1.StatResponse, error)
	list  func(guestv1.FileService_ListDirServer) error
	read  func(guestv1.FileService_ReadFileServer) error
	write func(guestv1.FileService_WriteFileServer) error
	grep  func(guestv1.FileService_GrepServer) error
	sed   func(*guestv1.SedRequest, guestv1.FileService_SedServer) error
}

func (s *fileStub) Stat(ctx context.Context, _ *guestv1.StatRequest) (*guestv1.StatResponse, error) {
	return s.stat(ctx)
}

func (s *fileStub) ListDir(_ *guestv1.ListDirRequest, stream guestv1.FileService_ListDirServer) error {
	return s.list(stream)
}

func (s *fileStub) ReadFile(_ *guestv1.ReadFileRequest, stream guestv1.FileService_ReadFileServer) error {
	return s.read(stream)
}

func (s *fileStub) WriteFile(stream guestv1.FileService_WriteFileServer) error {
	return s.write(stream)
}

func (s *fileStub) Grep(_ *guestv1.GrepRequest, stream guestv1.FileService_GrepServer) error {
	return s.grep(stream)
}

func (s *fileStub) Sed(req *guestv1.SedRequest, stream guestv1.FileService_SedServer) error {
	return s.sed(req, stream)
}

func fileClient(t *testing.T, s *fileStub) *guest.Client {
	t.Helper()
	listener := bufconn.Listen(1 << 20)
	server := grpc.NewServer()
	guestv1.RegisterFileServiceServer(server, s)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	conn, err := grpc.NewClient("passthrough:///stub", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = conn.Close()
		server.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return guest.New(conn)
}

func fileFault(t *testing.T, e *guestv1.FileError) error {
	t.Helper()
	st, err := status.New(codes.FailedPrecondition, e.GetMessage()).WithDetails(e)
	if err != nil {
		t.Fatal(err)
	}
	return st.Err()
}

func wantCode(t *testing.T, err error, code fault.Code) *fault.Error {
	t.Helper()
	var e *fault.Error
	if !errors.As(err, &e) || e.Code != code {
		t.Fatalf("got %v, want %s", err, code)
	}
	return e
}

func TestParseMode(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]uint32{
		"": 0, "0": 0, "000": 0, "0644": 0o644, "755": 0o755, "+755": 0o755, "0+755": 0o755, "4755": 0o4755, "1777": 0o1777,
		"37777777777": 1<<32 - 1, "0000000000000000644": 0o644,
	} {
		if got, err := guest.ParseMode(text); err != nil || got != want {
			t.Errorf("%q: %o %v", text, got, err)
		}
	}
	for _, text := range []string{"0o755", "8", "-1", " 755", "755 ", "rwx", "40000000000", "+", "++7", "7_5", "0x1f", "-0"} {
		_, err := guest.ParseMode(text)
		wantCode(t, err, fault.S210)
	}
	for mode, want := range map[uint32]string{0o644: "0644", 0o1777: "1777", 0o4755: "4755", 0: "0000", 7: "0007"} {
		if got := guest.FormatMode(mode); got != want {
			t.Errorf("%o: %s", mode, got)
		}
	}
}

func TestFiles_ErrorsBecomeFaults(t *testing.T) {
	t.Parallel()
	s := &fileStub{}
	c := fileClient(t, s)
	answer := func(err error) error {
		s.stat = func(context.Context) (*guestv1.StatResponse, error) { return nil, err }
		_, got := c.Stat(bounded(t), "/x")
		return got
	}
	e := wantCode(t, answer(fileFault(t, &guestv1.FileError{Code: "S211", Path: []byte("/x\xff"), Message: "m", ParentMissing: true})), fault.S211)
	if e.Path != "/x\xff" || !e.ParentMissing() || e.Message != "m" || !strings.Contains(e.FixNote, "parents: true") {
		t.Errorf("%+v", e)
	}
	e = wantCode(t, answer(fileFault(t, &guestv1.FileError{Code: "S299", Message: "m"})), fault.S216)
	if !strings.Contains(e.Message, "S299") {
		t.Errorf("%+v", e)
	}
	wantCode(t, answer(status.Error(codes.Unimplemented, "x")), fault.S219)
	wantCode(t, answer(status.Error(codes.InvalidArgument, "x")), fault.S210)
	wantCode(t, answer(status.Error(codes.Internal, "x")), fault.S216)
	gone := answer(status.Error(codes.Unavailable, "the vm ended"))
	if e = wantCode(t, gone, fault.S216); !strings.Contains(e.Message, "the vm ended") || !unavailable(gone) {
		t.Errorf("%+v", e)
	}
}

func TestFiles_EndOfTheContext(t *testing.T) {
	t.Parallel()
	s := &fileStub{stat: func(ctx context.Context) (*guestv1.StatResponse, error) {
		<-ctx.Done()
		return nil, status.FromContextError(ctx.Err()).Err()
	}}
	c := fileClient(t, s)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err := c.Stat(ctx, "/x")
	if e := wantCode(t, err, fault.S216); e.Path != "/x" || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
	ctx, cancel = context.WithCancel(t.Context())
	cancel()
	if _, err := c.Stat(ctx, "/x"); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

func TestListDir_SortsAndBounds(t *testing.T) {
	t.Parallel()
	c := fileClient(t, &fileStub{list: func(stream guestv1.FileService_ListDirServer) error {
		for _, batch := range []string{"b c", "a \xff", "C"} {
			out := &guestv1.ListDirResponse{}
			for _, name := range strings.Split(batch, " ") {
				out.Entries = append(out.Entries, &guestv1.FileEntry{Name: []byte(name), Type: guestv1.FileType_FILE_TYPE_REGULAR, Mode: 0o100644})
			}
			if err := stream.Send(out); err != nil {
				return err
			}
		}
		return nil
	}})
	entries, err := c.ListDir(bounded(t), "/d", 5)
	if err != nil {
		t.Fatal(err)
	}
	names := ""
	for _, e := range entries {
		names += e.Name + " "
		if e.Type != guest.RegularFile || e.Mode != 0o644 {
			t.Errorf("%+v", e)
		}
	}
	if names != "C a b c \xff " {
		t.Errorf("%q", names)
	}
	_, err = c.ListDir(bounded(t), "/d", 4)
	wantCode(t, err, fault.S216)
}

func sendHeader(stream guestv1.FileService_ReadFileServer, size uint64) error {
	return stream.Send(&guestv1.ReadFileResponse{Response: &guestv1.ReadFileResponse_Header{
		Header: &guestv1.ReadFileHeader{Size: size, Mode: 0o100600, MtimeUnix: -1},
	}})
}

func sendChunk(stream guestv1.FileService_ReadFileServer, content string) error {
	return stream.Send(&guestv1.ReadFileResponse{Response: &guestv1.ReadFileResponse_Chunk{Chunk: []byte(content)}})
}

func TestOpenFile(t *testing.T) {
	t.Parallel()
	s := &fileStub{}
	c := fileClient(t, s)
	for name, end := range map[string]error{"complete": nil, "broken": fileFault(t, &guestv1.FileError{Code: "S216", Message: "disk"})} {
		s.read = func(stream guestv1.FileService_ReadFileServer) error {
			return errors.Join(sendHeader(stream, 6), sendChunk(stream, "abc"), sendChunk(stream, "def"), end)
		}
		if end != nil {
			s.read = func(stream guestv1.FileService_ReadFileServer) error {
				if err := errors.Join(sendHeader(stream, 6), sendChunk(stream, "abcdef")); err != nil {
					return err
				}
				return end
			}
		}
		f, err := c.OpenFile(bounded(t), "/f")
		if err != nil {
			t.Fatal(err)
		}
		if f.Size != 6 || f.Mode != 0o600 || f.MtimeUnix != -1 {
			t.Errorf("%+v", f)
		}
		got, err := io.ReadAll(f)
		if string(got) != "abcdef" {
			t.Errorf("%s: %q", name, got)
		}
		if end == nil && err != nil {
			t.Errorf("%v", err)
		}
		if end != nil {
			wantCode(t, err, fault.S216)
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
	s.read = func(stream guestv1.FileService_ReadFileServer) error { return sendChunk(stream, "no header") }
	_, err := c.OpenFile(bounded(t), "/f")
	wantCode(t, err, fault.S216)
	s.read = func(guestv1.FileService_ReadFileServer) error { return nil }
	_, err = c.OpenFile(bounded(t), "/f")
	wantCode(t, err, fault.S216)
}

func TestOpenFile_CloseEndsTheTransfer(t *testing.T) {
	t.Parallel()
	ended := make(chan struct{})
	c := fileClient(t, &fileStub{read: func(stream guestv1.FileService_ReadFileServer) error {
		defer close(ended)
		if err := sendHeader(stream, 1<<40); err != nil {
			return err
		}
		for {
			if err := sendChunk(stream, strings.Repeat("x", 64<<10)); err != nil {
				return err
			}
		}
	}})
	f, err := c.OpenFile(bounded(t), "/f")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(f, make([]byte, 200_000)); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
	select {
	case <-ended:
	case <-bounded(t).Done():
		t.Error("the agent goes on sending")
	}
	if _, err := io.Copy(io.Discard, f); !errors.Is(err, context.Canceled) {
		t.Errorf("reading a closed file: %v", err)
	}
}

// collect is an agent that takes an upload and keeps it on commit.
func collect(got *bytes.Buffer, committed chan<- bool) func(guestv1.FileService_WriteFileServer) error {
	return func(stream guestv1.FileService_WriteFileServer) error {
		for {
			msg, err := stream.Recv()
			if err != nil {
				committed <- false
				return err
			}
			if start := msg.GetStart(); start != nil {
				fmt.Fprintf(got, "%s %o %v:", start.GetPath(), start.GetMode(), start.GetParents())
			}
			got.Write(msg.GetChunk())
			if msg.GetCommit() != nil {
				committed <- true
				return stream.SendAndClose(&guestv1.WriteFileResponse{BytesWritten: 42})
			}
		}
	}
}

func TestWriteFile(t *testing.T) {
	t.Parallel()
	var got bytes.Buffer
	committed := make(chan bool, 1)
	c := fileClient(t, &fileStub{write: collect(&got, committed)})
	body := strings.Repeat("0123456789", 100_000)
	n, err := c.WriteFile(bounded(t), "/f\xff", guest.WriteOptions{Mode: 0o755, Parents: true}, strings.NewReader(body))
	if err != nil || n != 42 || !<-committed {
		t.Fatal(n, err)
	}
	if got.String() != "/f\xff 755 true:"+body {
		t.Errorf("%d bytes arrived", got.Len())
	}
}

func TestWriteFile_BrokenBodyIsNotCommitted(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		err  error
		code fault.Code
	}{
		{errors.New("the channel closed"), fault.S218},
		{fault.UploadAborted("/f", "stalled", nil), fault.S218},
		{fault.BadFileRequest("odd"), fault.S210},
		{io.ErrUnexpectedEOF, fault.S218},
	} {
		committed := make(chan bool, 1)
		client := fileClient(t, &fileStub{write: collect(&bytes.Buffer{}, committed)})
		body := io.MultiReader(strings.NewReader("some"), failing{c.err})
		_, err := client.WriteFile(bounded(t), "/f", guest.WriteOptions{}, body)
		if e := wantCode(t, err, c.code); c.code == fault.S218 && !e.Retryable() {
			t.Errorf("%v", e)
		}
		if !errors.Is(err, c.err) {
			t.Errorf("%v lost its cause %v", err, c.err)
		}
		if <-committed {
			t.Error("committed")
		}
	}
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

// The guest refuses the file while the body gives nothing.
func TestWriteFile_EarlyRefusalDoesNotWaitForTheBody(t *testing.T) {
	t.Parallel()
	refusal := fileFault(t, &guestv1.FileError{Code: "S211", Path: []byte("/a/f"), Message: "m", ParentMissing: true})
	c := fileClient(t, &fileStub{write: func(stream guestv1.FileService_WriteFileServer) error {
		if _, err := stream.Recv(); err != nil {
			return err
		}
		return refusal
	}})
	body, end := io.Pipe()
	_, err := c.WriteFile(bounded(t), "/a/f", guest.WriteOptions{}, body)
	if e := wantCode(t, err, fault.S211); !e.ParentMissing() {
		t.Errorf("%+v", e)
	}
	if err := errors.Join(body.Close(), end.Close()); err != nil {
		t.Error(err)
	}
}

func TestWriteFile_EndOfTheContext(t *testing.T) {
	t.Parallel()
	committed := make(chan bool, 1)
	c := fileClient(t, &fileStub{write: collect(&bytes.Buffer{}, committed)})
	ctx, cancel := context.WithCancel(t.Context())
	body, end := io.Pipe()
	go func() {
		_, _ = end.Write([]byte("some"))
		cancel()
	}()
	if _, err := c.WriteFile(ctx, "/f", guest.WriteOptions{}, body); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	if err := errors.Join(body.Close(), end.Close()); err != nil {
		t.Error(err)
	}
	if <-committed {
		t.Error("committed")
	}
}

func match(path string, line uint64, content string, continued bool) *guestv1.GrepMatch {
	return &guestv1.GrepMatch{Path: []byte(path), Line: line, Content: []byte(content), Continued: continued}
}

func TestGrep_PutsPiecesTogetherWithinTheLimit(t *testing.T) {
	t.Parallel()
	c := fileClient(t, &fileStub{grep: func(stream guestv1.FileService_GrepServer) error {
		return errors.Join(
			stream.Send(&guestv1.GrepResponse{Matches: []*guestv1.GrepMatch{match("/a", 1, "one", false), match("/b", 7, "éé", true)}}),
			stream.Send(&guestv1.GrepResponse{Matches: []*guestv1.GrepMatch{match("/b", 7, "éé", false), match("/c", 2, "three", false)}}),
			stream.Send(&guestv1.GrepResponse{Done: &guestv1.GrepDone{}}),
		)
	}})
	for _, x := range []struct {
		limit     int
		want      string
		truncated bool
	}{
		{1 << 20, "[{/a 1 one} {/b 7 éééé} {/c 2 three}]", false},
		{3*(64+2) + 3 + 8 + 5, "[{/a 1 one} {/b 7 éééé} {/c 2 three}]", false},
		{3*(64+2) + 3 + 8 + 4, "[{/a 1 one} {/b 7 éééé}]", true},
		{2*(64+2) + 3 + 7, "[{/a 1 one}]", true},
		{2, "[{/a 1 on…}]", true},
		{0, "[{/a 1 …}]", true},
	} {
		got, truncated, err := c.Grep(bounded(t), guest.GrepOptions{Path: "/", ReplyLimit: x.limit})
		if err != nil || fmt.Sprint(got) != x.want || truncated != x.truncated {
			t.Errorf("limit %d: %v %v %v, want %s", x.limit, got, truncated, err, x.want)
		}
	}
}

func TestGrep_EndWithoutDoneIsNotComplete(t *testing.T) {
	t.Parallel()
	c := fileClient(t, &fileStub{grep: func(stream guestv1.FileService_GrepServer) error {
		return stream.Send(&guestv1.GrepResponse{Matches: []*guestv1.GrepMatch{match("/a", 1, "one", false)}})
	}})
	_, _, err := c.Grep(bounded(t), guest.GrepOptions{Path: "/", ReplyLimit: 1000})
	wantCode(t, err, fault.S216)
}

func TestSed(t *testing.T) {
	t.Parallel()
	s := &fileStub{sed: func(req *guestv1.SedRequest, stream guestv1.FileService_SedServer) error {
		if req.Path == nil || len(req.GetPath()) != 0 {
			return status.Error(codes.InvalidArgument, "an empty path is one")
		}
		return errors.Join(
			stream.Send(&guestv1.SedResponse{Results: []*guestv1.SedResult{{Path: []byte("/a"), Replacements: 3}}}),
			stream.Send(&guestv1.SedResponse{Results: []*guestv1.SedResult{{Path: []byte("/b"), Error: "bad"}, {Path: []byte("/c"), Replacements: 2}}}),
		)
	}}
	c := fileClient(t, s)
	empty := ""
	results, total, err := c.Sed(bounded(t), guest.SedOptions{Path: &empty, ReplyLimit: 1000})
	if err != nil || total != 5 || fmt.Sprint(results) != "[{/a 3 } {/b 0 bad} {/c 2 }]" {
		t.Errorf("%v %d %v", results, total, err)
	}
	_, _, err = c.Sed(bounded(t), guest.SedOptions{Path: &empty, ReplyLimit: 100})
	wantCode(t, err, fault.S216)
	_, _, err = c.Sed(bounded(t), guest.SedOptions{})
	wantCode(t, err, fault.S210)
	_, _, err = c.Sed(bounded(t), guest.SedOptions{Path: &empty, Files: []string{"/x"}})
	wantCode(t, err, fault.S210)
}
