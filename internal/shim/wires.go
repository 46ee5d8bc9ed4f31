package shim

import (
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/agentlink"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/cleanup"
)

// How much of what VMM and guest print is kept in memory for the report of the
// end, and how much of the VMM's log is passed on, in bytes. A kernel's panic
// prints up to 6 KiB behind the line that tells why, which libkrun puts into its
// log, with 60 bytes before each line.
const (
	consoleTail = 16 << 10
	vmmTail     = 16 << 10
	vmmLogLimit = 64 << 10
)

// wires are both ends of what connects shim and VM. The guest's ends become the
// hypervisor's when it runs.
type wires struct {
	guestEnv, guestLink, guestConsole, vmmLog *os.File

	env, link, console net.Conn
	vmmLogReader       *os.File

	pumps     sync.WaitGroup
	lastWords lastWords
}

// lastWords are the ends of what guest and VMM printed; valid after drain.
type lastWords struct{ console, vmm tail }

// openWires makes the wires and begins to read what comes from the VM: a guest
// must not wait because nobody reads its console.
func openWires(consolePath string, opts Options) (_ *wires, err error) {
	var undo cleanup.Stack
	defer func() { err = undo.RunOnError(err) }()

	w := &wires{lastWords: lastWords{console: tail{size: consoleTail}, vmm: tail{size: vmmTail}}}
	undo.Add(w.close)
	for _, pair := range []struct {
		host  *net.Conn
		guest **os.File
		name  string
	}{{&w.env, &w.guestEnv, "iii.env"}, {&w.link, &w.guestLink, "iii.agent"}, {&w.console, &w.guestConsole, "console"}} {
		if *pair.host, *pair.guest, err = socketPair(pair.name); err != nil {
			return nil, err
		}
	}
	if w.vmmLogReader, w.vmmLog, err = os.Pipe(); err != nil {
		return nil, err
	}
	consoleLog, err := openBoundedLog(consolePath)
	if err != nil {
		return nil, err
	}
	w.pumps.Go(func() {
		defer consoleLog.close()
		pump(w.console, &w.lastWords.console, consoleLog, opts.Console)
	})
	w.pumps.Go(func() {
		pump(w.vmmLogReader, &w.lastWords.vmm, &limitedWriter{w: opts.VMMLog, left: vmmLogLimit})
	})
	return w, nil
}

// pump copies until the end of r. Writers that fail lose what they did not
// take, the source never notices. Nil writers are skipped.
func pump(r io.Reader, writers ...io.Writer) {
	buf := make([]byte, 4<<10)
	for {
		n, err := r.Read(buf)
		for _, w := range writers {
			if w != nil && n > 0 {
				_, _ = w.Write(buf[:n])
			}
		}
		if err != nil {
			return
		}
	}
}

// sendEnv writes the env frame; it returns when the VM's side has taken it, or
// with the end of the wires. The host's end stays open: QEMU drops what is
// unread when it is closed.
func (w *wires) sendEnv(payload []byte, log *slog.Logger) {
	if err := agentlink.WriteEnv(w.env, payload); err != nil && !isBroken(err) {
		log.Warn("send the environment to the guest", "error", err)
	}
}

// drainTimeout bounds the wait for the last output of a VMM that has ended.
const drainTimeout = time.Second

// drain reads what VMM and guest printed last, closes the host's ends and
// returns the ends of the logs. Call it when the VMM is gone.
func (w *wires) drain() *lastWords {
	deadline := time.Now().Add(drainTimeout)
	_ = w.console.SetReadDeadline(deadline) // at worst the pump ends by close
	_ = w.vmmLogReader.SetReadDeadline(deadline)
	w.pumps.Wait()
	_ = w.closeHost() // everything was read
	return &w.lastWords
}

func (w *wires) closeHost() error {
	var errs []error
	for _, c := range []net.Conn{w.env, w.link, w.console} {
		if c != nil {
			errs = append(errs, c.Close())
		}
	}
	if w.vmmLogReader != nil {
		errs = append(errs, w.vmmLogReader.Close())
	}
	return errors.Join(errs...)
}

// close closes all ends and waits for the pumps. Idempotent; what the
// hypervisor has closed is not touched.
func (w *wires) close() error {
	for _, f := range []*os.File{w.guestEnv, w.guestLink, w.guestConsole, w.vmmLog} {
		if f != nil {
			_ = f.Close() // closed already where the hypervisor took it
		}
	}
	_ = w.closeHost() // as above, by drain
	w.pumps.Wait()
	return nil
}

// socketPair makes a stream socket pair, one end for this process and one to
// hand on. Both are close-on-exec.
func socketPair(name string) (host net.Conn, guest *os.File, err error) {
	// Not with SOCK_CLOEXEC, which macOS lacks.
	syscall.ForkLock.RLock()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
	if err == nil {
		syscall.CloseOnExec(fds[0])
		syscall.CloseOnExec(fds[1])
	}
	syscall.ForkLock.RUnlock()
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	guest = os.NewFile(uintptr(fds[1]), name+" (guest)")
	file := os.NewFile(uintptr(fds[0]), name+" (host)")
	host, err = net.FileConn(file)
	_ = file.Close() // FileConn has its own
	if err != nil {
		_ = guest.Close()
		return nil, nil, err
	}
	return host, guest, nil
}

// isBroken reports whether err only says that the other end is gone, or this
// end closed.
func isBroken(err error) bool {
	for _, target := range []error{io.EOF, io.ErrUnexpectedEOF, io.ErrClosedPipe, net.ErrClosed, os.ErrClosed, syscall.EPIPE, syscall.ECONNRESET} {
		if errors.Is(err, target) {
			return true
		}
	}
	return false
}
