package iii

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/url"
	"sync"
	"time"
)

// Times between connection attempts, as every SDK has them.
const (
	firstDelay = time.Second
	maxDelay   = 30 * time.Second
	jitter     = 0.3
)

// handlerGrace is how long Close waits for handlers after it cancelled them.
const handlerGrace = 2 * time.Second

// Client is a worker's place at the engine. Its methods may be called
// concurrently. The caller closes it.
type Client struct {
	// Immutable after Open.
	options   Options
	base      *url.URL
	functions map[string]Function
	log       *slog.Logger

	stop context.CancelFunc // ends run
	done chan struct{}      // closed when run has ended

	handlers       sync.WaitGroup
	cancelHandlers context.CancelFunc

	mu sync.Mutex
	// err is why run ended; valid once done is closed.
	err error
	// current is the connection that frames go to, nil while there is none.
	current *session
	// changed is closed and replaced whenever current is set.
	changed chan struct{}
	// closing refuses further calls of our functions.
	closing bool
	// calls and callBytes count what is being answered.
	calls     int
	callBytes int64
	// pending are our calls that wait for a result, by their id.
	pending map[string]chan<- outcome
	// workerID and token are what the engine knew this worker by last.
	workerID, token string
}

// Open checks the options and returns a client that connects in the background,
// for as long as it takes, until Close. It does not wait for the connection.
func Open(o Options) (*Client, error) {
	base, err := o.check()
	if err != nil {
		return nil, err
	}
	life, stop := context.WithCancel(context.Background())
	handling, cancelHandlers := context.WithCancel(context.Background())
	c := &Client{
		options:        o,
		base:           base,
		functions:      map[string]Function{},
		log:            o.Log,
		stop:           stop,
		done:           make(chan struct{}),
		cancelHandlers: cancelHandlers,
		changed:        make(chan struct{}),
		pending:        map[string]chan<- outcome{},
	}
	for _, f := range o.Functions {
		c.functions[f.ID] = f
	}
	go c.run(life, handling)
	return c, nil
}

// Done is closed when the client has ended: after Close, or because the engine
// refused the worker.
func (c *Client) Done() <-chan struct{} { return c.done }

// Err tells why the client ended: a *RejectedError, or ErrClosed after Close. It
// is nil before Done is closed.
func (c *Client) Err() error {
	select {
	case <-c.done:
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.err
	default:
		return nil
	}
}

// Close ends the client in order: further calls are refused; those being answered
// may finish while ctx lasts, then their contexts are cancelled and they have two
// seconds more; the WebSocket is closed with code 1000, for which the engine has a
// second. Close returns an error when a handler still runs then. A second Close
// waits for the first.
func (c *Client) Close(ctx context.Context) error {
	c.mu.Lock()
	c.closing = true
	c.mu.Unlock()

	idle := make(chan struct{})
	go func() {
		c.handlers.Wait()
		close(idle)
	}()
	var err error
	select {
	case <-idle:
	case <-c.done:
	case <-ctx.Done():
	}
	c.cancelHandlers()
	grace := time.NewTimer(handlerGrace)
	defer grace.Stop()
	select {
	case <-idle:
	case <-grace.C:
		c.mu.Lock()
		err = fmt.Errorf("%d calls do not end though they were cancelled", c.calls)
		c.mu.Unlock()
	}
	c.stop()
	<-c.done
	return err
}

// run keeps a connection up until ctx ends or the engine refuses the worker.
// handling is the context of handlers.
func (c *Client) run(ctx, handling context.Context) {
	err := c.keepConnected(ctx, handling)
	c.cancelHandlers()
	c.mu.Lock()
	c.err = err
	c.closing = true
	c.mu.Unlock()
	close(c.done)
}

func (c *Client) keepConnected(ctx, handling context.Context) error {
	delay := firstDelay
	for {
		welcome, err := c.connect(ctx, handling)
		if ctx.Err() != nil {
			return ErrClosed
		}
		var rejected *RejectedError
		if errors.As(err, &rejected) {
			c.log.Error("the engine refuses this worker", "code", rejected.Code, "name", rejected.Name, "namespace", rejected.Namespace, "owner", rejected.Owner)
			return err
		}
		if welcome {
			delay = firstDelay
		}
		wait := time.Duration(float64(delay) * (1 - jitter + 2*jitter*rand.Float64())) //nolint:gosec // Spreads reconnects, hides nothing.
		c.log.Warn("no connection to the engine", "engine", c.base.Host, "error", err, "retry_in", wait.Round(time.Millisecond))
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return ErrClosed
		case <-timer.C:
		}
		delay = min(2*delay, maxDelay)
	}
}

// setCurrent makes s the connection that frames go to; nil for none.
func (c *Client) setCurrent(s *session) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.current = s
	close(c.changed)
	c.changed = make(chan struct{})
}

// connection returns the current connection, nil while there is none, and what is
// closed when that changes.
func (c *Client) connection() (s *session, changed <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.current, c.changed
}

// Connected waits until the client has a connection, which may be lost again the
// moment it returns. It fails with ErrClosed or ctx's error.
func (c *Client) Connected(ctx context.Context) error {
	for {
		s, changed := c.connection()
		if s != nil {
			return nil
		}
		if err := c.await(ctx, changed); err != nil {
			return err
		}
	}
}

// send hands a frame to the connection's writer, waiting for a connection where
// there is none. It returns the connection; that the frame arrives is not known.
func (c *Client) send(ctx context.Context, frame []byte) (*session, error) {
	for {
		s, changed := c.connection()
		if s != nil {
			select {
			case s.out <- frame:
				return s, nil
			case <-s.done: // the next one, then
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
		if err := c.await(ctx, changed); err != nil {
			return nil, err
		}
	}
}

// await waits for a change of the connection.
func (c *Client) await(ctx context.Context, changed <-chan struct{}) error {
	select {
	case <-changed:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-c.done:
		return ErrClosed
	}
}
