package iii

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"
	"github.com/google/uuid"
)

// Times of one connection, as the Node and Rust SDKs have them.
const (
	handshakeTimeout = 10 * time.Second
	pingInterval     = 20 * time.Second
	idleTimeout      = 60 * time.Second
)

const (
	// readLimit bounds a message from the engine: 64 MiB, its own limit, and what
	// it adds to a call.
	readLimit = 65 << 20
	// maxRefusals is how many short answers may wait to be sent, those of refused
	// calls above all: a burst of calls is told at once that it is one.
	maxRefusals = 16 << 10
	// closeGrace is how long the engine has to answer the closing of a connection.
	closeGrace = time.Second
)

var (
	errIdle   = errors.New("the engine was silent for a minute")
	errEnding = errors.New("ending")
)

// A session is one connection to the engine.
type session struct {
	client *Client
	socket *websocket.Conn
	wire   *wire

	// out takes frames to send, nil to close; whoever hands one over may go on.
	// urgent holds short ones that the reader sends, which must not wait.
	out, urgent chan []byte
	// writing is set while a frame is under way.
	writing atomic.Bool

	// done is closed when the session is over, by end, which also sets err.
	done chan struct{}
	once sync.Once
	err  error

	// Of the reader alone.
	welcome   bool
	malformed bool

	mu sync.Mutex
	// refused are functions of ours that other workers have; told are those that
	// were logged.
	refused, told map[string]bool
}

// connect makes one connection and serves it until it ends, with the reason. It
// reports whether the engine had accepted it.
func (c *Client) connect(ctx, handling context.Context) (welcome bool, err error) {
	dialing, cancel := context.WithTimeout(ctx, handshakeTimeout)
	defer cancel()
	socket, w, err := c.dial(dialing, c.base)
	if err != nil {
		return false, err
	}
	socket.SetReadLimit(readLimit)
	// Put together before the engine's welcome is read, which names this
	// connection: it must not replace itself.
	introduction, err := c.introduction()
	if err != nil {
		return false, errors.Join(err, w.Close())
	}
	s := &session{
		client: c, socket: socket, wire: w,
		out: make(chan []byte), urgent: make(chan []byte, maxRefusals), done: make(chan struct{}),
		refused: map[string]bool{}, told: map[string]bool{},
	}
	var group sync.WaitGroup
	group.Go(func() { s.read(handling) })
	group.Go(s.write)
	group.Go(s.ping)
	group.Go(s.watch)
	group.Go(s.retryRefused)

	if err := s.introduce(ctx, introduction); err != nil {
		s.end(err)
	} else {
		c.setCurrent(s)
	}
	select {
	case <-s.done:
	case <-ctx.Done():
		s.closeInOrder()
		s.end(errEnding)
	}
	c.setCurrent(nil)
	group.Wait()
	return s.welcome, s.err
}

// dial opens a WebSocket. Its errors do not repeat the address's query, which may
// hold a key.
func (c *Client) dial(ctx context.Context, u *url.URL) (*websocket.Conn, *wire, error) {
	var w *wire
	transport := &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := c.options.Dial(ctx, network, address)
			if err != nil {
				return nil, err
			}
			w = newWire(conn)
			return w, nil
		},
	}
	defer transport.CloseIdleConnections()
	//nolint:bodyclose // The library has closed it.
	socket, response, err := websocket.Dial(ctx, u.String(), &websocket.DialOptions{
		HTTPClient: &http.Client{
			Transport: transport,
			// Credentials are for this address alone.
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
		HTTPHeader: c.options.Header,
	})
	if err == nil {
		return socket, w, nil
	}
	if response != nil {
		status := response.StatusCode
		if status == http.StatusNotFound && strings.Contains(u.Path, channelPath) {
			return nil, nil, ErrNoChannel
		}
		return nil, nil, fmt.Errorf("the engine at %s answers with HTTP status %d", u.Host, status)
	}
	var wrapped *url.Error
	if errors.As(err, &wrapped) {
		err = wrapped.Err
	}
	return nil, nil, fmt.Errorf("connect to the engine at %s: %w", u.Host, err)
}

// end ends the session for a reason; the first counts.
func (s *session) end(err error) {
	s.once.Do(func() {
		s.err = err
		close(s.done)
		// The library's own way waits for locks that a stuck peer holds.
		_ = s.wire.Close()
		_ = s.socket.CloseNow()
	})
}

// closeInOrder closes the WebSocket with code 1000, once what was handed to the
// writer is out.
func (s *session) closeInOrder() {
	late := time.AfterFunc(closeGrace, func() { _ = s.wire.Close() })
	defer late.Stop()
	select {
	case s.out <- nil:
		<-s.done
	case <-s.done:
	}
}

// write sends frames, one at a time.
func (s *session) write() {
	for {
		var text []byte
		select {
		case text = <-s.urgent:
		case text = <-s.out:
		case <-s.done:
			return
		}
		if text == nil {
			_ = s.socket.Close(websocket.StatusNormalClosure, "")
			s.end(errEnding)
			return
		}
		s.writing.Store(true)
		err := s.socket.Write(context.Background(), websocket.MessageText, text)
		s.writing.Store(false)
		if err != nil {
			s.end(fmt.Errorf("send to the engine: %w", err))
			return
		}
	}
}

// ping makes the engine say something at least every 20 seconds. While a frame is
// under way it does not: a ping that has to wait five seconds for the network
// ends the connection, which a large frame on a slow one does not deserve.
func (s *session) ping() {
	ticker := time.NewTicker(pingInterval)
	defer ticker.Stop()
	for {
		select {
		case <-s.done:
			return
		case <-ticker.C:
		}
		if s.writing.Load() {
			continue
		}
		ctx, cancel := context.WithTimeout(context.Background(), pingInterval)
		// Whether the engine lives is for watch to say.
		_ = s.socket.Ping(ctx)
		cancel()
	}
}

// watch ends the session when nothing at all came for a minute, not even part of
// a large message. A large one of ours that a slow network is taking keeps it: no
// ping is sent meanwhile, so nothing may come.
func (s *session) watch() {
	timer := time.NewTimer(idleTimeout)
	defer timer.Stop()
	for {
		select {
		case <-s.done:
			return
		case <-timer.C:
		}
		quiet := s.wire.quiet()
		if s.writing.Load() {
			quiet = min(quiet, s.wire.stuck())
		}
		if quiet >= idleTimeout {
			s.end(errIdle)
			return
		}
		timer.Reset(idleTimeout - quiet)
	}
}

// read takes messages until the connection ends.
func (s *session) read(handling context.Context) {
	for {
		_, text, err := s.socket.Read(context.Background())
		if err != nil {
			s.end(lossOf(err))
			return
		}
		if len(text) == 0 {
			continue
		}
		if f, err := decode(text); err == nil {
			s.take(handling, f)
		} else {
			s.complain(len(text))
		}
	}
}

// lossOf says how a connection ended.
func lossOf(err error) error {
	var closed websocket.CloseError
	if errors.As(err, &closed) {
		return fmt.Errorf("the engine closed the connection with code %d", closed.Code)
	}
	if errors.Is(err, websocket.ErrMessageTooBig) {
		return errors.New("the engine sent a message of more than 65 MiB")
	}
	return fmt.Errorf("the connection broke: %w", err)
}

// complain logs a frame that makes no sense, without what is in it: the first of
// a connection loudly.
func (s *session) complain(size int) {
	if s.malformed {
		s.client.log.Debug("a malformed frame was skipped", "bytes", size)
		return
	}
	s.malformed = true
	s.client.log.Warn("the engine sent a malformed frame: it is skipped, as those after it will be", "bytes", size)
}

// take acts on one message. It never waits: that would keep pongs and results
// from being read.
func (s *session) take(handling context.Context, f frame) {
	c := s.client
	switch f.text("type") {
	case typeInvoke:
		if f.text("invocation_id") == "" {
			s.complain(len(f["data"]))
			return
		}
		s.dispatch(handling, f)
	case typeResult:
		c.deliver(f)
	case typeWelcome:
		s.accepted(f.text("worker_id"), f.text("reattach_token"))
	case typeRejected:
		s.rejected(f)
	case typePing:
		if text, err := encode(bareMessage{Type: typePong}); err == nil {
			select {
			case s.urgent <- text:
			default:
			}
		}
	case typeConnectError:
		code := CodeUnknown
		if e := f.failure(); e != nil {
			code = e.Code
		}
		s.end(fmt.Errorf("the engine refuses the connection with %.40q: check the credentials", code))
	case typePong:
	default:
		c.log.Debug("a message of an unknown type was skipped")
	}
}

// accepted remembers by what the engine knows this connection. Both are UUIDs: it
// would not understand a message with others.
func (s *session) accepted(id, token string) {
	if uuid.Validate(id) != nil || token != "" && uuid.Validate(token) != nil {
		s.complain(len(id) + len(token))
		return
	}
	c := s.client
	c.mu.Lock()
	again := c.workerID != ""
	c.workerID, c.token = id, token
	c.mu.Unlock()
	s.welcome = true
	c.log.Info("connected to the engine", "engine", c.base.Host, "name", c.options.Name, "namespace", c.options.Namespace, "worker_id", id, "again", again)
}
