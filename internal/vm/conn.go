package vm

import (
	"context"
	"errors"
	"io"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	shimv1 "github.com/iii-hq/workers/sandbox-libkrun/api/shim/v1"
)

// linkWait is how long a call that lost the shim waits to learn how the VM
// ended: shim and VMM end within moments of each other, in either order.
const linkWait = 2 * time.Second

// window is HTTP/2's flow-control window, for each stream and for all together:
// what may be under way unread. 64 KiB, the default, halves the throughput.
const (
	streamWindow = 1 << 20
	connWindow   = 4 << 20
)

// dial makes the one connection to the shim; it connects at the first call.
func (m *Machine) dial() (*grpc.ClientConn, error) {
	socket := m.dir.Socket
	return grpc.NewClient("passthrough:///"+socket,
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", socket)
		}),
		// Access to the socket is what authenticates: it lies in a private
		// directory and its shim checks the peer's user.
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithNoProxy(),
		grpc.WithIdleTimeout(0),
		grpc.WithInitialWindowSize(streamWindow),
		grpc.WithInitialConnWindowSize(connWindow),
		grpc.WithUnaryInterceptor(m.interceptUnary),
		grpc.WithStreamInterceptor(m.interceptStream),
	)
}

func (m *Machine) interceptUnary(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn,
	invoke grpc.UnaryInvoker, opts ...grpc.CallOption,
) error {
	return m.explain(ctx, invoke(ctx, method, req, reply, cc, opts...))
}

func (m *Machine) interceptStream(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string,
	open grpc.Streamer, opts ...grpc.CallOption,
) (grpc.ClientStream, error) {
	stream, err := open(ctx, desc, cc, method, opts...)
	if method == shimv1.ShimService_Watch_FullMethodName {
		return stream, err // whoever watches finds out how the VM ended
	}
	if err != nil {
		return nil, m.explain(ctx, err)
	}
	return &explainedStream{ClientStream: stream, m: m, call: ctx}, nil
}

// explain puts the VM's end in the place of the broken connection that it
// causes.
func (m *Machine) explain(ctx context.Context, err error) error {
	if err == nil || errors.Is(err, io.EOF) {
		return err
	}
	if code := status.Code(err); code != codes.Unavailable && code != codes.Canceled {
		return err
	}
	timer := time.NewTimer(linkWait)
	defer timer.Stop()
	select {
	case <-m.ended:
		return m.endErr
	case <-ctx.Done():
	case <-timer.C:
	}
	return err
}

// explainedStream is a stream whose errors are explained.
type explainedStream struct {
	grpc.ClientStream
	m *Machine
	// call is the caller's context; the stream's own ends with the stream.
	call context.Context //nolint:containedctx // a stream is a call
}

func (s *explainedStream) RecvMsg(msg any) error {
	return s.m.explain(s.call, s.ClientStream.RecvMsg(msg))
}
