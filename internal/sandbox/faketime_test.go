package sandbox_test

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"

	guestv1 "github.com/iii-hq/workers/sandbox-libkrun/api/guest/v1"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/guest"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/sandbox"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/vmtest"
)

// fakeVM is a VM without any process, for fake time: its agent is a stub, whose
// calls block until the VM ends unless a field says otherwise.
type fakeVM struct {
	guestv1.UnimplementedAgentServiceServer
	guestv1.UnimplementedFileServiceServer

	// stopErr, where set, is what Stop fails with at once; stopTime is how long
	// Stop takes otherwise.
	stopErr  error
	stopTime time.Duration
	// fast makes execs and stats succeed at once.
	fast bool
	// write is what the agent does with an upload.
	write func(guestv1.FileService_WriteFileServer) error
	// read is what a download gives, after which it stands still.
	read string
	// networkIdle, where set, is how long nothing has gone through the network.
	networkIdle func() (time.Duration, error)

	client *guest.Client
	server *grpc.Server
	conn   *grpc.ClientConn
	served chan error

	mu    sync.Mutex
	stops int
	kills int
	done  chan struct{}
}

func (v *fakeVM) boot(t testing.TB) *fakeVM {
	listener := bufconn.Listen(1 << 20)
	v.server, v.served, v.done = grpc.NewServer(), make(chan error, 1), make(chan struct{})
	guestv1.RegisterAgentServiceServer(v.server, v)
	guestv1.RegisterFileServiceServer(v.server, v)
	go func() { v.served <- v.server.Serve(listener) }()
	conn, err := grpc.NewClient("passthrough:///stub", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
	if err != nil {
		t.Error(err)
	}
	v.conn, v.client = conn, guest.New(conn)
	return v
}

func (v *fakeVM) Guest() *guest.Client  { return v.client }
func (v *fakeVM) Done() <-chan struct{} { return v.done }
func (v *fakeVM) End() error            { return errors.New("the power was cut") }

func (v *fakeVM) Status(context.Context) (vm.Status, error) { return vm.Status{}, nil }

func (v *fakeVM) Stats(context.Context) (vm.Stats, error) {
	if v.networkIdle == nil {
		return vm.Stats{}, errors.New("the shim does not answer")
	}
	idle, err := v.networkIdle()
	return vm.Stats{Network: &vm.NetworkStats{Idle: idle}}, err
}

func (v *fakeVM) Kill() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.kills++
	select {
	case <-v.done:
	default:
		close(v.done)
		v.server.Stop()
		_ = v.conn.Close()
		return <-v.served
	}
	return nil
}

func (v *fakeVM) Stop(ctx context.Context, _ time.Duration) error {
	v.mu.Lock()
	v.stops++
	err := v.stopErr
	v.mu.Unlock()
	if err != nil {
		return err
	}
	timer := time.NewTimer(v.stopTime)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
	return v.Kill()
}

func (v *fakeVM) counts() (stops, kills int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.stops, v.kills
}

func (v *fakeVM) wait(ctx context.Context) error {
	if v.fast {
		return nil
	}
	<-ctx.Done()
	return ctx.Err()
}

func (v *fakeVM) Exec(stream guestv1.AgentService_ExecServer) error {
	if err := v.wait(stream.Context()); err != nil {
		return err
	}
	return stream.Send(&guestv1.ExecResponse{Response: &guestv1.ExecResponse_Exit{Exit: &guestv1.ExecExit{}}})
}

func (v *fakeVM) Stat(ctx context.Context, _ *guestv1.StatRequest) (*guestv1.StatResponse, error) {
	return &guestv1.StatResponse{}, v.wait(ctx)
}

func (v *fakeVM) WriteFile(stream guestv1.FileService_WriteFileServer) error { return v.write(stream) }

func (v *fakeVM) ReadFile(_ *guestv1.ReadFileRequest, stream guestv1.FileService_ReadFileServer) error {
	header := &guestv1.ReadFileHeader{Size: 1 << 30}
	if err := stream.Send(&guestv1.ReadFileResponse{Response: &guestv1.ReadFileResponse_Header{Header: header}}); err != nil {
		return err
	}
	chunk := &guestv1.ReadFileResponse_Chunk{Chunk: []byte(v.read)}
	if err := stream.Send(&guestv1.ReadFileResponse{Response: chunk}); err != nil {
		return err
	}
	return v.wait(stream.Context())
}

// faked runs test in fake time with a Manager whose next VMs are vms.
func faked(t *testing.T, change func(*sandbox.Config), test func(t *testing.T, m *sandbox.Manager), vms ...*fakeVM) {
	t.Helper()
	t.Parallel()
	dir := vmtest.ShortDir(t)
	store := images(t, dir)
	synctest.Test(t, func(t *testing.T) {
		cfg := defaults(t, store)
		cfg.Log = vmtest.Logger(t)
		if change != nil {
			change(&cfg)
		}
		next := vms
		m := sandbox.StartOn(cfg, func(context.Context, vm.Request) (sandbox.Machine, error) {
			v := next[0]
			next = next[1:]
			return v.boot(t), nil
		})
		test(t, m)
		for _, v := range vms {
			v.mu.Lock()
			v.stopErr = nil
			v.mu.Unlock()
		}
		if err := m.Close(context.Background()); err != nil {
			t.Errorf("close: %v", err)
		}
	})
}

// pass lets fake time go by.
func pass(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

// Semantics 4.4: the reaper looks every 10 s and takes what is idle for longer
// than its time.
func TestReaper_EndsWhatIsIdle(t *testing.T) {
	faked(t, nil, func(t *testing.T, m *sandbox.Manager) {
		short, err := m.Create(t.Context(), sandbox.CreateRequest{Image: "python", IdleTimeoutSecs: new(uint64(20))})
		if err != nil {
			t.Fatal(err)
		}
		zero, err := m.Create(t.Context(), sandbox.CreateRequest{Image: "python", IdleTimeoutSecs: new(uint64(0))})
		if err != nil {
			t.Fatal(err)
		}
		_, err = m.Create(t.Context(), sandbox.CreateRequest{Image: "python", IdleTimeoutSecs: new(^uint64(0))})
		if err != nil {
			t.Fatal(err)
		}
		fallback := create(t, m)
		alive := func(after time.Duration, want int) {
			t.Helper()
			if list := m.List(); len(list) != want {
				t.Errorf("after %v: %d sandboxes, want %d", after, len(list), want)
			}
		}
		pass(10*time.Second - 1)
		alive(10*time.Second-1, 4)
		pass(1)
		alive(10*time.Second, 3)
		_, err = m.Stat(t.Context(), zero.SandboxID, "/")
		wantCode(t, err, fault.S002)
		pass(10 * time.Second) // exactly its time: not yet
		alive(20*time.Second, 3)
		pass(10 * time.Second)
		alive(30*time.Second, 2)
		_, err = m.Stat(t.Context(), short.SandboxID, "/")
		wantCode(t, err, fault.S002)
		pass(270 * time.Second)
		alive(300*time.Second, 2)
		pass(10 * time.Second)
		alive(310*time.Second, 1)
		_, err = m.Stat(t.Context(), fallback, "/")
		wantCode(t, err, fault.S002)
		pass(100 * 24 * time.Hour)
		alive(100*24*time.Hour, 1)
	}, &fakeVM{}, &fakeVM{}, &fakeVM{}, &fakeVM{})
}

// Semantics 4.4: what is activity, and what is not.
func TestReaper_KnowsActivity(t *testing.T) {
	for name, tt := range map[string]struct {
		call   func(m *sandbox.Manager, id string)
		active bool
	}{
		"exec": {func(m *sandbox.Manager, id string) { _, _ = m.Exec(context.Background(), shellExec(id)) }, true},
		"refused exec": {func(m *sandbox.Manager, id string) {
			_, _ = m.Exec(context.Background(), sandbox.ExecRequest{SandboxID: id})
		}, false},
		"bad stdin": {func(m *sandbox.Manager, id string) {
			req := shellExec(id)
			req.StdinB64 = new("?")
			_, _ = m.Exec(context.Background(), req)
		}, true}, // 12 #15
		"stat":       {func(m *sandbox.Manager, id string) { _, _ = m.Stat(context.Background(), id, "/") }, true},
		"failing fs": {func(m *sandbox.Manager, id string) { _, _ = m.ListDir(context.Background(), id, "/") }, true},
		"list":       {func(m *sandbox.Manager, _ string) { m.List() }, false},
		"catalog":    {func(m *sandbox.Manager, _ string) { m.Catalog() }, false},
	} {
		t.Run(name, func(t *testing.T) {
			faked(t, func(c *sandbox.Config) { c.DefaultIdleTimeoutSecs = 55 }, func(t *testing.T, m *sandbox.Manager) {
				id := create(t, m)
				pass(52 * time.Second)
				tt.call(m, id)
				pass(9 * time.Second) // 61 s after its creation
				if alive := len(m.List()) == 1; alive != tt.active {
					t.Errorf("alive: %v", alive)
				}
				pass(49 * time.Second) // 58 s after the call
				if list := m.List(); len(list) != 0 {
					t.Errorf("still there: %+v", list)
				}
			}, &fakeVM{fast: true})
		})
	}
}

func shellExec(id string) sandbox.ExecRequest { return sandbox.ExecRequest{SandboxID: id, Cmd: "true"} }

// Semantics 12 #24 and 11 #12: a program keeps its sandbox for as long as a
// program may run and a minute, anything else for as long as it takes.
func TestReaper_SparesWhatIsBusy(t *testing.T) {
	faked(t, func(c *sandbox.Config) {
		c.DefaultIdleTimeoutSecs, c.MaxExecTimeoutMs = 30, 3_600_000
	}, func(t *testing.T, m *sandbox.Manager) {
		program, transfer := create(t, m), create(t, m)
		ended := make(chan error, 2)
		go func() {
			req := shellExec(program)
			req.TimeoutMs = new(^uint64(0))
			_, err := m.Exec(context.Background(), req)
			ended <- err
		}()
		file, err := m.OpenFile(t.Context(), transfer, "/f")
		if err != nil {
			t.Fatal(err)
		}
		hour := time.Hour
		for at := time.Duration(0); at < hour; at += 4 * time.Minute {
			pass(4 * time.Minute)
			// A byte now and then is progress.
			if _, err := file.Read(make([]byte, 1)); err != nil {
				t.Fatal(err)
			}
		}
		if list := m.List(); len(list) != 2 {
			t.Fatalf("busy sandboxes were ended: %+v", list)
		}
		// The program's limit is an hour, and its agent is dead: the call gives up 20 s
		// later. Its sandbox is idle from then on.
		err = <-ended
		wantCode(t, err, fault.S300, "hangs")
		_ = file.Close()
		pass(40 * time.Second)
		if list := m.List(); len(list) != 0 {
			t.Errorf("still there: %+v", list)
		}
	}, &fakeVM{}, &fakeVM{read: strings.Repeat("x", 1000)})
}

// Semantics 12 #24: a program keeps its sandbox no longer than a program may run. No
// call lasts that long; it is for a slot that was not given back.
func TestReaper_GivesUpOnPrograms(t *testing.T) {
	t.Parallel()
	const minute = time.Minute
	for _, tt := range []struct {
		ops, execs uint32
		idle       time.Duration
		want       bool
	}{
		{0, 0, minute, false},
		{0, 0, minute + 1, true},
		{0, 1, minute + 1, false},
		{0, 1, 6 * minute, false},
		{0, 1, 6*minute + 1, true},
		{1, 1, 60 * minute, false},
	} {
		if got := sandbox.Due(tt.ops, tt.execs, tt.idle, 5*minute); got != tt.want {
			t.Errorf("%+v: %v", tt, got)
		}
	}
}

// A claim by the reaper and a stop of a user's meet: the VM is ended once, and
// both succeed. Calls meanwhile are S004, later ones S002.
func TestReaper_AndStopMeet(t *testing.T) {
	slow := &fakeVM{stopTime: 5 * time.Second}
	faked(t, func(c *sandbox.Config) { c.DefaultIdleTimeoutSecs, c.MaxSandboxes = 5, 1 }, func(t *testing.T, m *sandbox.Manager) {
		id := create(t, m)
		pass(10 * time.Second)
		if list := m.List(); len(list) != 1 || !list[0].Stopped {
			t.Fatalf("%+v", list)
		}
		_, err := m.Exec(t.Context(), shellExec(id))
		wantCode(t, err, fault.S004)
		_, err = m.WriteFile(t.Context(), sandbox.WriteRequest{SandboxID: id, Content: new(""), Mode: "?"})
		wantCode(t, err, fault.S004)
		_, err = m.OpenFile(t.Context(), id, "/")
		wantCode(t, err, fault.S004)
		_, err = m.Create(t.Context(), sandbox.CreateRequest{Image: "python"}) // it still counts
		wantCode(t, err, fault.S400)
		begin := time.Now()
		if _, err := m.Stop(t.Context(), id, false); err != nil || time.Since(begin) != time.Second {
			t.Errorf("stop without wait: %v after %v", err, time.Since(begin))
		}
		if _, err := m.Stop(t.Context(), id, true); err != nil || time.Since(begin) != 5*time.Second {
			t.Errorf("stop with wait: %v after %v", err, time.Since(begin))
		}
		if stops, kills := slow.counts(); stops != 1 || kills != 1 {
			t.Errorf("%d stops, %d kills", stops, kills)
		}
		_, err = m.Exec(t.Context(), shellExec(id))
		wantCode(t, err, fault.S002)
	}, slow)
}

// Semantics 5.5: a stop that fails leaves the sandbox as it was.
func TestStop_ThatFailsCanBeTriedAgain(t *testing.T) {
	stuck := &fakeVM{stopErr: errors.New("it does not die"), fast: true}
	faked(t, nil, func(t *testing.T, m *sandbox.Manager) {
		id := create(t, m)
		for _, wait := range []bool{true, false} {
			_, err := m.Stop(t.Context(), id, wait)
			wantCode(t, err, fault.S300, "it does not die")
			if list := m.List(); len(list) != 1 || list[0].Stopped {
				t.Errorf("%+v", list)
			}
			if _, err := m.Exec(t.Context(), shellExec(id)); err != nil {
				t.Errorf("a sandbox that goes on: %v", err)
			}
			if _, err := m.Stat(t.Context(), id, "/"); err != nil {
				t.Errorf("a sandbox that goes on: %v", err)
			}
		}
		stuck.mu.Lock()
		stuck.stopErr = nil
		stuck.mu.Unlock()
		if _, err := m.Stop(t.Context(), id, true); err != nil {
			t.Error(err)
		}
	}, stuck)
}

// An adapter has 10 s: VMs that end in order get 4 of them.
func TestClose_IsInTime(t *testing.T) {
	for name, tt := range map[string]struct {
		stop, want time.Duration
		bound      time.Duration
	}{
		"in order":       {2 * time.Second, 2 * time.Second, time.Hour},
		"by force":       {time.Hour, 4 * time.Second, time.Hour},
		"context's end":  {time.Hour, time.Second, time.Second},
		"nothing to end": {0, 0, time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			faked(t, nil, func(t *testing.T, m *sandbox.Manager) {
				var calls []chan error
				for range 2 {
					id := create(t, m)
					ended := make(chan error, 1)
					go func() {
						_, err := m.Exec(context.Background(), shellExec(id))
						ended <- err
					}()
					calls = append(calls, ended)
				}
				synctest.Wait()
				ctx, cancel := context.WithTimeout(t.Context(), tt.bound)
				defer cancel()
				begin := time.Now()
				if err := m.Close(ctx); err != nil || time.Since(begin) != tt.want {
					t.Errorf("%v after %v, want %v", err, time.Since(begin), tt.want)
				}
				for _, ended := range calls {
					wantCode(t, <-ended, fault.S300)
				}
				_, err := m.Create(t.Context(), sandbox.CreateRequest{Image: "python"})
				wantCode(t, err, fault.S300, "shutting down")
			}, &fakeVM{stopTime: tt.stop}, &fakeVM{stopTime: tt.stop})
		})
	}
}

func TestClose_TellsWhatItCouldNotEnd(t *testing.T) {
	immortal := &fakeVM{stopErr: errors.New("it does not die")}
	faked(t, nil, func(t *testing.T, m *sandbox.Manager) {
		create(t, m)
		begin := time.Now()
		if err := m.Close(t.Context()); err == nil || time.Since(begin) != 7*time.Second {
			t.Errorf("%v after %v", err, time.Since(begin))
		}
		if err := immortal.Kill(); err != nil {
			t.Error(err)
		}
	}, immortal)
}

// trickle gives a byte after each pause.
type trickle struct {
	pauses []time.Duration
	end    chan struct{}
}

func (r *trickle) Read(p []byte) (int, error) {
	if len(r.pauses) == 0 {
		return 0, io.EOF
	}
	timer := time.NewTimer(r.pauses[0])
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-r.end:
		return 0, io.ErrClosedPipe
	}
	r.pauses = r.pauses[1:]
	return copy(p, "x"), nil
}

func (r *trickle) Close() error {
	close(r.end)
	return nil
}

// Semantics 5.17: no data for 5 s, the time to the first byte included, is S218;
// a guest that takes nothing is not the caller's fault.
func TestWriteFile_GivesUpOnSilence(t *testing.T) {
	reads := func(stream guestv1.FileService_WriteFileServer) error {
		for {
			if _, err := stream.Recv(); err != nil {
				break
			}
		}
		return stream.SendAndClose(&guestv1.WriteFileResponse{BytesWritten: 3})
	}
	hangs := func(stream guestv1.FileService_WriteFileServer) error {
		<-stream.Context().Done()
		return stream.Context().Err()
	}
	s := time.Second
	for name, tt := range map[string]struct {
		guest  func(guestv1.FileService_WriteFileServer) error
		pauses []time.Duration
		code   fault.Code
		after  time.Duration
	}{
		"slow but steady":  {reads, []time.Duration{4 * s, 4 * s, 4 * s}, "", 12 * s},
		"no first byte":    {reads, []time.Duration{time.Hour}, fault.S218, 5 * s},
		"stalls later":     {reads, []time.Duration{4 * s, 4 * s, 6 * s}, fault.S218, 13 * s},
		"guest hangs":      {hangs, []time.Duration{s}, fault.S216, 121 * s},
		"guest and caller": {hangs, []time.Duration{time.Hour}, fault.S218, 5 * s},
		"guest refuses": {func(guestv1.FileService_WriteFileServer) error {
			return fault.NotFound("/f", nil)
		}, []time.Duration{time.Hour}, fault.S216, 0}, // 11 #11: at once
	} {
		t.Run(name, func(t *testing.T) {
			faked(t, nil, func(t *testing.T, m *sandbox.Manager) {
				id := create(t, m)
				body := &trickle{pauses: tt.pauses, end: make(chan struct{})}
				begin := time.Now()
				_, err := m.WriteFile(t.Context(), sandbox.WriteRequest{
					SandboxID: id, Path: "/f", Mode: "0644",
					Stream: func(context.Context) (io.ReadCloser, error) { return body, nil },
				})
				if took := time.Since(begin); took != tt.after {
					t.Errorf("after %v, want %v", took, tt.after)
				}
				if tt.code != "" {
					wantCode(t, err, tt.code)
				} else if err != nil {
					t.Error(err)
				}
				if s := m.List()[0]; s.Stopped {
					t.Errorf("%+v", s)
				}
			}, &fakeVM{write: tt.guest})
		})
	}
}

// A reader that never comes back, or a guest that gives nothing, does not keep a
// sandbox for ever.
func TestOpenFile_GivesUpOnSilence(t *testing.T) {
	for _, reads := range []bool{true, false} {
		faked := func(t *testing.T) {
			faked(t, func(c *sandbox.Config) { c.DefaultIdleTimeoutSecs = 30 }, func(t *testing.T, m *sandbox.Manager) {
				id := create(t, m)
				f, err := m.OpenFile(t.Context(), id, "/f")
				if err != nil {
					t.Fatal(err)
				}
				if reads {
					begin := time.Now()
					n, err := io.Copy(io.Discard, f)
					wantCode(t, err, fault.S216, "nothing moved for 6m0s")
					if n != 3 || time.Since(begin) != 6*time.Minute {
						t.Errorf("%d bytes, %v", n, time.Since(begin))
					}
				} else {
					pass(6*time.Minute - 1)
					if len(m.List()) != 1 {
						t.Fatal("ended under a transfer")
					}
					pass(1)
				}
				pass(time.Minute)
				if list := m.List(); len(list) != 0 {
					t.Errorf("still there: %+v", list)
				}
				if _, err := f.Read(make([]byte, 10)); !errors.Is(err, fault.S216) && !reads {
					t.Errorf("a read too late: %v", err)
				}
				_ = f.Close()
			}, &fakeVM{read: "abc"})
		}
		t.Run(map[bool]string{true: "guest", false: "reader"}[reads], faked)
	}
}

// An operation that the guest does not end is ended for it.
func TestFiles_HaveADeadline(t *testing.T) {
	faked(t, nil, func(t *testing.T, m *sandbox.Manager) {
		id := create(t, m)
		begin := time.Now()
		_, err := m.Stat(t.Context(), id, "/f")
		wantCode(t, err, fault.S216, "/f", "1m0s")
		if took := time.Since(begin); took != time.Minute {
			t.Errorf("after %v", took)
		}
	}, &fakeVM{})
}
