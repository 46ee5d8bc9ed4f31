package libkrun

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
)

// Enter is the child's side of Hypervisor.Run: it reads the spec from stdin,
// prepares the VM that open returns, and starts it. It returns only when there is
// no VM. Call it from main's goroutine, locked to its thread; open may confine
// the process, which has the machine directory as its working directory.
func Enter(stdin *os.File, open func(*bootspec.Spec) (VM, error)) error {
	// libkrun writes to the console's socket, whose reader may be gone first.
	signal.Ignore(syscall.SIGPIPE)
	var spec bootspec.Spec
	if err := json.NewDecoder(io.LimitReader(stdin, bootspec.MaxSize)).Decode(&spec); err != nil {
		return fmt.Errorf("read the spec on stdin: %w: this command is for krun-shim itself", err)
	}
	if spec.Libkrun == nil {
		return fmt.Errorf("the spec on stdin has no libkrun part: this command is for krun-shim itself")
	}
	go dieWith(stdin)
	// Kept open by the VM's life.
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	vm, err := open(&spec)
	if err != nil {
		return err
	}
	if err := Configure(vm, &spec, Files{Console: fdConsole, Env: fdEnv, Null: int(null.Fd()), Network: fdNetwork}); err != nil {
		return err
	}
	err = vm.StartEnter()
	_ = null.Close() // there is no VM
	return err
}

// dieWith ends this process, with its VM, when the shim has closed its end of
// stdin. By a signal, since exiting would wait for libkrun's threads.
func dieWith(stdin io.Reader) {
	_, _ = io.Copy(io.Discard, stdin) // until its end, of whatever kind
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
}
