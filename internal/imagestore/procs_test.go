package imagestore_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/imagestore"
)

// pullHelper is the test program as a second process: it gets an image, prints
// its progress and result, and holds the image until its standard input ends.
func pullHelper() int {
	fail := func(err error) int {
		fmt.Println("error", err)
		return 1
	}
	// Each progress and each log record is a step; at the step of this number the
	// process kills itself.
	last, _ := strconv.Atoi(os.Getenv("IMAGESTORE_TEST_DIE"))
	var steps atomic.Int32
	step := func() {
		if int(steps.Add(1)) == last {
			_ = unix.Kill(os.Getpid(), unix.SIGKILL)
		}
	}
	opts := quick()
	opts.Log = slog.New(stepHandler{slog.DiscardHandler, step})
	s, err := imagestore.Open(os.Getenv("IMAGESTORE_TEST_DIR"), opts)
	if err != nil {
		return fail(err)
	}
	fmt.Println("idle", peakKiB())
	img, err := s.Ensure(context.Background(), os.Getenv("IMAGESTORE_TEST_PULL"), imagestore.EnsureOptions{
		PullMissing: true, Progress: func(p imagestore.Progress) {
			fmt.Println("progress", p.Phase, p.BytesDone, p.LayersDone)
			step()
		},
	})
	if err != nil {
		return fail(err)
	}
	fmt.Println("peak", peakKiB())
	fmt.Println("done", img.Digest)
	_, _ = io.Copy(io.Discard, os.Stdin)
	if err := img.Close(); err != nil {
		return fail(err)
	}
	return 0
}

// stepHandler calls step for each record.
type stepHandler struct {
	slog.Handler
	step func()
}

func (h stepHandler) Enabled(context.Context, slog.Level) bool { return true }

func (h stepHandler) Handle(context.Context, slog.Record) error {
	h.step()
	return nil
}

// peakKiB is the most memory that this process had, 0 where that is not told.
func peakKiB() int {
	status, _ := os.ReadFile("/proc/self/status")
	_, rest, _ := strings.Cut(string(status), "VmHWM:")
	var kib int
	_, _ = fmt.Sscan(rest, &kib)
	return kib
}

// puller is a running helper.
type puller struct {
	t     testing.TB
	cmd   *exec.Cmd
	stdin io.Closer
	lines *bufio.Scanner
}

func startPuller(t testing.TB, dir, ref string, env ...string) *puller {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), exe)
	cmd.Env = append(append(os.Environ(), env...), "IMAGESTORE_TEST_PULL="+ref, "IMAGESTORE_TEST_DIR="+dir)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p := &puller{t: t, cmd: cmd, stdin: stdin, lines: bufio.NewScanner(stdout)}
	t.Cleanup(func() { p.kill() })
	return p
}

// until reads lines to the first that begins with prefix and returns its rest.
func (p *puller) until(prefix string) string {
	p.t.Helper()
	for p.lines.Scan() {
		if rest, ok := strings.CutPrefix(p.lines.Text(), prefix); ok {
			return strings.TrimSpace(rest)
		}
		if strings.HasPrefix(p.lines.Text(), "error") {
			p.t.Fatal(p.lines.Text())
		}
	}
	p.t.Fatalf("the other process ended without saying %q: %v", prefix, p.lines.Err())
	return ""
}

// kill is kill -9.
func (p *puller) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

// finish lets the helper close its image.
func (p *puller) finish() {
	p.t.Helper()
	if err := errors.Join(p.stdin.Close(), p.cmd.Wait()); err != nil {
		p.t.Error(err)
	}
}

// gate makes a registry hold back the end of the image's layers until it opens.
func gate(t testing.TB, srv *server, img v1.Image) (open func()) {
	t.Helper()
	opened := make(chan struct{})
	layer := isLayer(t, img)
	srv.setFault(func(w http.ResponseWriter, r *http.Request) {
		if layer(r) {
			select {
			case <-opened:
			case <-r.Context().Done():
				return
			}
		}
		srv.real.ServeHTTP(w, r)
	})
	open = sync.OnceFunc(func() { close(opened) })
	t.Cleanup(open)
	return open
}

// wantOnce checks that every blob was asked for once.
func wantOnce(t testing.TB, srv *server) {
	t.Helper()
	for blob, n := range srv.blobGets() {
		if n != 1 {
			t.Errorf("blob %s was asked for %d times", blob, n)
		}
	}
}

func TestParallelPullsDoTheWorkOnce(t *testing.T) {
	t.Parallel()
	srv := newServer(t)
	img := imageOf(t, "linux/"+arch, gzipLayer(t, files{"a": "1"}.tar(t)), gzipLayer(t, files{"b": "2"}.tar(t)))
	// The same digest by two names: the manifest is asked for twice, the rest once.
	refs := []string{srv.push(t, "app:1", img), srv.push(t, "app:2", img)}
	open := gate(t, srv, img)
	dir := t.TempDir()
	var waiting atomic.Int32
	group, ctx := errgroup.WithContext(t.Context())
	for k := range 10 {
		s := openStore(t, dir, quick())
		var once sync.Once
		group.Go(func() error {
			img, err := s.Ensure(ctx, refs[k%2], imagestore.EnsureOptions{PullMissing: true, Progress: func(p imagestore.Progress) {
				if p.Phase == imagestore.PhaseWait {
					once.Do(func() {
						if waiting.Add(1) == 9 {
							open()
						}
					})
				}
			}})
			if err != nil {
				return err
			}
			return img.Close()
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	wantOnce(t, srv)
	wantClean(t, dir, 1)
}

func TestWaitersSeeProgress(t *testing.T) {
	t.Parallel()
	srv := newServer(t)
	img := imageOf(t, "linux/"+arch, gzipLayer(t, files{"a": "1"}.tar(t)))
	ref := srv.push(t, "app:1", img)
	open := gate(t, srv, img)
	dir := t.TempDir()
	p := startPuller(t, dir, ref)
	p.until("progress download")
	s := openStore(t, dir, quick())
	got := ensure(t, s, ref, imagestore.EnsureOptions{PullMissing: true, Progress: func(p imagestore.Progress) {
		if p.Phase == imagestore.PhaseWait && p.BytesTotal > 0 && p.LayersTotal == 1 {
			open()
		}
	}})
	if digest := p.until("done"); digest != got.Digest {
		t.Errorf("the other process has %s, this one %s", digest, got.Digest)
	}
	wantOnce(t, srv)
	p.finish()
}

func TestWaiterEndsWithItsContext(t *testing.T) {
	t.Parallel()
	srv := newServer(t)
	img := simple(t, "1")
	ref := srv.push(t, "app:1", img)
	open := gate(t, srv, img)
	dir := t.TempDir()
	s := openStore(t, dir, quick())
	worker := make(chan error, 1)
	working := make(chan struct{})
	go func() {
		img, err := s.Ensure(t.Context(), ref, imagestore.EnsureOptions{PullMissing: true, Progress: func(p imagestore.Progress) {
			if p.Phase == imagestore.PhaseDownload && p.BytesDone == 0 {
				close(working)
			}
		}})
		if err == nil {
			err = img.Close()
		}
		worker <- err
	}()
	<-working
	ctx, cancel := context.WithCancelCause(t.Context())
	reason := errors.New("lost interest")
	_, err := s.Ensure(ctx, ref, imagestore.EnsureOptions{PullMissing: true, Progress: func(p imagestore.Progress) {
		if p.Phase == imagestore.PhaseWait {
			cancel(reason)
		}
	}})
	if !errors.Is(err, reason) {
		t.Errorf("error is %v, want the cause of the cancel", err)
	}
	open()
	if err := <-worker; err != nil {
		t.Error(err)
	}
	wantOnce(t, srv)
}

func TestCancelledPullIsTakenOver(t *testing.T) {
	t.Parallel()
	srv := newServer(t)
	img := simple(t, "1")
	ref := srv.push(t, "app:1", img)
	open := gate(t, srv, img)
	dir := t.TempDir()
	s := openStore(t, dir, quick())
	ctx, cancel := context.WithCancel(t.Context())
	worker := make(chan error, 1)
	working := make(chan struct{})
	go func() {
		_, err := s.Ensure(ctx, ref, imagestore.EnsureOptions{PullMissing: true, Progress: func(p imagestore.Progress) {
			if p.Phase == imagestore.PhaseDownload && p.BytesDone == 0 {
				close(working)
			}
		}})
		worker <- err
	}()
	<-working
	var once sync.Once
	ensure(t, s, ref, imagestore.EnsureOptions{PullMissing: true, Progress: func(p imagestore.Progress) {
		if p.Phase == imagestore.PhaseWait {
			once.Do(func() {
				cancel()
				open()
			})
		}
	}})
	if err := <-worker; !errors.Is(err, context.Canceled) {
		t.Errorf("the cancelled pull's error is %v", err)
	}
	wantClean(t, dir, 1)
}

func TestKilledPuller(t *testing.T) {
	t.Parallel()
	srv := newServer(t)
	img := imageOf(t, "linux/"+arch, gzipLayer(t, files{"a": "1"}.tar(t)), gzipLayer(t, files{"b": "2"}.tar(t)))
	ref := srv.push(t, "app:1", img)
	open := gate(t, srv, img)
	dir := t.TempDir()
	p := startPuller(t, dir, ref)
	p.until("progress download")
	work := func() int {
		entries, err := os.ReadDir(filepath.Join(dir, "tmp"))
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	// A live process' work is not touched by another's opening or collecting.
	s := openStore(t, dir, quick())
	if _, err := s.GC(t.Context(), imagestore.GCOptions{All: true}); err != nil || work() != 1 {
		t.Fatalf("%d work directories, %v; want the live one", work(), err)
	}
	// One waits for it in this process while it dies.
	waiting := make(chan struct{})
	result := make(chan error, 1)
	var once sync.Once
	go func() {
		img, err := s.Ensure(t.Context(), ref, imagestore.EnsureOptions{PullMissing: true, Progress: func(p imagestore.Progress) {
			if p.Phase == imagestore.PhaseWait {
				once.Do(func() { close(waiting) })
			}
		}})
		if err == nil {
			err = img.Close()
		}
		result <- err
	}()
	<-waiting
	p.kill()
	open()
	if err := <-result; err != nil {
		t.Fatal(err)
	}
	if work() != 1 {
		t.Errorf("%d work directories, want the dead one's", work())
	}
	wantFiles(t, ensure(t, openStore(t, dir, quick()), ref, imagestore.EnsureOptions{}).Lower, files{"a": "1", "b": "2"})
	wantClean(t, dir, 1)
}

// TestKillAtEachStep has a puller kill itself at its first step, then at its
// second, and so on. Whenever it was, the store must then give the image, whole.
func TestKillAtEachStep(t *testing.T) {
	t.Parallel()
	layout := filepath.Join(t.TempDir(), "img")
	body := noise(3 << 20)
	writeLayout(t, layout, map[string]v1.Image{"": imageOf(t, "linux/"+arch, plainLayer(files{"a": body}.tar(t)), gzipLayer(t, files{"b": "2"}.tar(t)))})
	for n := 1; ; n++ {
		dir := t.TempDir()
		p := startPuller(t, dir, "oci:"+layout, fmt.Sprintf("IMAGESTORE_TEST_DIE=%d", n))
		done := false
		for !done && p.lines.Scan() {
			done = strings.HasPrefix(p.lines.Text(), "done")
		}
		if done {
			if n < 4 {
				t.Errorf("the pull has %d steps only", n)
			}
			p.finish()
			return
		}
		p.kill()
		s := openStore(t, dir, quick())
		img := ensure(t, s, "oci:"+layout, pull)
		wantFiles(t, img.Lower, files{"a": body, "b": "2"})
		closeImage(t, img)
		wantClean(t, dir, 1)
		if e, ok := byRef(t, s, "oci:"+layout); !ok || e.Digest != img.Digest {
			t.Errorf("after a kill at step %d the reference stands for %q", n, e.Digest)
		}
	}
}

func TestOtherProcessesHoldImages(t *testing.T) {
	t.Parallel()
	layout := filepath.Join(t.TempDir(), "img")
	writeLayout(t, layout, map[string]v1.Image{"": simple(t, "1")})
	dir := t.TempDir()
	s := openStore(t, dir, quick())
	p := startPuller(t, dir, "oci:"+layout)
	digest := p.until("done")
	var inUse *imagestore.InUseError
	if err := s.Remove(t.Context(), digest); !errors.As(err, &inUse) {
		t.Errorf("error is %v, want an InUseError", err)
	}
	if result, err := s.GC(t.Context(), imagestore.GCOptions{All: true}); err != nil || result.Kept != 1 || len(result.Removed) != 0 {
		t.Errorf("GC: %+v, %v; want the held image kept", result, err)
	}
	p.finish()
	if err := s.Remove(t.Context(), digest); err != nil {
		t.Error(err)
	}
	wantClean(t, dir, 0)
}

// TestEnsureAgainstCollector lets users and a collector race: every image that
// Ensure returns must be whole for as long as it is held.
func TestEnsureAgainstCollector(t *testing.T) {
	t.Parallel()
	layout := filepath.Join(t.TempDir(), "img")
	writeLayout(t, layout, map[string]v1.Image{"": simple(t, "1")})
	dir := t.TempDir()
	var group, collectors errgroup.Group
	done := make(chan struct{})
	for range 2 {
		s := openStore(t, dir, quick())
		collectors.Go(func() error {
			for {
				select {
				case <-done:
					return nil
				default:
				}
				if _, err := s.GC(t.Context(), imagestore.GCOptions{All: true}); err != nil {
					return err
				}
			}
		})
	}
	for range 4 {
		s := openStore(t, dir, quick())
		group.Go(func() error {
			for range 25 {
				img, err := s.Ensure(t.Context(), "oci:"+layout, pull)
				if err != nil {
					return err
				}
				if _, err := os.Stat(img.Lower); err != nil {
					return err
				}
				if err := img.Close(); err != nil {
					return err
				}
			}
			return nil
		})
	}
	err := group.Wait()
	close(done)
	if err := errors.Join(err, collectors.Wait()); err != nil {
		t.Fatal(err)
	}
}
