package sandbox

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/guest"
)

const (
	// uploadStall is how long a body may give nothing (contract: fs::write).
	uploadStall = 5 * time.Second
	// uploadDisk is how long the guest may take nothing. Its own limit is 30 s,
	// and it has to flush the file in the end.
	uploadDisk = 2 * time.Minute
)

// WriteFile implements Functions. The order of its checks is the body, the id
// (S001), the sandbox (S002, S004), the mode (S210). An error of Stream is S218.
// On any error nothing is written.
func (m *Manager) WriteFile(ctx context.Context, req WriteRequest) (Written, error) {
	content, err := req.content()
	if err != nil {
		return Written{}, err
	}
	id, err := canonicalID(req.SandboxID)
	if err != nil {
		return Written{}, err
	}
	v, err := m.use(id, forOp)
	if err != nil {
		return Written{}, err
	}
	defer v.done()
	mode, err := guest.ParseMode(req.Mode)
	if err != nil {
		return Written{}, err
	}
	ctx, cancel := v.within(ctx)
	defer cancel(nil)
	paced := &pacedBody{
		open:   req.Stream,
		guard:  newStall(cancel),
		silent: fault.UploadAborted(req.Path, fmt.Sprintf("the upload stalled: no data for %v", uploadStall), nil),
		stuck:  fault.FileRefused(req.Path, fmt.Sprintf("write: the guest took no data for %v", uploadDisk), nil),
	}
	if req.Stream == nil {
		paced.open = func(context.Context) (io.ReadCloser, error) { return io.NopCloser(content), nil }
	}
	defer paced.close()
	paced.guard.within(uploadDisk, paced.stuck)
	paced.ctx = ctx
	written, err := v.machine.Guest().WriteFile(ctx, req.Path, guest.WriteOptions{Mode: mode, Parents: req.Parents}, paced)
	if err != nil {
		return Written{}, m.fileFault(ctx, v.entry, req.Path, err)
	}
	return Written{BytesWritten: written, Path: req.Path}, nil
}

// content is the request's body, nil where that is a stream.
func (req *WriteRequest) content() (io.Reader, error) {
	count := 0
	for _, has := range []bool{req.Content != nil, req.ContentB64 != nil, req.Stream != nil} {
		if has {
			count++
		}
	}
	switch {
	case count == 0:
		return nil, fault.NoFileBody()
	case count > 1:
		return nil, fault.TwoFileBodies()
	case req.Content != nil:
		return strings.NewReader(*req.Content), nil
	case req.Stream != nil:
		return nil, nil
	}
	content, err := decodeBase64(*req.ContentB64)
	if err != nil {
		return nil, fault.BadFileBody(err)
	}
	return bytes.NewReader(content), nil
}

// pacedBody is the body of a write, opened at its first Read. It ends the write
// when either side has stopped.
type pacedBody struct {
	ctx           context.Context //nolint:containedctx // the write's, for open
	open          func(context.Context) (io.ReadCloser, error)
	guard         *stall
	silent, stuck error

	mu     sync.Mutex
	body   io.ReadCloser
	closed bool
}

// Read implements io.Reader, for one goroutine.
func (p *pacedBody) Read(b []byte) (int, error) {
	p.guard.within(uploadStall, p.silent)
	if p.body == nil {
		body, err := p.open(p.ctx)
		if err != nil {
			return 0, err
		}
		if !p.keep(body) {
			return 0, errors.Join(io.ErrClosedPipe, body.Close())
		}
	}
	n, err := p.body.Read(b)
	p.guard.within(uploadDisk, p.stuck)
	return n, err
}

// keep reports false when the write is over already.
func (p *pacedBody) keep(body io.ReadCloser) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.closed {
		p.body = body
	}
	return !p.closed
}

// close makes a Read that is under way return.
func (p *pacedBody) close() {
	p.guard.stop()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	if p.body != nil {
		_ = p.body.Close() // what it gave is all that counts
	}
}
