package libkrun

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"sync"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
)

// linkListener takes the connections that the guest dials.
type linkListener struct {
	net.Listener
	dir     *os.File // what an address by descriptor counts from; may be nil
	pending sync.WaitGroup
}

// linkAddress is how the link's socket in dir can be named to the system, whose
// socket paths are short: where dir is too long, by an open descriptor (%d).
func linkAddress(dir string) (string, error) {
	path := filepath.Join(dir, layout.LinkName)
	switch {
	case len(path) <= layout.MaxSocketPath:
		return path, nil
	case runtime.GOOS == "linux":
		return "/proc/self/fd/%d/" + layout.LinkName, nil
	default:
		return "", fmt.Errorf("the link's socket %s has %d bytes, more than %d: set III_SANDBOX_STATE_DIR to a shorter directory", path, len(path), layout.MaxSocketPath)
	}
}

// listenLink makes the link's socket in the machine directory and hands every
// connection to offer until it is closed.
func listenLink(dir string, offer func(net.Conn)) (*linkListener, error) {
	address, err := linkAddress(dir)
	if err != nil {
		return nil, err
	}
	l := &linkListener{}
	if address != filepath.Join(dir, layout.LinkName) {
		if l.dir, err = os.Open(dir); err != nil {
			return nil, err
		}
		address = fmt.Sprintf(address, l.dir.Fd())
	}
	if l.Listener, err = net.ListenUnix("unix", &net.UnixAddr{Name: address, Net: "unix"}); err != nil {
		l.closeDir()
		return nil, fmt.Errorf("listen for the guest: %w", err)
	}
	l.pending.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return // closed
			}
			offer(c)
		}
	})
	return l, nil
}

// close removes the socket, and returns when nothing is offered any more.
func (l *linkListener) close() {
	_ = l.Close() // the socket's directory goes next
	l.pending.Wait()
	l.closeDir()
}

func (l *linkListener) closeDir() {
	if l.dir != nil {
		_ = l.dir.Close()
	}
}
