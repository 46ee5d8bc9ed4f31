package shim

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/cleanup"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
)

// listener accepts only connections of this process's user and of root.
type listener struct {
	*net.UnixListener
	path string
	file os.FileInfo
}

// staleTimeout bounds the look for somebody behind an existing socket.
const staleTimeout = time.Second

// listen makes the socket. Its directory is private, so that nobody can connect
// between its making and its chmod. One that nobody answers on is replaced.
func listen(ctx context.Context, path string) (_ *listener, err error) {
	var undo cleanup.Stack
	defer func() { err = undo.RunOnError(err) }()

	if err := layout.MakePrivate(filepath.Dir(path)); err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	if err := removeStale(ctx, path); err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	unixListener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	// Not by name: a later VM may have its own socket there.
	unixListener.SetUnlinkOnClose(false)
	undo.Add(unixListener.Close)
	undo.Add(func() error { return os.Remove(path) })
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	file, err := os.Lstat(path)
	if err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	return &listener{UnixListener: unixListener, path: path, file: file}, nil
}

func removeStale(ctx context.Context, path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.Mode().Type() != os.ModeSocket {
		return fmt.Errorf("%s exists and is no socket: remove it", path)
	}
	// That the file is there proves nothing: connect.
	dialer := net.Dialer{Timeout: staleTimeout}
	if c, err := dialer.DialContext(ctx, "unix", path); err == nil {
		_ = c.Close()
		return fmt.Errorf("%s is served by another shim: stop that VM, or give the spec another socket", path)
	}
	return os.Remove(path)
}

// Accept waits for the next connection of a permitted user; those of others are
// closed.
func (l *listener) Accept() (net.Conn, error) {
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			return nil, err
		}
		if uid, err := peerUID(c); err == nil && (uid == os.Geteuid() || uid == 0) {
			return c, nil
		}
		_ = c.Close() // a stranger learns nothing
	}
}

// remove deletes the socket if it is still this listener's.
func (l *listener) remove() error {
	info, err := os.Lstat(l.path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err == nil && os.SameFile(info, l.file) {
		err = os.Remove(l.path)
	}
	return err
}
