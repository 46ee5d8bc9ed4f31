package shim_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	shimv1 "github.com/iii-hq/workers/sandbox-libkrun/api/shim/v1"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
)

func openOn(ctx context.Context, t *testing.T, conn *grpc.ClientConn, method string) grpc.ClientStream {
	t.Helper()
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method, grpc.ForceCodecV2(bytesCodec{}))
	if err != nil {
		t.Fatal(err)
	}
	return stream
}

func (v *vm) open(ctx context.Context, method string) grpc.ClientStream {
	v.t.Helper()
	return openOn(ctx, v.t, v.client(), method)
}

func roundTrip(t *testing.T, stream grpc.ClientStream, want []byte) {
	t.Helper()
	if err := stream.SendMsg(&want); err != nil {
		t.Fatal(err)
	}
	var got []byte
	if err := stream.RecvMsg(&got); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Fatalf("got %d bytes back, not the %d sent", len(got), len(want))
	}
}

func TestMessagesPassUnchanged(t *testing.T) {
	t.Parallel()
	v := newVM(t).start()
	stream := v.open(v.context(), "/guest.v1.Test/Echo")
	for _, size := range []int{0, 1, 64 << 10, 1 << 20} {
		roundTrip(t, stream, bytes.Repeat([]byte{0xa5, 0}, size)[:size])
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	var b []byte
	if err := stream.RecvMsg(&b); !errors.Is(err, io.EOF) {
		t.Errorf("after half-close: %v", err)
	}
}

func TestTooLargeMessageIsRefused(t *testing.T) {
	t.Parallel()
	v := newVM(t).start()
	stream := v.open(v.context(), "/guest.v1.Test/Echo")
	big := make([]byte, 1<<20+1)
	_ = stream.SendMsg(&big) // the status comes with RecvMsg
	var b []byte
	if err := stream.RecvMsg(&b); status.Code(err) != codes.ResourceExhausted && status.Code(err) != codes.Canceled {
		t.Errorf("error is %v", err)
	}
}

func TestMetadataAndStatusPass(t *testing.T) {
	t.Parallel()
	v := newVM(t).start()
	ctx := metadata.AppendToOutgoingContext(v.context(), "k", "1", "k", "2", "k-bin", "\x00\x01")
	ctx, cancel := context.WithTimeout(ctx, 45*time.Second)
	defer cancel()
	stream := v.open(ctx, "/guest.v1.Test/Fail")
	var b []byte
	err := stream.RecvMsg(&b)
	if got := status.Convert(err); got.Code() != codes.DataLoss || got.Message() != "as ordered" {
		t.Errorf("status is %v", err)
	}
	header, err := stream.Header()
	if err != nil || fmt.Sprint(header["h"], header["h-bin"]) != "[1] [\x00\xff]" {
		t.Errorf("header is %q, %v", header, err)
	}
	if got := stream.Trailer()["t"]; len(got) != 1 || got[0] != "2" {
		t.Errorf("trailer is %q", stream.Trailer())
	}
	md := v.machine.service.lastMetadata()
	if fmt.Sprint(md["k"], md["k-bin"]) != "[1 2] [\x00\x01]" {
		t.Errorf("the guest got %q", md)
	}
}

func TestDeadlinePasses(t *testing.T) {
	t.Parallel()
	v := newVM(t).start()
	v.until("the VM runs", running)
	ctx, cancel := context.WithTimeout(v.context(), 50*time.Millisecond)
	defer cancel()
	stream := v.open(ctx, "/guest.v1.Test/Stuck")
	var b []byte
	if err := stream.RecvMsg(&b); status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("error is %v", err)
	}
	v.expectCancelled("/guest.v1.Test/Stuck")
}

func (v *vm) expectCancelled(method string) {
	v.t.Helper()
	select {
	case got := <-v.machine.service.cancelled:
		if got != method {
			v.t.Errorf("%s was cancelled, want %s", got, method)
		}
	case <-time.After(patience):
		v.t.Error("the guest never heard of the cancellation")
	}
}

func TestCancellationReachesTheGuest(t *testing.T) {
	t.Parallel()
	v := newVM(t).start()
	ctx, cancel := context.WithCancel(v.context())
	stream := v.open(ctx, "/guest.v1.Test/Echo")
	roundTrip(t, stream, []byte("x"))
	cancel()
	v.expectCancelled("/guest.v1.Test/Echo")
	v.until("no call is in flight", func(s *shimv1.StatusResponse) bool { return s.GetCallsInFlight() == 0 })
}

func TestDisappearingClientEndsItsCalls(t *testing.T) {
	t.Parallel()
	v := newVM(t).start()
	conn := v.client()
	stream := openOn(v.context(), t, conn, "/guest.v1.Test/Echo")
	roundTrip(t, stream, []byte("x"))
	if err := conn.Close(); err != nil {
		t.Fatal(err)
	}
	v.expectCancelled("/guest.v1.Test/Echo")
}

func TestOtherServicesAreUnknown(t *testing.T) {
	t.Parallel()
	v := newVM(t).start()
	for _, method := range []string{"/guest.v2.Test/Echo", "/other/Echo", "/shim.v1.ShimService/Nothing"} {
		stream := v.open(v.context(), method)
		var b []byte
		if err := stream.RecvMsg(&b); status.Code(err) != codes.Unimplemented {
			t.Errorf("%s: %v", method, err)
		}
	}
}

func TestMuchDataBothWays(t *testing.T) {
	t.Parallel()
	const mib = 100
	v := newVM(t).start()
	conn := v.client()
	var work sync.WaitGroup
	work.Go(func() {
		stream := openOn(v.context(), t, conn, "/guest.v1.Test/Source")
		request := []byte{mib}
		if err := stream.SendMsg(&request); err != nil {
			t.Error(err)
		}
		size := 0
		for i := 0; ; i++ {
			var b []byte
			err := stream.RecvMsg(&b)
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Error(err)
				return
			}
			if b[0] != byte(i) {
				t.Errorf("message %d is number %d", i, b[0])
				return
			}
			size += len(b)
		}
		if size != mib<<20 {
			t.Errorf("got %d bytes", size)
		}
	})
	work.Go(func() {
		stream := openOn(v.context(), t, conn, "/guest.v1.Test/Sink")
		chunk := make([]byte, 64<<10)
		for range mib * 16 {
			if err := stream.SendMsg(&chunk); err != nil {
				t.Error(err)
				return
			}
		}
		if err := stream.CloseSend(); err != nil {
			t.Error(err)
		}
		var total []byte
		if err := stream.RecvMsg(&total); err != nil || string(total) != time.Duration(mib<<20).String() {
			t.Errorf("the guest got %s, %v", total, err)
		}
	})
	work.Wait()
}

// A reader that does not read, and a guest that does not read, stall their own
// calls alone, and the shim takes no more from them than the windows allow.
func TestStuckReadersStallOnlyThemselves(t *testing.T) {
	t.Parallel()
	v := newVM(t).start()
	conn := v.client()
	ctx, cancel := context.WithCancel(v.context())
	defer cancel()
	for range 20 {
		stream := openOn(ctx, t, conn, "/guest.v1.Test/Source")
		request := []byte{50}
		if err := stream.SendMsg(&request); err != nil {
			t.Fatal(err)
		}
		var b []byte
		if err := stream.RecvMsg(&b); err != nil {
			t.Fatal(err)
		}
		// The rest is never read.
	}
	stuck := openOn(ctx, t, conn, "/guest.v1.Test/Stuck")
	sent := make(chan int, 1)
	go func() {
		chunk := make([]byte, 64<<10)
		n := 0
		for stuck.SendMsg(&chunk) == nil {
			n += len(chunk)
		}
		sent <- n
	}()
	for range 100 {
		roundTrip(t, openOn(v.context(), t, conn, "/guest.v1.Test/Echo"), []byte("quick"))
	}
	cancel()
	select {
	case n := <-sent:
		if n > 4<<20 {
			t.Errorf("a guest that reads nothing was sent %d bytes", n)
		}
	case <-time.After(patience):
		t.Error("the sender still hangs")
	}
}

func TestManyCalls(t *testing.T) {
	t.Parallel()
	v := newVM(t).start()
	conn := v.client()
	var work, open sync.WaitGroup
	open.Add(200)
	all := make(chan struct{})
	for i := range 200 {
		work.Go(func() {
			stream := openOn(v.context(), t, conn, "/guest.v1.Test/Echo")
			roundTrip(t, stream, fmt.Appendf(nil, "call %d", i))
			open.Done()
			<-all
			roundTrip(t, stream, bytes.Repeat([]byte{byte(i)}, 10_000))
			_ = stream.CloseSend()
		})
	}
	open.Wait()
	status := v.until("all calls are in flight", func(s *shimv1.StatusResponse) bool { return s.GetCallsInFlight() == 200 })
	close(all)
	work.Wait()
	later := v.until("no call is in flight", func(s *shimv1.StatusResponse) bool { return s.GetCallsInFlight() == 0 })
	if later.GetLastActivityUnixMs() < status.GetLastActivityUnixMs() {
		t.Errorf("last activity went from %d to %d", status.GetLastActivityUnixMs(), later.GetLastActivityUnixMs())
	}
}

func TestCallsWaitForTheLink(t *testing.T) {
	t.Parallel()
	v := newVM(t)
	v.machine.hang = true
	v.start()
	ctx, cancel := context.WithTimeout(v.context(), 100*time.Millisecond)
	defer cancel()
	stream := v.open(ctx, "/guest.v1.Test/Echo")
	var b []byte
	if err := stream.RecvMsg(&b); status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("before the boot: %v", err)
	}
}

func TestCallsAreToldHowTheVMEnded(t *testing.T) {
	t.Parallel()
	for _, boot := range []bool{false, true} {
		v := newVM(t)
		v.machine.hang = !boot
		v.start()
		stream := v.open(v.context(), "/guest.v1.Test/Echo")
		if boot {
			roundTrip(t, stream, []byte("x"))
		} else {
			v.until("the call waits", func(s *shimv1.StatusResponse) bool { return s.GetCallsInFlight() == 1 })
		}
		v.machine.say("Kernel panic - not syncing: oops\n", "")
		v.machine.powerOff(bootspec.End{Class: bootspec.EndGuest})
		var b []byte
		err := stream.RecvMsg(&b)
		if got := status.Convert(err); got.Code() != codes.Unavailable || !strings.Contains(got.Message(), "vmm-crashed") || !strings.Contains(got.Message(), "oops") {
			t.Errorf("booted=%v: %v", boot, err)
		}
	}
}

func TestShutdownThatWasAskedFor(t *testing.T) {
	t.Parallel()
	v := newVM(t).start()
	stream := v.open(v.context(), "/guest.v1.AgentService/Shutdown")
	var b []byte
	if err := stream.RecvMsg(&b); !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	v.machine.say("some program printed: Kernel panic - not syncing\n", "")
	v.machine.powerOff(bootspec.End{Class: bootspec.EndGuest})
	v.expectEnd(bootspec.EndGuest, "as asked")
}

func TestBrokenSessionIsMadeAnew(t *testing.T) {
	t.Parallel()
	for _, dialled := range []bool{false, true} {
		t.Run(fmt.Sprintf("dialled=%v", dialled), func(t *testing.T) {
			t.Parallel()
			v := newVM(t)
			v.machine.dialled = dialled
			v.start()
			conn := v.client()
			for range 5 {
				// In the middle of a download, so that stale bytes are under way.
				stream := openOn(v.context(), t, conn, "/guest.v1.Test/Source")
				request := []byte{100}
				if err := stream.SendMsg(&request); err != nil {
					t.Fatal(err)
				}
				var b []byte
				if err := stream.RecvMsg(&b); err != nil {
					t.Fatal(err)
				}
				next := v.machine.nextSession()
				v.machine.breakLink()
				var err error
				for err == nil {
					err = stream.RecvMsg(&b)
				}
				if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "the link to the agent broke") {
					t.Errorf("the call ended with %v", err)
				}
				select {
				case <-next:
				case <-time.After(patience):
					t.Fatal("there is no new session")
				}
				roundTrip(t, openOn(v.context(), t, conn, "/guest.v1.Test/Echo"), []byte("again"))
			}
		})
	}
}

func TestWrongTokenIsRefused(t *testing.T) {
	t.Parallel()
	v := newVM(t)
	v.machine.greet = strings.Repeat("0", 32)
	v.machine.dialled = true
	v.start()
	for deadline := time.Now().Add(patience); len(v.machine.greetings()) == 0; {
		if time.Now().After(deadline) {
			t.Fatal("nobody greeted")
		}
		v.until("it boots", func(s *shimv1.StatusResponse) bool { return s.GetState() == shimv1.State_STATE_BOOTING })
	}
	v.machine.powerOff(bootspec.End{Class: bootspec.EndGuest})
	v.expectEnd(bootspec.EndCrashed, "wrong token")
}

func TestSecondLinkIsRefused(t *testing.T) {
	t.Parallel()
	v := newVM(t)
	v.machine.dialled = true
	v.start()
	stream := v.open(v.context(), "/guest.v1.Test/Echo")
	roundTrip(t, stream, []byte("x"))
	second := v.machine.dial()
	defer func() { _ = second.Close() }()
	if _, err := second.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("the second link reads: %v", err)
	}
	// The first one is none the worse for it.
	roundTrip(t, stream, []byte("y"))
}
