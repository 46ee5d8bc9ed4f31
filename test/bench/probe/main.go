// Command probe runs inside a guest for the benchmark: it starts programs the
// cheapest way there is and times them, and is the far end of stream tests. It
// is static and reads and writes nothing but its standard streams.
//
//	probe fork COUNT PROGRAM [ARG...]   nanoseconds of each fork+exec+wait, one a line
//	probe source BYTES                  that many bytes of the test sequence to stdout
//	probe sink BYTES                    fails unless stdin is exactly that sequence
//	probe pipe BYTES                    nanoseconds to move BYTES through a pipe to a child
package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/test/bench/sequence"
)

func main() {
	if err := command(os.Args[1:], os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "probe:", err)
		os.Exit(1)
	}
}

func command(args []string, stdin io.Reader, stdout io.Writer) error {
	if len(args) < 2 {
		return errors.New("usage: probe fork COUNT PROGRAM [ARG...] | source BYTES | sink BYTES | pipe BYTES")
	}
	n, err := strconv.ParseInt(args[1], 10, 64)
	if err != nil {
		return err
	}
	switch args[0] {
	case "fork":
		if len(args) < 3 {
			return errors.New("fork needs a program")
		}
		return fork(int(n), args[2:], stdout)
	case "source":
		_, err := io.CopyBuffer(onlyWriter{stdout}, io.LimitReader(sequence.New(), n), make([]byte, 64<<10))
		return err
	case "sink":
		return sequence.Check(stdin, n)
	case "pipe":
		return pipe(n, stdout)
	}
	return fmt.Errorf("there is no test %q", args[0])
}

// onlyWriter hides every other method, so that copying uses our buffer.
type onlyWriter struct{ io.Writer }

// fork starts and awaits the program count times, its streams on /dev/null.
func fork(count int, argv []string, stdout io.Writer) (err error) {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, null.Close()) }()
	out := bufio.NewWriter(stdout)
	attr := &os.ProcAttr{Files: []*os.File{null, null, null}}
	for range count {
		begin := time.Now()
		p, err := os.StartProcess(argv[0], argv, attr)
		if err != nil {
			return err
		}
		state, err := p.Wait()
		took := time.Since(begin)
		if err != nil {
			return err
		}
		if !state.Success() {
			return fmt.Errorf("%s: %v", argv[0], state)
		}
		if _, err := fmt.Fprintln(out, took.Nanoseconds()); err != nil {
			return err
		}
	}
	return out.Flush()
}

// pipe times n bytes from here to a child that checks them.
func pipe(n int64, stdout io.Writer) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	begin := time.Now()
	child, err := os.StartProcess(self, []string{self, "sink", strconv.FormatInt(n, 10)},
		&os.ProcAttr{Files: []*os.File{r, nil, os.Stderr}})
	if err := errors.Join(err, r.Close()); err != nil {
		return errors.Join(err, w.Close())
	}
	_, err = io.CopyBuffer(onlyWriter{w}, io.LimitReader(sequence.New(), n), make([]byte, 64<<10))
	err = errors.Join(err, w.Close())
	state, waitErr := child.Wait()
	if err := errors.Join(err, waitErr); err != nil {
		return err
	}
	took := time.Since(begin)
	if !state.Success() {
		return fmt.Errorf("the child's check failed: %v", state)
	}
	_, err = fmt.Fprintln(stdout, took.Nanoseconds())
	return err
}
