package adapter

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/contract"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/sandbox"
)

const (
	// channelBuffer is how many frames, of 64 KiB at most, a channel holds.
	channelBuffer = 64
	// takenWithin is how long a channel may be full before the reader counts as
	// gone. The engine drops one that nobody has connected to after 5 minutes.
	takenWithin = 6 * time.Minute
	// brokenWithin is how long a channel may be full once its file is gone: a reader
	// who is there is told, one who is not holds nothing up.
	brokenWithin = 10 * time.Second
	// defaultMaxDownloads is as many as 32 sandboxes with 4 programs each.
	defaultMaxDownloads = 128
)

// write passes the body on, or the channel that it comes through.
func (s *server) write(ctx context.Context, core Core, req contract.WriteRequest) (contract.WriteResponse, error) {
	in := sandbox.WriteRequest{
		SandboxID: req.SandboxID, Path: req.Path, Mode: req.Mode, Parents: req.Parents, ContentB64: req.ContentB64,
	}
	if body := req.Content; body != nil && body.Channel != nil {
		ref := channelRef(*body.Channel)
		in.Stream = func(ctx context.Context) (io.ReadCloser, error) {
			return s.client.OpenReader(ctx, ref, iii.ChannelOptions{})
		}
	} else if body != nil {
		in.Content = &body.Text
	}
	written, err := core.WriteFile(ctx, in)
	return contract.WriteResponse(written), err
}

func channelRef(ref contract.StreamChannelRef) iii.ChannelRef {
	return iii.ChannelRef{ChannelID: ref.ChannelID, AccessKey: ref.AccessKey, Direction: string(ref.Direction)}
}

// read replies as soon as the channel is there; the bytes follow.
func (s *server) read(ctx context.Context, core Core, req contract.ReadRequest) (_ contract.ReadResponse, err error) {
	none := contract.ReadResponse{}
	file, err := core.OpenFile(ctx, req.SandboxID, req.Path)
	if err != nil {
		return none, err
	}
	release, ok := s.admitDownload()
	defer func() {
		if err != nil {
			_ = file.Close()
			release()
		}
	}()
	if !ok {
		return none, fault.TooManyDownloads(cap(s.downloads))
	}
	writer, reader, err := s.client.CreateChannel(ctx, channelBuffer)
	if err != nil {
		return none, fault.FileRefused(req.Path, "no channel for its content: "+err.Error(), err)
	}
	// Connected at once, also for an empty file: its reader would wait for ever.
	out, err := s.client.OpenWriter(s.life, writer, iii.ChannelOptions{Idle: takenWithin})
	if err != nil {
		return none, fault.FileRefused(req.Path, "no channel for its content: "+err.Error(), err)
	}
	s.transfers.Go(func() {
		defer release()
		s.send(file, out)
	})
	return contract.ReadResponse{
		Content: contract.StreamChannelRef{
			ChannelID: reader.ChannelID, AccessKey: reader.AccessKey, Direction: contract.ChannelDirection(reader.Direction),
		},
		Body: file.Body, Size: file.Size, Mode: file.Mode, Mtime: file.Mtime,
	}, nil
}

// admitDownload takes one of the places for downloads, which release gives back.
func (s *server) admitDownload() (release func(), ok bool) {
	select {
	case s.downloads <- struct{}{}:
		return func() { <-s.downloads }, true
	default:
		return func() {}, false
	}
}

// send copies a file into a channel. A file that fails on the way is told in a
// text frame; a reader that is gone ends it.
func (s *server) send(file *sandbox.File, out *iii.Writer) {
	defer func() { _, _ = file.Close(), out.Close() }()
	defer file.OnBreak(func() { out.SetIdle(brokenWithin) })()
	_, err := file.WriteTo(out)
	var broken *fault.Error
	if !errors.As(err, &broken) {
		return
	}
	s.cfg.Log.Warn("a download broke off", "error_code", string(broken.Code))
	if text, err := json.Marshal(map[string]string{"error": broken.Message}); err == nil {
		_ = out.WriteText(text) // where it does not arrive, the size tells the reader
	}
}
