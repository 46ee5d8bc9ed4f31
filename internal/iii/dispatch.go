package iii

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime/debug"
)

// dispatch starts the handler of a call that came, with ctx. It does not wait for
// it.
func (s *session) dispatch(ctx context.Context, f frame) {
	call := Invocation{
		ID:          f.text("invocation_id"),
		Function:    f.text("function_id"),
		Data:        f.value("data"),
		Metadata:    f.value("metadata"),
		Traceparent: f.text("traceparent"),
		Baggage:     f.text("baggage"),
	}
	if call.Data == nil {
		call.Data = json.RawMessage("null")
	}
	if err := s.admit(ctx, call); err != nil {
		s.client.log.Warn("a call is refused", "function", s.client.knownName(call.Function), "closing", errors.Is(err, errClosing))
		s.refuse(call, err)
	}
}

// errClosing is what the engine itself tells callers once a worker is gone.
// It is read-only.
var errClosing error = &Error{Code: CodeInvocationStopped, Message: "the worker is ending"}

// admit starts the handler of call, or returns why it must not.
func (s *session) admit(ctx context.Context, call Invocation) error {
	c := s.client
	size := int64(len(call.Data) + len(call.Metadata))
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closing {
		return errClosing
	}
	if c.calls >= c.options.MaxCalls || c.calls > 0 && c.callBytes+size > c.options.MaxCallBytes {
		return c.options.Fault(ErrBusy)
	}
	c.calls++
	c.callBytes += size
	c.handlers.Go(func() {
		result, err := c.handle(ctx, call)
		text := c.encodeAnswer(call, result, err)
		c.hold(int64(len(text)))
		s.answer(call, text)
		c.release(size + int64(len(text)))
	})
	return nil
}

// refuse answers a call that was not admitted, unless answering would have to
// wait: then the caller's own time-out ends it.
func (s *session) refuse(call Invocation, reason error) {
	text, err := encodeResult(call, nil, reason)
	if err != nil {
		return
	}
	select {
	case s.urgent <- text:
	default:
	}
}

// hold counts bytes of an answer that waits to be sent.
func (c *Client) hold(size int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.callBytes += size
}

// release forgets a call, with the bytes that it and its answer took.
func (c *Client) release(size int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls--
	c.callBytes -= size
}

// handle runs the function's handler and turns a panic into an error.
func (c *Client) handle(ctx context.Context, call Invocation) (result json.RawMessage, err error) {
	f, ok := c.functions[call.Function]
	if !ok {
		return nil, &Error{Code: CodeFunctionNotFound, Message: "this worker has no such function"}
	}
	defer func() {
		if p := recover(); p != nil {
			// Its value may hold what the caller sent.
			c.log.Error("a handler panicked", "function", f.ID, "type", fmt.Sprintf("%T", p), "stack", string(debug.Stack()))
			result, err = nil, c.options.Fault(ErrPanicked)
		}
	}()
	return f.Handler(ctx, call)
}

// answer sends the result of a call on the connection that it came by. Once that
// is gone nobody waits for the result: the engine has told the caller so, and a
// later connection's calls are others.
func (s *session) answer(call Invocation, text []byte) {
	select {
	case s.out <- text:
	case <-s.done:
		s.client.log.Debug("a result was dropped: its connection is gone", "function", s.client.knownName(call.Function))
	}
}

// encodeAnswer makes the message that answers call, whatever its handler
// returned.
func (c *Client) encodeAnswer(call Invocation, result json.RawMessage, failure error) []byte {
	text, err := encodeResult(call, result, failure)
	if err == nil {
		return text
	}
	c.log.Error("a handler's result cannot be sent", "function", c.knownName(call.Function), "error", err)
	if text, err = encodeResult(call, nil, c.options.Fault(err)); err == nil {
		return text
	}
	// Only a fault of many megabytes comes here.
	text, _ = encodeResult(call, nil, err)
	return text
}

// encodeResult makes the message that answers call. Its errors, ErrNotJSON and
// ErrTooLarge, hold nothing of the result.
func encodeResult(call Invocation, result json.RawMessage, failure error) ([]byte, error) {
	m := resultMessage{Type: typeResult, ID: call.ID, Function: call.Function, Result: result}
	if failure != nil {
		m.Result = nil
		m.Error = &errorMessage{Code: CodeInvocationFailed, Message: failure.Error()}
		var e *Error
		if errors.As(failure, &e) {
			m.Error = &errorMessage{Code: e.Code, Message: e.Message, Stacktrace: e.Stacktrace}
		}
	} else if !json.Valid(result) && result != nil {
		return nil, ErrNotJSON
	}
	text, err := encode(m)
	if err != nil {
		return nil, ErrNotJSON
	}
	if len(text) > MaxMessage {
		return nil, fmt.Errorf("a result of %d bytes: %w", len(text), ErrTooLarge)
	}
	return text, nil
}

// knownName returns the id of a function of ours for a log; whatever else a
// caller wrote stays out of it.
func (c *Client) knownName(id string) string {
	if _, ok := c.functions[id]; ok {
		return id
	}
	return "(unknown)"
}
