package vmtest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/agent/procs"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/agentlink"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
)

// BufferEnv names the variable of a guest's environment with the size in bytes of
// the buffers that PlayGuest gives its vsock connection; 0 leaves the kernel's.
const BufferEnv = "VMTEST_VSOCK_BUFFER"

// maxPacket is what the product's agent sends at once, and why it does: libkrun
// before 1.18.1 drops longer packets.
const maxPacket = 32 << 10

// portWait bounds the wait for iii.env to appear.
const portWait = time.Minute

// PlayGuest does not return in the first process of a guest of libkrun: a test
// program can be given to a VM in the agent's place. It serves the agent's calls
// from the directory that it was booted from, without disks, on a connection whose
// buffers the test chooses, which the product's agent does not let anyone do.
func PlayGuest() {
	if os.Getpid() != 1 || os.Getenv("KRUN_INIT_PID1") == "" {
		return
	}
	if err := guestMain(); err != nil {
		fmt.Fprintln(os.Stderr, "guest:", err)
	}
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)
	os.Exit(1) //nolint:forbidigo // then by a panic of the kernel
}

func guestMain() error {
	ctx := context.Background()
	env, err := openEnvPort()
	if err != nil {
		return err
	}
	frame, err := agentlink.ReadEnv(env)
	if err != nil {
		return fmt.Errorf("read %s: %w", agentlink.EnvPort, err)
	}
	config, err := bootspec.ParseGuest(frame)
	if err != nil {
		return err
	}
	buffer := 0
	for _, kv := range config.Env {
		if text, found := strings.CutPrefix(kv, BufferEnv+"="); found {
			if buffer, err = strconv.Atoi(text); err != nil {
				return err
			}
		}
	}
	conn, err := dialHost(buffer)
	if err != nil {
		return fmt.Errorf("dial the host: %w", err)
	}
	if _, err := agentlink.Greet(conn, config.Token); err != nil {
		return err
	}
	m := &fakeMachine{fake: &Fake{Log: slog.New(slog.NewTextHandler(os.Stderr, nil))}}
	return m.serve(ctx, conn, config, procs.Open(procs.All))
}

// openEnvPort opens the port of that name; it must be done once per VM.
func openEnvPort() (*os.File, error) {
	for deadline := time.Now().Add(portWait); time.Now().Before(deadline); <-time.After(10 * time.Millisecond) {
		names, _ := filepath.Glob("/sys/class/virtio-ports/*/name")
		for _, path := range names {
			name, err := os.ReadFile(path)
			if err != nil || strings.TrimSpace(string(name)) != agentlink.EnvPort {
				continue
			}
			return os.OpenFile("/dev/"+filepath.Base(filepath.Dir(path)), os.O_RDWR, 0)
		}
	}
	return nil, fmt.Errorf("no port %s", agentlink.EnvPort)
}

// dialHost connects to the shim by vsock.
func dialHost(buffer int) (net.Conn, error) {
	fd, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	if buffer > 0 {
		for _, option := range []int{unix.SO_VM_SOCKETS_BUFFER_MAX_SIZE, unix.SO_VM_SOCKETS_BUFFER_SIZE} {
			if err := unix.SetsockoptUint64(fd, unix.AF_VSOCK, option, uint64(buffer)); err != nil {
				return nil, errors.Join(err, unix.Close(fd))
			}
		}
	}
	err = unix.Connect(fd, &unix.SockaddrVM{CID: unix.VMADDR_CID_HOST, Port: agentlink.VsockPort})
	if err == nil {
		err = unix.SetNonblock(fd, true)
	}
	if err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	return vsockConn{os.NewFile(uintptr(fd), "vsock")}, nil
}

// vsockConn is a net.Conn on a file that the poller takes.
type vsockConn struct{ *os.File }

func (c vsockConn) Write(p []byte) (written int, err error) {
	for err == nil && written < len(p) {
		var n int
		n, err = c.File.Write(p[written:min(len(p), written+maxPacket)])
		written += n
	}
	return written, err
}

func (vsockConn) LocalAddr() net.Addr  { return &net.UnixAddr{Name: "guest", Net: "vsock"} }
func (vsockConn) RemoteAddr() net.Addr { return &net.UnixAddr{Name: "host", Net: "vsock"} }
