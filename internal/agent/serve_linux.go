package agent

import (
	"context"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"
)

const (
	// maxChunk is the most data that one message may carry.
	maxChunk = 64 << 10
	// maxMessage is the most that a message may have.
	maxMessage = 1 << 20

	streamWindow = 1 << 20
	connWindow   = 8 << 20
	maxStreams   = 1024
	ioBuffer     = 64 << 10

	// drainTime bounds how long, once Serve is to return, calls may take to end
	// and the client to take their replies. A client that is told that the
	// server goes away leaves by itself, which ends the wait.
	drainTime = 5 * time.Second
)

// Serve offers services on the connections of lis, one after the other or at
// once, until ctx ends or Accept fails. When ctx ends it lets calls in flight
// end and their replies arrive, for up to 5 s. It closes lis and has no
// goroutine left when it returns; the error is Accept's, nil after ctx's end.
// Each of services puts itself on the server: Service.Register, for instance.
func Serve(ctx context.Context, lis net.Listener, services ...func(grpc.ServiceRegistrar)) error {
	server := grpc.NewServer(
		grpc.MaxRecvMsgSize(maxMessage),
		grpc.MaxSendMsgSize(maxMessage),
		grpc.InitialWindowSize(streamWindow),
		grpc.InitialConnWindowSize(connWindow),
		grpc.MaxConcurrentStreams(maxStreams),
		grpc.ReadBufferSize(ioBuffer),
		grpc.WriteBufferSize(ioBuffer),
		grpc.WaitForHandlers(true),
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
	select {
	case <-drained:
	case <-bound.C:
		server.Stop()
		<-drained
	}
	<-failed
	return nil
}
