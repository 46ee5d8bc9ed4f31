package adapter

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"reflect"
	"time"

	"github.com/google/uuid"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/contract"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
)

// handle makes a handler of a function that needs the core: decode, wait for the
// core, serve, encode, and one line in the log.
func handle[Req, Resp any](s *server, name string, serve func(context.Context, Core, Req) (Resp, error)) iii.Handler {
	return func(ctx context.Context, call iii.Invocation) (json.RawMessage, error) {
		began := time.Now()
		req, err := contract.Decode[Req](call.Data)
		var core Core
		if err == nil {
			core, err = s.ready(ctx)
		}
		var resp Resp
		if err == nil {
			resp, err = serve(ctx, core, req)
		}
		id := sandboxID(req)
		if id == "" {
			id = sandboxID(resp)
		}
		s.logCall(ctx, name, id, time.Since(began), err)
		if err != nil {
			return nil, wireError(fault.Of(err))
		}
		return contract.Encode(resp)
	}
}

// clientFault is what a caller is told of an error of the client itself.
func clientFault(err error) error {
	switch {
	case errors.Is(err, iii.ErrBusy):
		return wireError(fault.TooManyCalls())
	case errors.Is(err, iii.ErrTooLarge):
		return wireError(fault.ReplyTooLarge(err))
	}
	return wireError(fault.Internal(err))
}

// wireError is how a fault travels: its envelope is the message.
func wireError(f *fault.Error) error {
	return &iii.Error{Code: iii.CodeInvocationFailed, Message: f.Envelope()}
}

// sandboxID returns the canonical id in a request or reply, "" where there is
// none: callers may write anything there.
func sandboxID(v any) string {
	field := reflect.Indirect(reflect.ValueOf(v).FieldByName("SandboxID"))
	if field.Kind() != reflect.String {
		return ""
	}
	id, err := uuid.Parse(field.String())
	if err != nil {
		return ""
	}
	return id.String()
}

// logCall writes the line of one call. The message of an error stays out of it,
// since it may repeat what the caller sent; that of a sandbox that did not come up
// is the operator's business and holds nothing but the image's name.
func (s *server) logCall(ctx context.Context, name, id string, took time.Duration, err error) {
	attrs := []slog.Attr{
		slog.String("function", contract.Prefix+name), slog.String("sandbox_id", id),
		slog.Bool("success", err == nil), slog.Int64("duration_ms", took.Milliseconds()),
	}
	level := slog.LevelInfo
	if err != nil {
		f := fault.Of(err)
		attrs = append(attrs, slog.String("error_code", string(f.Code)), slog.String("error_type", f.Type()), slog.Bool("retryable", f.Retryable()))
		switch f.Code {
		case fault.S101, fault.S102, fault.S300:
			level = slog.LevelWarn
			// A run's error tells the sandbox that was made: here none was.
			if name == "create" || name == "run" && f.Fix["sandbox_id"] == "" {
				attrs = append(attrs, slog.String("error", f.Message))
			}
		}
	}
	s.cfg.Log.LogAttrs(ctx, level, "call", attrs...)
}
