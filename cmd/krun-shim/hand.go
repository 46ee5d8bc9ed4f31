package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/cleanup"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/shim"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/shim/libkrun"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vmassets"
)

// handOptions are the flags of a boot by hand.
type handOptions struct {
	spec, dir, upper string
	console          bool
	env              envFlag
}

// envFlag collects repeated --env.
type envFlag []string

func (e *envFlag) String() string { return "" }

func (e *envFlag) Set(kv string) error {
	*e = append(*e, kv)
	return nil
}

func handFlags(o *handOptions, out io.Writer) *flag.FlagSet {
	flags := flag.NewFlagSet("krun-shim "+commandBoot, flag.ContinueOnError)
	flags.SetOutput(out)
	flags.StringVar(&o.spec, "spec", "", "boot spec `FILE`: JSON as saved in a machine directory; token and environment may be missing")
	flags.BoolVar(&o.console, "console", false, "print the guest's console on stdout")
	flags.Var(&o.env, "env", "`KEY=VALUE` in the guest's environment; may be repeated")
	flags.StringVar(&o.upper, "upper", "", "writable disk `FILE` instead of a fresh one; it is changed")
	flags.StringVar(&o.dir, "dir", "", "machine `DIRECTORY` to make and keep; by default a temporary one that is removed")
	return flags
}

// bootByHand boots a saved spec once more, with a machine directory, token and
// environment of its own.
func bootByHand(log *slog.Logger, args []string, stdout, stderr io.Writer) (end bootspec.End, err error) {
	var o handOptions
	flags := handFlags(&o, stderr)
	if err := flags.Parse(args); err != nil {
		return bootspec.End{}, errors.New("see krun-shim --help")
	}
	if o.spec == "" || flags.NArg() > 0 {
		return bootspec.End{}, fmt.Errorf("want --spec FILE and no other arguments, not %q: see krun-shim --help", args)
	}
	spec, err := readSpec(o.spec)
	if err != nil {
		return bootspec.End{}, bootspec.End{Class: bootspec.EndBadSpec, Message: err.Error()}
	}
	var undo cleanup.Stack
	defer func() { err = errors.Join(err, undo.Run()) }()
	if err := renew(spec, &o, &undo); err != nil {
		return bootspec.End{}, err
	}
	ctx, stop := withSignals(context.Background())
	defer stop()
	opts := shim.Options{Log: log, VMMLog: stderr}
	if o.console {
		opts.Console = stdout
	}
	_, _ = fmt.Fprintf(stderr, "krun-shim: booting %s; machine directory %s, socket %s; Ctrl-C ends it\n", spec.ID, spec.Dir, spec.Socket)
	return bootVM(ctx, spec, opts), nil
}

func readSpec(path string) (*bootspec.Spec, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	body, err := io.ReadAll(io.LimitReader(file, bootspec.MaxSize+1))
	if err != nil {
		return nil, err
	}
	if len(body) > bootspec.MaxSize {
		return nil, fmt.Errorf("%s has more than %d bytes", path, bootspec.MaxSize)
	}
	spec, err := bootspec.Parse(body)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return spec, nil
}

// renew gives the spec what a saved one lacks or must not share with the VM it
// was saved for.
func renew(spec *bootspec.Spec, o *handOptions, undo *cleanup.Stack) error {
	var token [16]byte
	if _, err := rand.Read(token[:]); err != nil {
		return err
	}
	spec.Guest.Token = hex.EncodeToString(token[:])
	spec.Guest.Env = append(spec.Guest.Env, o.env...)
	spec.Lifetime, spec.IdleTimeoutMs = bootspec.Tied, 0
	if spec.Network != nil {
		// The ports of the host may be the first VM's still.
		for i := range spec.Network.Publish {
			spec.Network.Publish[i].Host = 0
		}
	}
	if spec.QEMU != nil {
		// It has the kernel and the CPUs of the first boot, whatever the spec says
		// now, and the boot is what is to be seen.
		spec.QEMU.Snapshot = ""
	}

	var err error
	if spec.Dir, err = machineDir(o.dir, undo); err != nil {
		return err
	}
	spec.Socket = filepath.Join(spec.Dir, "shim.sock")
	files := layout.Machine{Dir: spec.Dir, Socket: spec.Socket}
	if spec.Libkrun != nil {
		saved := spec.Libkrun.Root
		spec.Libkrun.Root = files.Root()
		if err := remakeRoot(spec.Libkrun.Root, saved); err != nil {
			return err
		}
	}
	if o.upper != "" {
		spec.Upper.Path, err = filepath.Abs(o.upper)
		return err
	}
	spec.Upper = bootspec.Disk{Path: files.Upper()}
	err = vmassets.CreateUpper(spec.Upper.Path, vmassets.Ephemeral)
	if errors.Is(err, os.ErrExist) {
		return fmt.Errorf("%w: remove it, or name it with --upper", err)
	}
	return err
}

// remakeRoot makes the directory that the guest boots from, with the agent of the
// VM that the spec was saved for, or where that is gone, the one that an adapter
// would take.
func remakeRoot(dir, saved string) error {
	agent := filepath.Join(saved, libkrun.AgentFile)
	if _, err := os.Stat(agent); err != nil {
		if agent, err = vmassets.FindAgent(os.Getenv); err != nil {
			return err
		}
	}
	return vmassets.MakeRoot(dir, agent)
}

// machineDir makes dir, or a temporary directory that undo removes.
func machineDir(dir string, undo *cleanup.Stack) (string, error) {
	if dir == "" {
		// Not $TMPDIR, which may be too long for a socket's path.
		dir, err := os.MkdirTemp("/tmp", "krun-shim-")
		if err == nil {
			undo.Add(func() error { return os.RemoveAll(dir) })
		}
		return dir, err
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	return dir, layout.MakePrivate(dir)
}
