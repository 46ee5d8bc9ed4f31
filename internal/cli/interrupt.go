package cli

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"
)

// interrupted is the cause of a context that a signal ended.
type interrupted struct{ signal syscall.Signal }

func (i interrupted) Error() string { return fmt.Sprintf("interrupted by %v", i.signal) }

// exitCode is what a shell reports for a program that the signal ended.
func (i interrupted) exitCode() int { return 128 + int(i.signal) }

// interrupts turns SIGINT, SIGTERM and SIGHUP into the end of a context, except
// that the first one goes to a running program where there is one. The one after
// the context's end kills this process, should it be stuck. Close ends it.
type interrupts struct {
	signals chan os.Signal
	done    chan struct{}
	cancel  context.CancelCauseFunc

	mu      sync.Mutex
	program chan int // nil: no program to forward to
}

func catchInterrupts(ctx context.Context) (context.Context, *interrupts) {
	ctx, cancel := context.WithCancelCause(ctx)
	i := &interrupts{signals: make(chan os.Signal, 4), done: make(chan struct{}), cancel: cancel}
	signal.Notify(i.signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	go i.loop()
	return ctx, i
}

func (i *interrupts) loop() {
	defer close(i.done)
	for s := range i.signals {
		sig, ok := s.(syscall.Signal)
		if ok && !i.forward(sig) {
			i.cancel(interrupted{sig})
			signal.Stop(i.signals)
		}
	}
}

// forward hands a signal to the program, once; the next one is not forwarded.
func (i *interrupts) forward(sig syscall.Signal) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.program == nil {
		return false
	}
	i.program <- int(sig) // buffered: see forwardTo
	i.program = nil
	return true
}

// forwardTo returns a channel that gets the next signal.
func (i *interrupts) forwardTo() <-chan int {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.program = make(chan int, 1)
	return i.program
}

// Close stops catching and waits for the goroutine.
func (i *interrupts) Close() {
	signal.Stop(i.signals)
	close(i.signals)
	<-i.done
	i.cancel(nil)
}
