//go:build linux

package agent_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	guestv1 "github.com/iii-hq/workers/sandbox-libkrun/api/guest/v1"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/agent"
)

// newFiles serves the files of this machine behind a real HTTP/2 connection.
func newFiles(t *testing.T, change func(*agent.Files)) guestv1.FileServiceClient {
	t.Helper()
	files := agent.NewFiles(slog.New(slog.DiscardHandler))
	if change != nil {
		change(files)
	}
	lis, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	conn, err := grpc.NewClient("unix:"+lis.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan struct{})
	go func() {
		defer close(served)
		if err := agent.Serve(ctx, lis, files.Register); err != nil {
			t.Errorf("serve: %v", err)
		}
	}()
	t.Cleanup(func() {
		_ = conn.Close()
		cancel()
		await(t, served, "the end of Serve")
	})
	return guestv1.NewFileServiceClient(conn)
}

// wantFault fails unless err carries a FileError of that code.
func wantFault(t *testing.T, err error, code string) *guestv1.FileError {
	t.Helper()
	st, ok := status.FromError(err)
	if !ok || st.Code() != codes.FailedPrecondition {
		t.Fatalf("got %v, want %s", err, code)
	}
	for _, detail := range st.Details() {
		if e, ok := detail.(*guestv1.FileError); ok {
			if e.GetCode() != code {
				t.Fatalf("got %v, want %s", e, code)
			}
			return e
		}
	}
	t.Fatalf("no FileError in %v", err)
	return nil
}

func writeFile(t *testing.T, path, content string) []byte {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	return []byte(path)
}

func wantEntries(t *testing.T, dir string, want ...string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range entries {
		got = append(got, e.Name())
	}
	if strings.Join(got, " ") != strings.Join(want, " ") {
		t.Fatalf("%s holds %q, want %q", dir, got, want)
	}
}

func TestFiles_SmallOperations(t *testing.T) {
	t.Parallel()
	files, ctx, dir := newFiles(t, nil), bounded(t), t.TempDir()
	made, err := files.MakeDir(ctx, &guestv1.MakeDirRequest{Path: []byte(dir + "/a/b\xff"), Mode: 0o1750, Parents: true})
	if err != nil || !made.GetCreated() {
		t.Fatal(made, err)
	}
	st, err := files.Stat(ctx, &guestv1.StatRequest{Path: []byte(dir + "/a/b\xff")})
	if err != nil {
		t.Fatal(err)
	}
	if e := st.GetEntry(); string(e.GetName()) != "b\xff" || e.GetType() != guestv1.FileType_FILE_TYPE_DIRECTORY || e.GetMode() != 0o1750 {
		t.Errorf("%v", e)
	}
	if _, err := files.Move(ctx, &guestv1.MoveRequest{Src: []byte(dir + "/a/b\xff"), Dst: []byte(dir + "/c")}); err != nil {
		t.Fatal(err)
	}
	changed, err := files.Chmod(ctx, &guestv1.ChmodRequest{Path: []byte(dir), Mode: 0o755, Recursive: true})
	if err != nil || changed.GetUpdated() != 3 {
		t.Fatal(changed, err)
	}
	if _, err := files.Remove(ctx, &guestv1.RemoveRequest{Path: []byte(dir + "/a")}); err != nil {
		t.Fatal(err)
	}
	wantEntries(t, dir, "c")
}

func TestFiles_ErrorsCarryTheirClass(t *testing.T) {
	t.Parallel()
	files, ctx, dir := newFiles(t, nil), bounded(t), t.TempDir()
	_, err := files.Stat(ctx, &guestv1.StatRequest{Path: []byte(dir + "/\xff")})
	if e := wantFault(t, err, "S211"); string(e.GetPath()) != dir+"/\xff" || e.GetParentMissing() || e.GetMessage() == "" {
		t.Errorf("%v", e)
	}
	_, err = files.MakeDir(ctx, &guestv1.MakeDirRequest{Path: []byte(dir + "/a/b")})
	if e := wantFault(t, err, "S211"); !e.GetParentMissing() {
		t.Errorf("%v", e)
	}
	_, err = files.Stat(ctx, &guestv1.StatRequest{Path: bytes.Repeat([]byte("/x"), 200_000)})
	if e := wantFault(t, err, "S216"); len(e.GetPath()) > 4096 || len(e.GetMessage()) > 8192 {
		t.Errorf("a path of 400 kB came back whole: %d %d", len(e.GetPath()), len(e.GetMessage()))
	}
}

func TestFiles_ListDirInBatches(t *testing.T) {
	t.Parallel()
	files, dir := newFiles(t, nil), t.TempDir()
	for i := range 1300 {
		writeFile(t, fmt.Sprintf("%s/%d%s", dir, i, strings.Repeat("n", 200)), "")
	}
	stream, err := files.ListDir(bounded(t), &guestv1.ListDirRequest{Path: []byte(dir)})
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for {
		batch, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if n := len(batch.GetEntries()); n == 0 || n > 512 {
			t.Errorf("a batch of %d", n)
		}
		for _, e := range batch.GetEntries() {
			seen[string(e.GetName())] = true
		}
	}
	if len(seen) != 1300 {
		t.Errorf("%d entries", len(seen))
	}
}

func readAll(stream grpc.ServerStreamingClient[guestv1.ReadFileResponse]) (*guestv1.ReadFileHeader, []byte, error) {
	first, err := stream.Recv()
	if err != nil {
		return nil, nil, err
	}
	var content []byte
	for {
		msg, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return first.GetHeader(), content, nil
		}
		if err != nil {
			return nil, nil, err
		}
		if n := len(msg.GetChunk()); n == 0 || n > 64<<10 {
			return nil, nil, fmt.Errorf("a chunk of %d bytes", n)
		}
		content = append(content, msg.GetChunk()...)
	}
}

func TestFiles_ReadFile(t *testing.T) {
	t.Parallel()
	files, dir := newFiles(t, nil), t.TempDir()
	for _, size := range []int{0, 1, 64 << 10, 64<<10 + 1, 10 << 20} {
		want := strings.Repeat("0123456789abcde\x00", size/16+1)[:size]
		stream, err := files.ReadFile(bounded(t), &guestv1.ReadFileRequest{Path: writeFile(t, dir+"/f", want)})
		if err != nil {
			t.Fatal(err)
		}
		header, got, err := readAll(stream)
		if err != nil {
			t.Fatal(err)
		}
		if header.GetSize() != uint64(size) || header.GetMode() != 0o644 || header.GetMtimeUnix() == 0 || string(got) != want {
			t.Errorf("%d bytes: %v and %d bytes", size, header, len(got))
		}
	}
	stream, err := files.ReadFile(bounded(t), &guestv1.ReadFileRequest{Path: []byte(dir)})
	if err != nil {
		t.Fatal(err)
	}
	_, err = stream.Recv()
	wantFault(t, err, "S212")
}

// Readers that do not read hold up nobody else, also not many of them.
func TestFiles_StuckReadersStallOnlyThemselves(t *testing.T) {
	t.Parallel()
	files, dir := newFiles(t, nil), t.TempDir()
	path := writeFile(t, dir+"/f", strings.Repeat("x", 8<<20))
	var stuck []grpc.ServerStreamingClient[guestv1.ReadFileResponse]
	for range 20 {
		stream, err := files.ReadFile(bounded(t), &guestv1.ReadFileRequest{Path: path})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := stream.Recv(); err != nil {
			t.Fatal(err)
		}
		stuck = append(stuck, stream)
	}
	if _, err := files.Stat(bounded(t), &guestv1.StatRequest{Path: path}); err != nil {
		t.Fatal(err)
	}
	for _, stream := range stuck[:2] {
		size := 0
		for {
			msg, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			size += len(msg.GetChunk())
		}
		if size != 8<<20 {
			t.Errorf("%d bytes", size)
		}
	}
}

func startUpload(ctx context.Context, t *testing.T, files guestv1.FileServiceClient, start *guestv1.WriteFileStart) grpc.ClientStreamingClient[guestv1.WriteFileRequest, guestv1.WriteFileResponse] {
	t.Helper()
	stream, err := files.WriteFile(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&guestv1.WriteFileRequest{Request: &guestv1.WriteFileRequest_Start{Start: start}}); err != nil {
		t.Fatal(err)
	}
	return stream
}

func data(b []byte) *guestv1.WriteFileRequest {
	return &guestv1.WriteFileRequest{Request: &guestv1.WriteFileRequest_Chunk{Chunk: b}}
}

func commit() *guestv1.WriteFileRequest {
	return &guestv1.WriteFileRequest{Request: &guestv1.WriteFileRequest_Commit{Commit: &guestv1.WriteFileCommit{}}}
}

func TestFiles_WriteFile(t *testing.T) {
	t.Parallel()
	files, dir := newFiles(t, nil), t.TempDir()
	stream := startUpload(bounded(t), t, files, &guestv1.WriteFileStart{Path: []byte(dir + "/a/f"), Mode: 0o4711, Parents: true})
	sum, chunk := sha256.New(), bytes.Repeat([]byte("0123456789abcdef"), 4096)
	const n = 320 // 20 MiB
	for i := range n {
		chunk[0] = byte(i)
		sum.Write(chunk)
		if err := stream.Send(data(chunk)); err != nil {
			t.Fatal(err)
		}
	}
	wantEntries(t, dir+"/a")
	if err := stream.Send(commit()); err != nil {
		t.Fatal(err)
	}
	reply, err := stream.CloseAndRecv()
	if err != nil || reply.GetBytesWritten() != n*64<<10 {
		t.Fatal(reply, err)
	}
	got, err := os.ReadFile(dir + "/a/f")
	if err != nil || sha256.Sum256(got) != [32]byte(sum.Sum(nil)) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if info, err := os.Stat(dir + "/a/f"); err != nil || info.Mode() != 0o711|os.ModeSetuid {
		t.Errorf("%v %v", info.Mode(), err)
	}
	wantEntries(t, dir+"/a", "f")
}

func TestFiles_UploadWithoutCommitWritesNothing(t *testing.T) {
	t.Parallel()
	files, dir := newFiles(t, nil), t.TempDir()
	path := writeFile(t, dir+"/f", "old")
	stream := startUpload(bounded(t), t, files, &guestv1.WriteFileStart{Path: path})
	if err := stream.Send(data([]byte("new"))); err != nil {
		t.Fatal(err)
	}
	_, err := stream.CloseAndRecv()
	wantFault(t, err, "S218")
	if b, err := os.ReadFile(dir + "/f"); err != nil || string(b) != "old" {
		t.Errorf("%q %v", b, err)
	}
	wantEntries(t, dir, "f")
}

func TestFiles_CancelledUploadLeavesNothing(t *testing.T) {
	t.Parallel()
	files, dir := newFiles(t, nil), t.TempDir()
	ctx, cancel := context.WithCancel(bounded(t))
	stream := startUpload(ctx, t, files, &guestv1.WriteFileStart{Path: []byte(dir + "/f")})
	if err := stream.Send(data([]byte("new"))); err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := stream.RecvMsg(&guestv1.WriteFileResponse{}); status.Code(err) != codes.Canceled {
		t.Errorf("%v", err)
	}
	wantEntries(t, dir)
}

func TestFiles_UploadIsRefusedBeforeItsBody(t *testing.T) {
	t.Parallel()
	files, dir := newFiles(t, nil), t.TempDir()
	for path, code := range map[string]string{dir + "/missing/f": "S211", dir: "S216", "": "S211"} {
		stream := startUpload(bounded(t), t, files, &guestv1.WriteFileStart{Path: []byte(path)})
		// No body, no end: the answer comes all the same.
		err := stream.RecvMsg(&guestv1.WriteFileResponse{})
		if e := wantFault(t, err, code); e.GetParentMissing() != strings.Contains(path, "missing") {
			t.Errorf("%v", e)
		}
	}
}

func TestFiles_StalledUpload(t *testing.T) {
	t.Parallel()
	files, dir := newFiles(t, func(f *agent.Files) { f.SetStall(30 * time.Millisecond) }), t.TempDir()
	stream := startUpload(bounded(t), t, files, &guestv1.WriteFileStart{Path: []byte(dir + "/f")})
	err := stream.RecvMsg(&guestv1.WriteFileResponse{})
	if e := wantFault(t, err, "S218"); !strings.Contains(e.GetMessage(), "stalled") {
		t.Errorf("%v", e)
	}
	wantEntries(t, dir)
}

func TestFiles_UploadOutOfOrder(t *testing.T) {
	t.Parallel()
	files, dir := newFiles(t, nil), t.TempDir()
	start := &guestv1.WriteFileRequest{Request: &guestv1.WriteFileRequest_Start{Start: &guestv1.WriteFileStart{Path: []byte(dir + "/f")}}}
	for name, messages := range map[string][]*guestv1.WriteFileRequest{
		"chunk first":  {data([]byte("x"))},
		"commit first": {commit()},
		"empty first":  {{}},
		"start twice":  {start, start},
		"empty":        {start, {}},
		"large chunk":  {start, data(make([]byte, 64<<10+1))},
	} {
		stream, err := files.WriteFile(bounded(t))
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range messages {
			if err := stream.Send(m); err != nil && !errors.Is(err, io.EOF) {
				t.Fatal(err)
			}
		}
		if err := stream.RecvMsg(&guestv1.WriteFileResponse{}); status.Code(err) != codes.InvalidArgument {
			t.Errorf("%s: %v", name, err)
		}
	}
	wantEntries(t, dir)
}

func TestFiles_GrepInBatches(t *testing.T) {
	t.Parallel()
	files, dir := newFiles(t, nil), t.TempDir()
	long := strings.Repeat("x", 600_000) + "hit"
	writeFile(t, dir+"/a", strings.Repeat("hit\n", 1000)+long+"\n")
	req := &guestv1.GrepRequest{Path: []byte(dir), Pattern: "hit$", Recursive: true, MaxMatches: 1001}
	stream, err := files.Grep(bounded(t), req)
	if err != nil {
		t.Fatal(err)
	}
	lines, content, done := 0, "", false
	for {
		batch, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil || done {
			t.Fatal(err, done)
		}
		if n := len(batch.GetMatches()); n > 256 {
			t.Errorf("a batch of %d", n)
		}
		for _, m := range batch.GetMatches() {
			if content += string(m.GetContent()); !m.GetContinued() {
				lines++
				if want := map[bool]string{true: "hit", false: long}[lines <= 1000]; content != want || m.GetLine() != uint64(lines) {
					t.Fatalf("line %d as %d: %d bytes", lines, m.GetLine(), len(content))
				}
				content = ""
			}
		}
		if d := batch.GetDone(); d != nil {
			done = true
			if !d.GetTruncated() {
				t.Error("not truncated at exactly max_matches")
			}
		}
	}
	if !done || lines != 1001 {
		t.Errorf("done %v after %d lines", done, lines)
	}
	stream, err = files.Grep(bounded(t), &guestv1.GrepRequest{Path: []byte(dir), Pattern: "(", Recursive: true})
	if err != nil {
		t.Fatal(err)
	}
	_, err = stream.Recv()
	wantFault(t, err, "S217")
}

func TestFiles_Sed(t *testing.T) {
	t.Parallel()
	files, dir := newFiles(t, nil), t.TempDir()
	for i := range 600 {
		writeFile(t, fmt.Sprintf("%s/%03d", dir, i), "a\n")
	}
	writeFile(t, dir+"/599", "\xff\n")
	stream, err := files.Sed(bounded(t), &guestv1.SedRequest{Path: []byte(dir), Recursive: true, Pattern: "a", Replacement: "b"})
	if err != nil {
		t.Fatal(err)
	}
	var results []*guestv1.SedResult
	for {
		batch, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if n := len(batch.GetResults()); n == 0 || n > 256 {
			t.Errorf("a batch of %d", n)
		}
		results = append(results, batch.GetResults()...)
	}
	if len(results) != 600 {
		t.Fatalf("%d results", len(results))
	}
	for i, r := range results {
		if want := fmt.Sprintf("%s/%03d", dir, i); string(r.GetPath()) != want || (r.GetReplacements() == 1) == (i == 599) || (r.GetError() == "") == (i == 599) {
			t.Errorf("%v", r)
		}
	}
	stream, err = files.Sed(bounded(t), &guestv1.SedRequest{Pattern: "a"})
	if err != nil {
		t.Fatal(err)
	}
	_, err = stream.Recv()
	wantFault(t, err, "S210")
}

// A reader that stands still keeps its place, but nobody else's.
func TestFiles_StalledReadersLeaveTheOtherOperationsAlone(t *testing.T) {
	t.Parallel()
	files := newFiles(t, func(f *agent.Files) { f.SetStall(200 * time.Millisecond) })
	big := filepath.Join(t.TempDir(), "big")
	writeFile(t, big, "")
	if err := os.Truncate(big, 8<<20); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(bounded(t))
	defer cancel()
	open := func() error {
		stream, err := files.ReadFile(ctx, &guestv1.ReadFileRequest{Path: []byte(big)})
		if err != nil {
			t.Fatal(err)
		}
		_, err = stream.Recv()
		return err
	}
	for range agent.MaxTransfers {
		if err := open(); err != nil {
			t.Fatal(err)
		}
	}
	if e := wantFault(t, open(), "S216"); !strings.Contains(e.GetMessage(), "channels") || string(e.GetPath()) != big {
		t.Errorf("%v does not say what to do, or where", e)
	}
	for range 200 {
		if _, err := files.Stat(ctx, &guestv1.StatRequest{Path: []byte(big)}); err != nil {
			t.Fatal(err)
		}
	}
	write := startUpload(ctx, t, files, &guestv1.WriteFileStart{Path: []byte(big + ".new"), Mode: 0o600})
	if err := write.Send(commit()); err != nil {
		t.Fatal(err)
	}
	if _, err := write.CloseAndRecv(); err != nil {
		t.Error(err)
	}
	cancel()
	// Those that were given up make room.
	ctx = bounded(t)
	if err := open(); err != nil {
		t.Error(err)
	}
}
