package shimdriver

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"sync"
	"syscall"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/proc"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
)

// process is one running shim. It implements vm.Process.
type process struct {
	child *proc.Process
	files layout.Machine
	log   *os.File // the shim log, closed at the end
	done  chan struct{}
	end   bootspec.End // valid once done is closed

	mu       sync.Mutex
	lifeline *os.File // closed at the end
	killed   bool
	released bool
}

// wait publishes the end and closes lifeline and log.
func (p *process) wait() {
	defer close(p.done)
	<-p.child.Done()
	p.mu.Lock()
	defer p.mu.Unlock()
	_ = p.lifeline.Close() // nobody reads it any more
	p.end = p.classify()
	_ = p.log.Close() // only read
}

func (p *process) PID() int              { return p.child.PID() }
func (p *process) Done() <-chan struct{} { return p.done }
func (p *process) End() bootspec.End     { return p.end }

// Kill ends shim and VMM, which are one process group.
func (p *process) Kill() error {
	p.mu.Lock()
	p.killed = true
	p.mu.Unlock()
	return p.child.Kill()
}

// Release tells the shim that the coming end of file is not to end the VM.
func (p *process) Release() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, err := p.lifeline.Write([]byte{detach}); err != nil {
		return fmt.Errorf("tell the shim to live on: %w", err)
	}
	p.released = true
	return nil
}

// classify finds out how the VM ended. What the shim wrote itself counts most;
// it cannot write when it was killed or crashed.
func (p *process) classify() bootspec.End {
	exit := p.child.Exit()
	end, err := vm.ReadEnd(p.files)
	if err == nil {
		return end
	}
	end = bootspec.End{ExitCode: exit.Code, Signal: int(exit.Signal)}
	if !errors.Is(err, fs.ErrNotExist) {
		end.Class, end.Message = bootspec.EndCrashed, fmt.Sprintf("the shim ended (%v) and its report is damaged: %v", exit, err)
		return end
	}
	class, known := bootspec.ClassOfStatus(exit.Code)
	switch {
	case p.killed:
		end.Class, end.Message = bootspec.EndKilled, "it was killed by its launcher"
	case exit.Signal == syscall.SIGKILL:
		end.Class = bootspec.EndKilled
		end.Message = "its shim was killed by SIGKILL: by somebody, or by the kernel when memory ran out (see dmesg)"
	case exit.Signal == syscall.SIGTERM || exit.Signal == syscall.SIGINT || exit.Signal == syscall.SIGHUP:
		end.Class, end.Message = bootspec.EndKilled, fmt.Sprintf("its shim was ended by signal %d (%v)", int(exit.Signal), exit.Signal)
	case exit.Signal != 0:
		end.Class, end.Message = bootspec.EndCrashed, fmt.Sprintf("its shim crashed: signal %d (%v)%s", int(exit.Signal), exit.Signal, p.lastWords())
	case known:
		// A released VM's shim has removed its report with the directory; the
		// log's last line has it too.
		_, message, found := strings.Cut(p.lastWords(), string(class)+": ")
		if !found {
			message = fmt.Sprintf("its shim ended with status %d and without a report%s", exit.Code, p.lastWords())
		}
		if !found && class == bootspec.EndGuest {
			class = bootspec.EndCrashed // 0 alone proves nothing
		}
		end.Class, end.Message = class, message
	default:
		end.Class, end.Message = bootspec.EndRefused, fmt.Sprintf("its shim ended with status %d%s", exit.Code, p.lastWords())
	}
	return end
}

// lastWords is the last line that the shim printed, to follow a message.
func (p *process) lastWords() string {
	lines := strings.Split(vm.Tail(p.log), "\n")
	if last := strings.TrimSpace(lines[len(lines)-1]); last != "" {
		return ": " + last
	}
	return ""
}
