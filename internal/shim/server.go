package shim

import (
	"context"
	"errors"
	"net"
	"time"

	"google.golang.org/grpc"

	shimv1 "github.com/iii-hq/workers/sandbox-libkrun/api/shim/v1"
)

// server answers on the shim's socket: shim.v1 itself, guest.v1 by the gateway.
type server struct {
	shimv1.UnimplementedShimServiceServer

	grpc     *grpc.Server
	listener *listener
	state    *state
	owner    *owner
	network  *network // nil where the VM has none
	upper    string
}

func newServer(listener *listener, state *state, link *link, owner *owner, network *network, upper string) *server {
	s := &server{listener: listener, state: state, owner: owner, network: network, upper: upper}
	gateway := &gateway{state: state, link: link}
	s.grpc = grpc.NewServer(
		grpc.ForceServerCodecV2(rawCodec{}),
		grpc.UnknownServiceHandler(gateway.handle),
		grpc.WaitForHandlers(true),
		grpc.InitialWindowSize(streamWindow),
		grpc.InitialConnWindowSize(connWindow),
		grpc.ReadBufferSize(bufferSize),
		grpc.WriteBufferSize(bufferSize),
		grpc.MaxRecvMsgSize(maxMessage),
		grpc.MaxSendMsgSize(maxMessage),
	)
	shimv1.RegisterShimServiceServer(s.grpc, s)
	return s
}

// serve returns when the server is stopped.
func (s *server) serve() { _ = s.grpc.Serve(s.listener) }

// drain lets the calls in flight take their answers, for at most d, and ends
// the server.
func (s *server) drain(d time.Duration) {
	timer := time.AfterFunc(d, s.grpc.Stop)
	defer timer.Stop()
	s.grpc.GracefulStop()
}

// close ends the server and removes the socket. Idempotent.
func (s *server) close() error {
	s.grpc.Stop()
	err := s.listener.Close()
	if errors.Is(err, net.ErrClosed) {
		err = nil
	}
	return errors.Join(err, s.listener.remove())
}

// Status implements shim.v1.
func (s *server) Status(context.Context, *shimv1.StatusRequest) (*shimv1.StatusResponse, error) {
	status, _ := s.state.snapshot()
	status.Published = s.network.published()
	return status, nil
}

// Watch implements shim.v1.
func (s *server) Watch(_ *shimv1.WatchRequest, stream grpc.ServerStreamingServer[shimv1.WatchResponse]) error {
	for {
		status, changed := s.state.snapshot()
		if err := stream.Send(&shimv1.WatchResponse{Status: status}); err != nil {
			return err
		}
		if status.GetState() == shimv1.State_STATE_ENDED {
			return nil
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

// Kill implements shim.v1.
func (s *server) Kill(ctx context.Context, _ *shimv1.KillRequest) (*shimv1.KillResponse, error) {
	s.owner.end("Kill was called")
	select {
	case <-s.state.ended:
		return &shimv1.KillResponse{End: endMessage(s.state.endNow())}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Stats implements shim.v1.
func (s *server) Stats(context.Context, *shimv1.StatsRequest) (*shimv1.StatsResponse, error) {
	stats, err := measure(s.state.vmmPID(), s.upper)
	if err == nil {
		stats.Network = s.network.stats()
	}
	select {
	case <-s.state.ended:
		// Its number may be another process's by now.
		return nil, errEnded(s.state)
	default:
		return stats, err
	}
}
