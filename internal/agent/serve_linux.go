package agent

import (
	"context"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"
)

const (
	// maxChunk is the most data that one message may carry.
	maxChunk = 64 << 10
	// maxMessage is the most that a message may have, and a little for what
	// surrounds a full one.
	maxMessage = 1<<20 + 64<<10

	streamWindow = 1 << 20
	connWindow   = 8 << 20
	maxStreams   = 1024
	ioBuffer     = 64 << 10

	// drainTime bounds how long calls may take to end once Serve is to return,
	// and flushTime how long their last bytes may take to leave. The connection
	// itself is not waited for: its other end may leave it open.
	drainTime = 2 * time.Second
	flushTime = 100 * time.Millisecond
)

// Serve offers services on the connections of lis, one after the other or at
// once, until ctx ends or Accept fails. When ctx ends it lets calls in flight
// be answered for up to 2 s. It closes lis and has no goroutine left when it
// returns; the error is Accept's, nil after ctx's end. Each of services puts
// itself on the server: Service.Register, for instance.
func Serve(ctx context.Context, lis net.Listener, services ...func(grpc.ServiceRegistrar)) error {
	var calls flight
	server := grpc.NewServer(
		grpc.MaxRecvMsgSize(maxMessage),
		grpc.MaxSendMsgSize(maxMessage),
		grpc.InitialWindowSize(streamWindow),
		grpc.InitialConnWindowSize(connWindow),
		grpc.MaxConcurrentStreams(maxStreams),
		grpc.ReadBufferSize(ioBuffer),
		grpc.WriteBufferSize(ioBuffer),
		grpc.WaitForHandlers(true),
		grpc.UnaryInterceptor(calls.unary),
		grpc.StreamInterceptor(calls.stream),
		// A link's other end is the shim, whose end the VM does not survive: no
		// pings of ours. A client's are welcome at any reasonable rate.
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 2 * time.Second, PermitWithoutStream: true}),
	)
	for _, register := range services {
		register(server)
	}
	var failure error
	failed := make(chan struct{})
	go func() {
		defer close(failed)
		failure = server.Serve(lis)
	}()
	select {
	case <-failed:
		server.Stop()
		return failure
	case <-ctx.Done():
	}
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		server.GracefulStop()
	}()
	bound := time.NewTimer(drainTime)
	defer bound.Stop()
	for idle := calls.idle(); ; {
		select {
		case <-idle:
			idle = nil
			bound.Reset(flushTime)
			continue
		case <-drained:
		case <-bound.C:
			server.Stop()
			<-drained
		}
		break
	}
	<-failed
	return nil
}

// flight counts the calls in flight.
type flight struct {
	mu    sync.Mutex
	calls int
	// none, where set, is closed when calls is 0.
	none chan struct{}
}

func (f *flight) begin() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls++
}

func (f *flight) end() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls--
	f.tell()
}

func (f *flight) tell() {
	if f.calls == 0 && f.none != nil {
		close(f.none)
		f.none = nil
	}
}

// idle returns a channel that is closed once no call is in flight. To be called
// once.
func (f *flight) idle() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	none := make(chan struct{})
	f.none = none
	f.tell()
	return none
}

func (f *flight) unary(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	f.begin()
	defer f.end()
	return handler(ctx, req)
}

func (f *flight) stream(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	f.begin()
	defer f.end()
	return handler(srv, stream)
}
