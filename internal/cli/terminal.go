package cli

import (
	"errors"
	"io"
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/term"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/guest"
)

// stdin decides what a program gets as standard input: ours, unless it is a
// terminal that was not asked for or its content is already used up. A program
// that merely runs must not stop a job in the background for wanting the
// terminal.
func (a *App) stdin(p *programFlags, used bool) io.Reader {
	if used || (a.Terminal(a.Stdin) && !p.interactive && !p.tty) {
		return nil
	}
	return a.Stdin
}

// check refuses a terminal for the program where we have none.
func (p *programFlags) check(a *App) error {
	if p.tty && !a.Terminal(a.Stdin) {
		return usagef("--tty needs a terminal as standard input")
	}
	return nil
}

// withTerminal runs f, with the terminal in raw mode and its size passed on when
// the program asked for one.
func (a *App) withTerminal(p *programFlags, cmd *guest.Command, streams *guest.IO, f func() (guest.Result, error)) (_ guest.Result, err error) {
	if !p.tty {
		return f()
	}
	fd := int(a.Stdin.Fd())
	size, err := terminalSize(fd)
	if err != nil {
		return guest.Result{}, err
	}
	old, err := term.MakeRaw(fd)
	if err != nil {
		return guest.Result{}, err
	}
	defer func() { err = errors.Join(err, term.Restore(fd, old)) }()

	resized := make(chan os.Signal, 1)
	signal.Notify(resized, syscall.SIGWINCH)
	sizes := make(chan guest.Size, 1)
	stop := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			case <-resized:
				if size, err := terminalSize(fd); err == nil {
					select {
					case sizes <- size:
					case <-stop:
						return
					}
				}
			}
		}
	}()
	defer func() {
		signal.Stop(resized)
		close(stop)
		<-done
	}()
	cmd.TTY = &size
	streams.Resize = sizes
	return f()
}

func terminalSize(fd int) (guest.Size, error) {
	cols, rows, err := term.GetSize(fd)
	if err != nil {
		return guest.Size{}, err
	}
	return guest.Size{Rows: uint16(rows), Cols: uint16(cols)}, nil
}
