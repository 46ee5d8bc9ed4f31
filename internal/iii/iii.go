// Package iii connects this process to an iii engine as a worker: it registers
// functions, answers their calls, calls functions of others, and opens both ends
// of the engine's byte channels.
//
// The protocol is JSON in WebSocket text frames, one connection per worker, as
// iii 0.22 to 0.26 speak it. The client keeps the connection up for as long as it
// is open: it dials again after a loss, takes its place back by the token that
// the engine gave it, and registers everything anew. Calls may be made at any
// time; those made while there is no connection wait for one.
//
// Nothing that travels in a call, in its result or on a channel is ever logged.
package iii

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// Values of the protocol, and of every SDK.
const (
	// DefaultURL is where an engine listens unless told otherwise. The address is
	// a number because "localhost" may be ::1, where the engine does not listen.
	DefaultURL = "ws://127.0.0.1:49134"
	// DefaultNamespace is the namespace of workers that name none, and of the
	// engine's own functions.
	DefaultNamespace = "default"
	// DefaultTimeout is how long a call waits for its result.
	DefaultTimeout = 30 * time.Second
	// MaxMessage bounds in bytes what may be sent in one message, its frame of
	// JSON included: engine and clients end a connection that carries more than
	// 16 MiB in one WebSocket frame, and the engine adds a little to each call.
	MaxMessage = 16<<20 - 64<<10
)

// Bounds of ours on calls that are being answered.
const (
	defaultMaxCalls     = 1024
	defaultMaxCallBytes = 256 << 20
)

// Options say which worker to be. They are not changed after Open.
type Options struct {
	// URL is the engine's address: ws:// or wss://. "" is DefaultURL.
	URL string
	// Header is sent when connecting: credentials, where the engine wants some.
	Header http.Header
	// Name is the worker's name, unique in its namespace; required.
	Name string
	// Namespace is where the functions are registered and where calls go unless
	// they say otherwise; "" is the default namespace.
	Namespace string
	// Description tells people what the worker is for; may be "".
	Description string
	// Version is the version of this program; may be "".
	Version string
	// Isolation names what the process runs in, as III_ISOLATION does; may be "".
	Isolation string
	// Functions are registered on every connection, in this order.
	Functions []Function
	// MaxCalls bounds the calls that are answered at a time; 0 is 1024. MaxCallBytes
	// bounds their payloads together with the answers that wait to be sent; 0 is
	// 256 MiB. A call beyond is refused with ErrBusy at once, but for a single one.
	MaxCalls     int
	MaxCallBytes int64
	// Fault makes the error that a caller gets of one that the client met itself:
	// ErrBusy, ErrPanicked, ErrNotJSON or ErrTooLarge. It must be short and must not
	// block; nil leaves them as they are.
	Fault func(error) error
	// Dial makes the network connections; nil is a net.Dialer's DialContext.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// Log gets connects, losses and refusals; required.
	Log *slog.Logger
}

// FromEnv fills the options that the environment of a worker gives (III_URL,
// III_WORKER_NAME, III_NAMESPACE, III_ISOLATION, and III_TOKEN, which goes into
// the Authorization header, as SDKs from 0.25 on send it); name is used when it
// gives none. Blank values count as absent; the name is taken to the letter, as
// Compose looks for it.
func FromEnv(getenv func(string) string, name string) Options {
	get := func(key string) string { return strings.TrimSpace(getenv(key)) }
	o := Options{URL: get("III_URL"), Name: getenv("III_WORKER_NAME"), Namespace: get("III_NAMESPACE"), Isolation: get("III_ISOLATION")}
	if strings.TrimSpace(o.Name) == "" {
		o.Name = name
	}
	if token := get("III_TOKEN"); token != "" {
		o.Header = http.Header{"Authorization": {"Bearer " + token}}
	}
	return o
}

// A Function is one function that the worker offers.
type Function struct {
	// ID is the name it is called by, such as "sandbox-libkrun::create".
	ID string
	// Description may be "".
	Description string
	// RequestFormat and ResponseFormat are the JSON schemas of its payload and of
	// its result; nil registers none.
	RequestFormat, ResponseFormat json.RawMessage
	// Metadata is any JSON; nil is none.
	Metadata json.RawMessage
	// Handler answers its calls.
	Handler Handler
}

// A Handler answers one call. It runs in a goroutine of its own, at the same time
// as others. Its context ends when the client closes, not when the connection is
// lost or the caller gives up, which the protocol does not tell; it has no
// deadline either, so a handler brings its own limits.
//
// The result is any JSON value in UTF-8; nil is null. An *Error goes to the caller
// as it is; any other error has the code "invocation_failed" and its text as the
// message. A panic is caught, logged without its value, and answered with
// ErrPanicked. Where the connection that brought the call is lost, the result is
// dropped: nobody waits for it any more.
type Handler func(ctx context.Context, call Invocation) (json.RawMessage, error)

// An Invocation is one call of a function of ours.
type Invocation struct {
	// ID is the engine's name for the call.
	ID string
	// Function is the id of the function called.
	Function string
	// Data is the payload: valid JSON, "null" when the caller sent none. Where it
	// is an object the engine adds a member "_caller_worker_id" to it.
	Data json.RawMessage
	// Metadata is what the caller sent beside the payload; nil when nothing.
	Metadata json.RawMessage
	// Traceparent and Baggage are the caller's W3C trace context; "" when absent.
	Traceparent, Baggage string
}

// check completes the options and tells what is wrong with them.
func (o *Options) check() (*url.URL, error) {
	if o.URL == "" {
		o.URL = DefaultURL
	}
	if o.MaxCalls <= 0 {
		o.MaxCalls = defaultMaxCalls
	}
	if o.MaxCallBytes <= 0 {
		o.MaxCallBytes = defaultMaxCallBytes
	}
	if o.Fault == nil {
		o.Fault = func(err error) error { return err }
	}
	if o.Dial == nil {
		o.Dial = (&net.Dialer{}).DialContext
	}
	if o.Name == "" {
		return nil, errors.New("the worker has no name: set III_WORKER_NAME")
	}
	if o.Log == nil {
		return nil, errors.New("no logger")
	}
	seen := map[string]bool{}
	for _, f := range o.Functions {
		if err := f.check(); err != nil {
			return nil, err
		}
		if seen[f.ID] {
			return nil, fmt.Errorf("function %s is there twice", f.ID)
		}
		seen[f.ID] = true
	}
	return parseURL(o.URL)
}

func (f Function) check() error {
	switch {
	case f.ID == "":
		return errors.New("a function has no id")
	case f.Handler == nil:
		return fmt.Errorf("function %s has no handler", f.ID)
	}
	for _, document := range []json.RawMessage{f.RequestFormat, f.ResponseFormat, f.Metadata} {
		if document != nil && !json.Valid(document) {
			return fmt.Errorf("function %s is described by what is not JSON", f.ID)
		}
	}
	return nil
}

// parseURL reads the engine's address. Its errors do not repeat it: an address
// may carry a credential.
func parseURL(text string) (*url.URL, error) {
	u, err := url.Parse(text)
	if err != nil || u.Host == "" || (u.Scheme != "ws" && u.Scheme != "wss") {
		return nil, errors.New("the engine's address is not of the form ws://host:port or wss://host: set III_URL")
	}
	u.Fragment = ""
	return u, nil
}
