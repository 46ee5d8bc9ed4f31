package boot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// reconnectPause is how long a read waits before it asks again whether the
// port's host end is connected: there is no event for it.
const reconnectPause = 3 * time.Millisecond

// port is a virtio-console port. While the host end is not connected, Read
// waits. One reader and one writer may use it at once.
type port struct {
	*os.File

	mu       sync.Mutex
	deadline time.Time
}

// openPort finds the port by name, waiting for it to appear, and opens it. It
// must be done once per port and VM.
func openPort(ctx context.Context, name string) (*port, error) {
	device := ""
	err := poll(ctx, deviceWait, func() bool {
		device = findPort("/sys/class/virtio-ports", name)
		return device != ""
	})
	if err != nil {
		return nil, fmt.Errorf("no port %s after %v: was it given to the VMM, and is virtio_console in /modules/order?", name, deviceWait)
	}
	var f *os.File
	var openErr error
	_ = poll(ctx, deviceWait, func() bool {
		f, openErr = os.OpenFile(filepath.Join("/dev", device), os.O_RDWR|unix.O_NONBLOCK, 0)
		return !notThere(openErr)
	})
	if openErr != nil {
		return nil, fmt.Errorf("open port %s: %w", name, openErr)
	}
	// A file that the poller does not take would block a whole thread, and know
	// no deadlines.
	if err := f.SetDeadline(time.Time{}); err != nil {
		return nil, fmt.Errorf("open port %s: %w", name, err)
	}
	return &port{File: f}, nil
}

func findPort(class, name string) (device string) {
	paths, _ := filepath.Glob(filepath.Join(class, "*/name"))
	for _, path := range paths {
		if text, err := os.ReadFile(path); err == nil && strings.TrimSpace(string(text)) == name {
			return filepath.Base(filepath.Dir(path))
		}
	}
	return ""
}

// Read waits for data, also while the host end is not connected.
func (p *port) Read(b []byte) (int, error) {
	for {
		n, err := p.File.Read(b)
		if !errors.Is(err, io.EOF) {
			return n, err
		}
		p.mu.Lock()
		deadline := p.deadline
		p.mu.Unlock()
		if !deadline.IsZero() && !time.Now().Before(deadline) {
			return 0, os.ErrDeadlineExceeded
		}
		<-time.After(reconnectPause)
	}
}

// SetDeadline bounds reads, also those that wait for the host, and writes.
func (p *port) SetDeadline(t time.Time) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.deadline = t
	return p.File.SetDeadline(t)
}
