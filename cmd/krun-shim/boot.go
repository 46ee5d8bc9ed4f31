package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/shim"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/shim/qemu"
)

// File descriptors that a launcher gives to its shim.
const (
	fdReady    = 3
	fdLifeline = 4
	fdLock     = 5
)

// bootSpawned runs the VM of a launcher.
func bootSpawned(log *slog.Logger, stdin *os.File, stderr io.Writer) (bootspec.End, error) {
	inherited, err := inherit()
	if err != nil {
		return bootspec.End{}, err
	}
	spec, err := bootspec.Read(stdin)
	if err != nil {
		return bootspec.End{}, bootspec.End{Class: bootspec.EndBadSpec, Message: err.Error()}
	}
	if err := closeStdin(stdin); err != nil {
		return bootspec.End{}, err
	}
	ctx, stop := withSignals(context.Background())
	defer stop()
	return bootVM(ctx, spec, shim.Options{
		Log: log, VMMLog: stderr,
		Ready: inherited.ready, Lifeline: inherited.lifeline, Lock: inherited.lock,
	}), nil
}

// bootVM runs the hypervisor that the spec asks for.
func bootVM(ctx context.Context, spec *bootspec.Spec, opts shim.Options) bootspec.End {
	opts.Version = version
	switch spec.VMM {
	case bootspec.QEMU:
		opts.Hypervisor = qemu.Hypervisor{Wrap: confinement(opts.Log)}
	case bootspec.Libkrun:
		opts.Hypervisor = newLibkrun(opts.Log)
	}
	return shim.Run(ctx, spec, opts)
}

// withSignals returns a context that the signals which ask a process to end
// cancel, with an End as the cause. stop gives the signals back.
func withSignals(parent context.Context) (ctx context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(parent)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	go func() {
		select {
		case sig := <-signals:
			cancel(bootspec.End{Class: bootspec.EndKilled, ExitCode: -1, Message: fmt.Sprintf("its shim was told to end (%v)", sig)})
		case <-ctx.Done():
		}
	}()
	return ctx, func() {
		signal.Stop(signals)
		cancel(nil)
	}
}

// inheritedFiles are what a launcher hands over.
type inheritedFiles struct{ ready, lifeline, lock *os.File }

func inherit() (*inheritedFiles, error) {
	var files inheritedFiles
	for _, f := range []struct {
		fd   int
		mode uint32
		name string
		file **os.File
	}{
		{fdReady, unix.S_IFIFO, "ready pipe", &files.ready},
		{fdLifeline, unix.S_IFIFO, "lifeline pipe", &files.lifeline},
		{fdLock, unix.S_IFREG, "machine directory's lock", &files.lock},
	} {
		var st unix.Stat_t
		if err := unix.Fstat(f.fd, &st); err != nil || uint32(st.Mode)&unix.S_IFMT != f.mode { //nolint:unconvert // 16 bits on macOS
			return nil, fmt.Errorf("file descriptor %d is not the launcher's %s: by hand use --spec FILE (see krun-shim --help)", f.fd, f.name)
		}
		unix.CloseOnExec(f.fd)
		if f.mode == unix.S_IFIFO {
			// So that a read ends when the file is closed.
			if err := unix.SetNonblock(f.fd, true); err != nil {
				return nil, fmt.Errorf("%s: %w", f.name, err)
			}
		}
		*f.file = os.NewFile(uintptr(f.fd), f.name)
	}
	return &files, nil
}

// closeStdin puts the null device in its place, so that nothing else becomes
// file descriptor 0.
func closeStdin(stdin *os.File) error {
	null, err := os.Open(os.DevNull)
	if err != nil {
		return err
	}
	defer func() { _ = null.Close() }()
	if err := dup2(int(null.Fd()), int(stdin.Fd())); err != nil {
		return fmt.Errorf("close stdin: %w", err)
	}
	return nil
}

// prepareProcess sets what holds for the whole process and its VMM.
func prepareProcess() error {
	unix.Umask(0o077)
	// The VMM gets what it is given and nothing that a shell left open.
	return errors.Join(closeOnExec(), raiseFileLimit(), forbidDumps())
}

// forbidDumps keeps the memory of a guest out of the host's core dumps: a VMM that
// aborts, which libkrun does for small reasons, would leave it there.
func forbidDumps() error {
	if err := syscall.Setrlimit(syscall.RLIMIT_CORE, &syscall.Rlimit{}); err != nil {
		return fmt.Errorf("RLIMIT_CORE: %w", err)
	}
	return nil
}

// maxFiles is enough for every VM, and below what kernels refuse.
const maxFiles = 1 << 20

// raiseFileLimit sets the limit on open files. The VMM inherits it; without an
// explicit call Go would give children the old one.
func raiseFileLimit() error {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return fmt.Errorf("RLIMIT_NOFILE: %w", err)
	}
	limit.Cur = min(limit.Max, maxFiles)
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return fmt.Errorf("RLIMIT_NOFILE: %w", err)
	}
	return nil
}
