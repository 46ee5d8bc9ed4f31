package iii

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
)

// A Request is a call of a function, of any worker or of the engine.
type Request struct {
	// Function is its id.
	Function string
	// Namespace is where it is registered. "" is the worker's own namespace,
	// except for ids that begin with "engine::", which are in the default one.
	Namespace string
	// Data is the payload, valid JSON; nil is {}.
	Data json.RawMessage
	// Metadata travels beside the payload; nil is none.
	Metadata json.RawMessage
	// Timeout bounds the wait for the result, and before that for a connection;
	// 0 or less is DefaultTimeout. The function is not told when it passes.
	Timeout time.Duration
	// Traceparent and Baggage are a W3C trace context; may be "".
	Traceparent, Baggage string
}

// An outcome is how a call of ours ended.
type outcome struct {
	result json.RawMessage
	err    error
}

// Invoke calls a function and waits for its result, "null" where it has none. It
// fails with an *Error of the function or the engine, with ErrTimeout,
// ErrDisconnected, ErrTooLarge, ErrClosed, or ctx's error. A call that is given up
// before it could be sent is never sent.
func (c *Client) Invoke(ctx context.Context, r Request) (json.RawMessage, error) {
	id := uuid.NewString()
	text, err := c.encodeCall(r, id)
	if err != nil {
		return nil, err
	}
	timeout := r.Timeout
	if timeout <= 0 {
		timeout = DefaultTimeout
	}
	timed, cancel := context.WithTimeoutCause(ctx, timeout, ErrTimeout)
	defer cancel()

	reply := make(chan outcome, 1)
	c.expect(id, reply)
	defer c.forget(id)

	s, err := c.send(timed, text)
	if err != nil {
		return nil, c.callError(timed, r, err)
	}
	select {
	case o := <-reply:
		return o.result, o.err
	case <-timed.Done():
		return nil, c.callError(timed, r, timed.Err())
	case <-s.done:
	}
	// The result may have come just before the connection went.
	select {
	case o := <-reply:
		return o.result, o.err
	default:
		return nil, c.callError(timed, r, ErrDisconnected)
	}
}

// Notify calls a function without waiting for a result: nothing tells whether it
// ran. It waits for a connection while ctx lasts, at most the request's timeout.
func (c *Client) Notify(ctx context.Context, r Request) error {
	text, err := c.encodeCall(r, "")
	if err != nil {
		return err
	}
	timeout := r.Timeout
	if timeout <= 0 {
		timeout = DefaultTimeout
	}
	timed, cancel := context.WithTimeoutCause(ctx, timeout, ErrTimeout)
	defer cancel()
	if _, err := c.send(timed, text); err != nil {
		return c.callError(timed, r, err)
	}
	return nil
}

// callError says which call failed. It tells a passed time-out of the call from
// one of its context.
func (c *Client) callError(ctx context.Context, r Request, err error) error {
	if errors.Is(err, context.DeadlineExceeded) && errors.Is(context.Cause(ctx), ErrTimeout) {
		err = ErrTimeout
	}
	return fmt.Errorf("call %s: %w", r.Function, err)
}

func (c *Client) encodeCall(r Request, id string) ([]byte, error) {
	m := invokeMessage{
		Type: typeInvoke, ID: id, Function: r.Function, Data: r.Data, Metadata: r.Metadata,
		Namespace: r.Namespace, Traceparent: r.Traceparent, Baggage: r.Baggage,
	}
	if m.Data == nil {
		m.Data = json.RawMessage("{}")
	}
	if id == "" {
		m.Action = &actionMessage{Type: "void"}
	}
	if m.Namespace == "" && !strings.HasPrefix(r.Function, "engine::") {
		m.Namespace = c.options.Namespace
	}
	text, err := encode(m)
	if err != nil {
		return nil, fmt.Errorf("call %s: the payload is not JSON: %w", r.Function, err)
	}
	if len(text) > MaxMessage {
		return nil, fmt.Errorf("call %s with %d bytes: %w", r.Function, len(text), ErrTooLarge)
	}
	return text, nil
}

func (c *Client) expect(id string, reply chan<- outcome) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pending[id] = reply
}

func (c *Client) forget(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.pending, id)
}

// deliver gives a result to the call that waits for it, if one does: the first of
// several results for one call counts.
func (c *Client) deliver(f frame) {
	id := f.text("invocation_id")
	c.mu.Lock()
	reply, ok := c.pending[id]
	delete(c.pending, id)
	c.mu.Unlock()
	if !ok {
		c.log.Debug("a result came for no call that waits")
		return
	}
	o := outcome{result: f.value("result")}
	if failure := f.failure(); failure != nil {
		o = outcome{err: failure}
	} else if o.result == nil {
		o.result = json.RawMessage("null")
	}
	reply <- o
}
