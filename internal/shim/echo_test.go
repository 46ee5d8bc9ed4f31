package shim_test

import (
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

func past() time.Time { return time.Unix(1, 0) }

// bytesCodec carries *[]byte as they are.
type bytesCodec struct{}

func (bytesCodec) Name() string { return "proto" }

func (bytesCodec) Marshal(v any) (mem.BufferSlice, error) {
	b, ok := v.(*[]byte)
	if !ok {
		return nil, errors.New("not bytes")
	}
	return mem.BufferSlice{mem.SliceBuffer(*b)}, nil
}

func (bytesCodec) Unmarshal(data mem.BufferSlice, v any) error {
	b, ok := v.(*[]byte)
	if !ok {
		return errors.New("not bytes")
	}
	*b = data.Materialize()
	return nil
}

// echo is the guest's service.
//
//	Echo      answers each message with itself
//	Sink      reads all and answers with its size
//	Source    sends as many MiB as the one-byte request says
//	Stuck     reads nothing until its call is cancelled
//	Fail      sends header and trailer and fails
//	Shutdown  answers with nothing
//	SetTime   tells the test
type echo struct {
	cancelled chan string
	// times are the requests of SetTime.
	times       chan []byte
	refuseTimes atomic.Bool

	mu       sync.Mutex
	metadata metadata.MD
}

func newEcho() *echo { return &echo{cancelled: make(chan string, 100), times: make(chan []byte, 100)} }

func (e *echo) lastMetadata() metadata.MD {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.metadata
}

func (e *echo) handle(_ any, stream grpc.ServerStream) error {
	method, _ := grpc.MethodFromServerStream(stream)
	md, _ := metadata.FromIncomingContext(stream.Context())
	e.mu.Lock()
	e.metadata = md
	e.mu.Unlock()
	var err error
	switch method[strings.LastIndex(method, "/")+1:] {
	case "Echo":
		err = echoAll(stream)
	case "Sink":
		err = sink(stream)
	case "Source":
		err = source(stream)
	case "Stuck":
		<-stream.Context().Done()
		err = stream.Context().Err()
	case "SetTime":
		err = e.setTime(stream)
	case "Fail":
		_ = stream.SendHeader(metadata.Pairs("h", "1", "h-bin", "\x00\xff"))
		stream.SetTrailer(metadata.Pairs("t", "2"))
		err = status.Error(codes.DataLoss, "as ordered")
	}
	if stream.Context().Err() != nil {
		e.cancelled <- method
	}
	return err
}

func (e *echo) setTime(stream grpc.ServerStream) error {
	var request, reply []byte
	if err := stream.RecvMsg(&request); err != nil {
		return err
	}
	e.times <- request
	if e.refuseTimes.Load() {
		return status.Error(codes.Internal, "as ordered")
	}
	return stream.SendMsg(&reply)
}

func echoAll(stream grpc.ServerStream) error {
	for {
		var b []byte
		if err := stream.RecvMsg(&b); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		if err := stream.SendMsg(&b); err != nil {
			return err
		}
	}
}

func sink(stream grpc.ServerStream) error {
	size := 0
	for {
		var b []byte
		err := stream.RecvMsg(&b)
		if errors.Is(err, io.EOF) {
			total := []byte(time.Duration(size).String())
			return stream.SendMsg(&total)
		}
		if err != nil {
			return err
		}
		size += len(b)
	}
}

func source(stream grpc.ServerStream) error {
	var request []byte
	if err := stream.RecvMsg(&request); err != nil {
		return err
	}
	for i := range int(request[0]) * 16 {
		chunk := make([]byte, 64<<10) // the last one may still be under way
		chunk[0] = byte(i)
		if err := stream.SendMsg(&chunk); err != nil {
			return err
		}
	}
	return nil
}

// guestSession closes as an agent's session on a serial port does: the port
// itself stays open.
type guestSession struct {
	net.Conn
	once sync.Once
	done chan struct{}
}

func (s *guestSession) Close() error {
	s.once.Do(func() {
		_ = s.Conn.SetDeadline(past())
		if _, ok := s.Conn.(*net.UnixConn); !ok {
			_ = s.Conn.Close()
		}
		close(s.done)
	})
	return nil
}

func (s *guestSession) SetDeadline(t time.Time) error {
	select {
	case <-s.done:
		return net.ErrClosed
	default:
		return s.Conn.SetDeadline(t)
	}
}

// oneConn is a listener with one connection.
type oneConn struct{ conn net.Conn }

func (l *oneConn) Accept() (net.Conn, error) {
	if l.conn == nil {
		return nil, io.EOF
	}
	c := l.conn
	l.conn = nil
	return c, nil
}

func (l *oneConn) Close() error   { return nil }
func (l *oneConn) Addr() net.Addr { return &net.UnixAddr{Name: "guest", Net: "unix"} }
