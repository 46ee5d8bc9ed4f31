package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/cleanup"
)

// fdMonitor is the only file that a QEMU whose guest is saved begins with.
const fdMonitor = 3

// saveName is what QEMU calls the file that it saves to.
const saveName = "state"

// Save boots the machine of the spec, with nothing behind its devices, until its
// agent waits for a boot spec, and writes the guest's state to file: what
// spec.QEMU.Snapshot resumes. All VMs of the same QEMU, machine, CPUs, memory,
// kernel, initramfs and network interface, if any, can be resumed from it:
// nothing of the spec but these is in it. log gets what QEMU prints. QEMU is gone on return.
func Save(ctx context.Context, spec *bootspec.Spec, file *os.File, log io.Writer) (err error) {
	var undo cleanup.Stack
	defer func() { err = errors.Join(err, undo.Run()) }()
	ctx, cancel := context.WithCancel(ctx)
	monitor, theirs, err := monitorPair()
	if err != nil {
		cancel()
		return err
	}
	undo.Add(func() error {
		_ = monitor.Close() // the second time where ctx has ended
		return nil
	})
	cmd, err := saveCommand(ctx, spec, theirs)
	if err != nil {
		cancel()
		return errors.Join(err, theirs.Close())
	}
	cmd.Stdout, cmd.Stderr = log, log
	// See run.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := errors.Join(cmd.Start(), theirs.Close()); err != nil {
		cancel()
		return err
	}
	undo.Add(func() error {
		cancel()
		_ = cmd.Wait() // it was killed
		return nil
	})
	// What waits for QEMU's words ends with it and with the context.
	stop := context.AfterFunc(ctx, func() { _ = monitor.Close() })
	defer stop()
	if err := save(monitor, file); err != nil {
		return errors.Join(fmt.Errorf("save the guest: %w", err), context.Cause(ctx))
	}
	return nil
}

func monitorPair() (ours *net.UnixConn, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		return nil, nil, err
	}
	unix.CloseOnExec(fds[0])
	unix.CloseOnExec(fds[1])
	file, theirs := os.NewFile(uintptr(fds[0]), "monitor"), os.NewFile(uintptr(fds[1]), "monitor of QEMU")
	conn, err := net.FileConn(file)
	if err = errors.Join(err, file.Close()); err != nil {
		return nil, nil, errors.Join(err, theirs.Close())
	}
	ours, ok := conn.(*net.UnixConn)
	if !ok {
		return nil, nil, errors.Join(errors.New("a Unix socket pair is none"), conn.Close(), theirs.Close())
	}
	return ours, theirs, nil
}

func saveCommand(ctx context.Context, spec *bootspec.Spec, monitor *os.File) (*exec.Cmd, error) {
	const nowhere = "driver=null-co,read-zeroes=on,size=16G"
	args, err := machineArgs(spec, backends{
		console: "null,id=console", link: "null,id=link", env: "null,id=env",
		lower: "if=none,id=lower," + nowhere + ",readonly=on", upper: "if=none,id=upper," + nowhere,
		network: "hubport,id=network,hubid=0",
	})
	if err != nil {
		return nil, err
	}
	args = append(args, "-chardev", socket("monitor", fdMonitor), "-mon", "chardev=monitor,mode=control",
		// Whoever resumes it shall not learn that it was stopped, and so let it run.
		"-global", "migration.store-global-state=off")
	cmd := exec.CommandContext(ctx, spec.QEMU.Binary, args...)
	cmd.Env = []string{}
	cmd.ExtraFiles = []*os.File{fdMonitor - 3: monitor}
	cmd.SysProcAttr = dieWithParent()
	return cmd, nil
}

// save talks QMP (QEMU Machine Protocol): it waits for the agent to open the
// port of the boot spec, which it reads from then on, and has the machine sent
// to the file.
func save(monitor *net.UnixConn, file *os.File) error {
	q := qmp{conn: monitor, r: json.NewDecoder(monitor)}
	if err := q.command("qmp_capabilities", nil, nil); err != nil {
		return err
	}
	events := map[string]any{"capabilities": []any{map[string]any{"capability": "events", "state": true}}}
	if err := q.command("migrate-set-capabilities", events, nil); err != nil {
		return err
	}
	// As fast as the disk is, in bytes a second: QEMU's default spares a network.
	if err := q.command("migrate-set-parameters", map[string]any{"max-bandwidth": int64(1) << 40}, nil); err != nil {
		return err
	}
	err := q.await("VSERPORT_CHANGE", func(data eventData) (bool, error) { return data.ID == portID("env") && data.Open, nil })
	if err != nil {
		return err
	}
	// One that stands still is sent once; see saveCommand for its going on.
	if err := q.command("stop", nil, nil); err != nil {
		return err
	}
	if err := q.command("getfd", map[string]any{"fdname": saveName}, file); err != nil {
		return err
	}
	if err := q.command("migrate", map[string]any{"uri": "fd:" + saveName}, nil); err != nil {
		return err
	}
	return q.await("MIGRATION", func(data eventData) (bool, error) {
		if data.Status == "failed" || data.Status == "cancelled" {
			return false, fmt.Errorf("QEMU's migration to a file %s: is the disk full?", data.Status)
		}
		return data.Status == "completed", nil
	})
}

// qmp is one conversation.
type qmp struct {
	conn *net.UnixConn
	r    *json.Decoder
	// waiting are events that came before a command's answer.
	waiting []message
}

// message is anything that QEMU says.
type message struct {
	Event  string          `json:"event"`
	Data   eventData       `json:"data"`
	Return json.RawMessage `json:"return"`
	Error  *struct {
		Class string `json:"class"`
		Desc  string `json:"desc"`
	} `json:"error"`
}

// eventData are the fields of the two events that matter here.
type eventData struct {
	ID     string `json:"id"`
	Open   bool   `json:"open"`
	Status string `json:"status"`
}

// command sends one, with a file unless that is nil, and waits for its answer.
func (q *qmp) command(name string, arguments map[string]any, file *os.File) error {
	request := map[string]any{"execute": name}
	if arguments != nil {
		request["arguments"] = arguments
	}
	text, err := json.Marshal(request)
	if err != nil {
		return err
	}
	var rights []byte
	if file != nil {
		rights = unix.UnixRights(int(file.Fd()))
	}
	if _, _, err := q.conn.WriteMsgUnix(text, rights, nil); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	for {
		m, err := q.read()
		switch {
		case err != nil:
			return fmt.Errorf("%s: %w", name, err)
		case m.Error != nil:
			return fmt.Errorf("%s: %s: %s", name, m.Error.Class, m.Error.Desc)
		case m.Return != nil:
			return nil
		case m.Event != "":
			q.waiting = append(q.waiting, m)
		}
	}
}

// await reads until an event of that name for which done is true.
func (q *qmp) await(name string, done func(eventData) (bool, error)) error {
	for {
		var m message
		if len(q.waiting) > 0 {
			m, q.waiting = q.waiting[0], q.waiting[1:]
		} else {
			var err error
			if m, err = q.read(); err != nil {
				return fmt.Errorf("wait for %s: %w", name, err)
			}
		}
		if m.Event != name {
			continue
		}
		if ok, err := done(m.Data); ok || err != nil {
			return err
		}
	}
}

func (q *qmp) read() (message, error) {
	var m message
	err := q.r.Decode(&m)
	if errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) {
		err = errors.New("QEMU ended")
	}
	return m, err
}
