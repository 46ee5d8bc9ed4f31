package imagestore

import (
	"context"
	"errors"
	"io"
	"time"
)

// errStalled ends a transfer in which nothing came for Options.StallTimeout.
var errStalled = errors.New("nothing came for too long")

// stallReader cancels its request when a read takes too long.
type stallReader struct {
	body   io.ReadCloser
	ctx    context.Context //nolint:containedctx // the request's own, made for this reader
	cancel context.CancelCauseFunc
	timer  *time.Timer
	limit  time.Duration
}

func newStallReader(ctx context.Context, cancel context.CancelCauseFunc, body io.ReadCloser, limit time.Duration) *stallReader {
	timer := time.AfterFunc(limit, func() { cancel(errStalled) })
	return &stallReader{body: body, ctx: ctx, cancel: cancel, timer: timer, limit: limit}
}

// Read is io.Reader's; it says why the request was ended.
func (r *stallReader) Read(p []byte) (int, error) {
	r.timer.Reset(r.limit)
	n, err := r.body.Read(p)
	r.timer.Stop()
	if err != nil && !errors.Is(err, io.EOF) && r.ctx.Err() != nil {
		err = context.Cause(r.ctx)
	}
	return n, err
}

// Close ends the request.
func (r *stallReader) Close() error {
	r.timer.Stop()
	r.cancel(nil)
	return r.body.Close()
}
