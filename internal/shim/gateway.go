package shim

import (
	"context"
	"errors"
	"io"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	guestv1 "github.com/iii-hq/workers/sandbox-libkrun/api/guest/v1"
)

// guestMethods begins every method that is passed on.
const guestMethods = "/guest.v1."

// endWait is how long a call that lost the link waits to learn whether the VM
// ended: the link breaks a moment before the VMM is gone.
const endWait = 2 * time.Second

// gateway passes calls on to the agent, message by message as they come: it
// never holds more than one of each direction.
type gateway struct {
	state *state
	link  *link
}

// handle is a grpc.StreamHandler for the methods that the shim does not know.
func (g *gateway) handle(_ any, server grpc.ServerStream) error {
	method, _ := grpc.MethodFromServerStream(server)
	if !strings.HasPrefix(method, guestMethods) {
		return status.Errorf(codes.Unimplemented, "unknown method %s", method)
	}
	if !g.state.begin() {
		return g.unavailable(server.Context(), "the VM is being ended")
	}
	defer g.state.finish()
	ctx, cancel := context.WithCancel(server.Context())
	defer cancel()

	s := g.link.wait(ctx)
	if s == nil {
		return g.unavailable(ctx, "the VM has not booted")
	}
	shutdown := method == guestv1.AgentService_Shutdown_FullMethodName
	if shutdown {
		g.state.shutdownAsked()
	}
	incoming, _ := metadata.FromIncomingContext(ctx)
	desc := &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}
	client, err := s.client.NewStream(metadata.NewOutgoingContext(ctx, passed(incoming)), desc, method)
	if err != nil {
		return g.explain(ctx, s, err)
	}
	// Not waited for: it ends with the server's stream, so after this function.
	go upstream(server, client, cancel)
	if err := downstream(client, server); err != nil {
		return g.explain(ctx, s, err)
	}
	if shutdown {
		g.state.shutdownAnswered()
	}
	return nil
}

// upstream passes the caller's messages on until its end of stream.
func upstream(server grpc.ServerStream, client grpc.ClientStream, cancel context.CancelFunc) {
	for {
		var f frame
		err := server.RecvMsg(&f)
		if errors.Is(err, io.EOF) {
			_ = client.CloseSend() // downstream learns of an error too
			return
		}
		if err == nil {
			err = client.SendMsg(&f)
			if errors.Is(err, io.EOF) {
				return // the agent has ended the call; downstream gets its status
			}
		}
		if err != nil {
			cancel()
			return
		}
	}
}

// downstream passes the agent's header, messages and trailer on. Its error is
// the agent's status.
func downstream(client grpc.ClientStream, server grpc.ServerStream) error {
	// Waits for the first message or the end. A failure shows in RecvMsg.
	if header, err := client.Header(); err == nil && header != nil {
		if err := server.SendHeader(passed(header)); err != nil {
			return err
		}
	}
	for {
		var f frame
		err := client.RecvMsg(&f)
		if err != nil {
			server.SetTrailer(passed(client.Trailer()))
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		if err := server.SendMsg(&f); err != nil {
			return err
		}
	}
}

// passed leaves out what each hop says for itself.
func passed(md metadata.MD) metadata.MD {
	out := make(metadata.MD, len(md))
	for key, values := range md {
		if strings.HasPrefix(key, ":") || key == "content-type" || key == "user-agent" || key == "te" || strings.HasPrefix(key, "grpc-") {
			continue
		}
		out[key] = values
	}
	return out
}

// explain tells the caller of a broken link how the VM ended. What the agent
// itself answered stays as it is.
func (g *gateway) explain(ctx context.Context, s *session, err error) error {
	// Canceled is what gRPC calls it when the session is closed under the call.
	if code := status.Code(err); ctx.Err() != nil || code != codes.Unavailable && code != codes.Canceled {
		return err
	}
	select {
	case <-s.done():
		return g.unavailable(ctx, "the link to the agent broke, or the guest hangs: try again")
	default:
		return err
	}
}

// unavailable is the error of a call that cannot be passed on: how the VM ended
// where it did, else what.
func (g *gateway) unavailable(ctx context.Context, what string) error {
	timer := time.NewTimer(endWait)
	defer timer.Stop()
	select {
	case <-g.state.ended:
		return errEnded(g.state)
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	case <-timer.C:
		return status.Error(codes.Unavailable, what)
	}
}

// errEnded is the error of a call that the VM's end has answered.
func errEnded(s *state) error {
	return status.Error(codes.Unavailable, "the VM ended: "+s.endNow().Error())
}
