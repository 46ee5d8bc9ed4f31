package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/catalog"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/guest"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/sandbox"
)

// maxCode bounds a program read from a file or standard input, in bytes.
const maxCode = 64 << 20

type runFlags struct {
	image, lang, code, name string
	env                     []string
	cpus                    int
	memory                  memoryFlag
	timeout, idle           durationFlag
	keep, json              bool
	network                 networkFlags
	program                 programFlags

	hasCode bool
	command []string // after "--": a program of the image instead of code
}

// programFlags are the flags of everything that runs a program.
type programFlags struct {
	interactive, tty bool
}

func (a *App) runCommand() *cobra.Command {
	f := &runFlags{memory: sandbox.DefaultMemoryMiB, idle: durationFlag(sandbox.DefaultIdleTimeout)}
	cmd := &cobra.Command{
		Use:   "run --image IMAGE [flags] (-c CODE | FILE [ARG...] | - | -- COMMAND [ARG...])",
		Short: "Boot a sandbox, run a program in it and stop it",
		Long: `run boots a fresh microVM from an image, runs a program in it, passes its output
on as it comes and ends with the program's exit code.

The program is code given with -c, in a FILE, or on standard input ("-" or nothing);
or, after "--", a command of the image. IMAGE is python, node, the name of a layout in
III_SANDBOX_IMAGE_DIR, oci:DIR[:TAG], docker-archive:FILE or a registry reference with
its host.`,
		Example: `  adapter run --image python -c 'print(6*7)'
  adapter run --image node hello.js
  adapter run --image python --allow '*.python.org:443' -- python3 fetch.py
  echo 'echo $((6*7))' | adapter run --image python --lang shell
  adapter run --image oci:./busybox -- ls -l /`,
		RunE: func(cmd *cobra.Command, args []string) error {
			f.hasCode = cmd.Flags().Changed("code")
			return a.run(cmd.Context(), f, args, cmd.ArgsLenAtDash())
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&f.image, "image", "", "the image to boot (required)")
	flags.StringVar(&f.lang, "lang", "", "python, node, shell, or an interpreter of the image (default: from the file's or image's name)")
	flags.StringVarP(&f.code, "code", "c", "", "the program itself")
	flags.IntVar(&f.cpus, "cpus", sandbox.DefaultCPUs, "virtual CPUs")
	flags.Var(&f.memory, "memory", "memory in MiB, or as in 2g")
	flags.StringArrayVarP(&f.env, "env", "e", nil, "KEY=value for the sandbox, or KEY to pass yours on (repeatable)")
	flags.Var(&f.timeout, "timeout", "time the program may run, as in 30s (default: no limit)")
	flags.BoolVar(&f.keep, "keep", false, "keep the sandbox running for exec, ls and stop")
	flags.StringVar(&f.name, "name", "", "a name for a kept sandbox")
	flags.Var(&f.idle, "idle-timeout", "end a kept sandbox after so long without use")
	flags.BoolVar(&f.json, "json", false, "print the reply of sandbox-libkrun::run instead of the output")
	f.network.register(flags)
	f.program.register(cmd)
	completeNothing(cmd)
	_ = cmd.RegisterFlagCompletionFunc("image", a.completeImages)
	return cmd
}

func (p *programFlags) register(cmd *cobra.Command) {
	cmd.Flags().BoolVarP(&p.interactive, "interactive", "i", false, "pass standard input on even when it is a terminal")
	cmd.Flags().BoolVarP(&p.tty, "tty", "t", false, "give the program a terminal")
	cmd.Flags().SetInterspersed(false)
}

func (a *App) run(ctx context.Context, f *runFlags, args []string, dash int) error {
	if f.image == "" {
		return usagef("--image is missing: name one, as in adapter run --image python -c 'print(6*7)'")
	}
	if f.json && f.program.tty {
		return usagef("--json and --tty exclude each other")
	}
	if f.cpus < 1 {
		return usagef("--cpus is %d, must be at least 1", f.cpus)
	}
	if f.name != "" && !f.keep {
		return usagef("--name is for kept sandboxes: add --keep")
	}
	if err := f.program.check(a); err != nil {
		return err
	}
	env, err := environment(f.env, a.Getenv)
	if err != nil {
		return err
	}
	request := sandbox.BootRequest{
		CPUs: f.cpus, MemoryMiB: int(f.memory), Name: f.name, Env: env, Keep: f.keep, IdleTimeout: time.Duration(f.idle),
	}
	if err := f.network.apply(&request); err != nil {
		return err
	}
	sys, err := a.system()
	if err != nil {
		return a.runFailed(f, "", err)
	}
	image, err := catalog.ResolveDirect(f.image, func(name string) bool { return a.hasLayout(sys.roots, name) })
	if err != nil {
		return a.runFailed(f, "", err)
	}
	program, fromStdin, err := a.program(f, args, dash)
	if usage := (usageError{}); errors.As(err, &usage) {
		return err
	}
	if err != nil {
		return a.runFailed(f, "", err)
	}
	ctx, caught := catchInterrupts(ctx)
	defer caught.Close()
	progress := newProgress(a.Stderr, a.Terminal(a.Stderr))
	request.Image, request.Progress = image, progress.Update
	box, err := sys.manager.Create(ctx, request)
	progress.Close()
	if err != nil {
		return a.runFailed(f, "", interruptedOr(ctx, err))
	}
	run := &running{app: a, flags: f, box: box, caught: caught, stdin: a.stdin(&f.program, fromStdin)}
	return run.finish(ctx, program)
}

// program finds the code to run: -c, a file, standard input, or nothing where a
// command of the image was given after "--". fromStdin tells that standard input
// is used up.
func (a *App) program(f *runFlags, args []string, dash int) (p sandbox.Program, fromStdin bool, err error) {
	if dash >= 0 {
		f.command, args = args[dash:], args[:dash]
		switch {
		case f.hasCode || len(args) > 0:
			return p, false, usagef("code and a command after -- exclude each other")
		case len(f.command) == 0:
			return p, false, usagef("there is no command after --")
		}
		return p, false, nil
	}
	file := ""
	switch {
	case f.hasCode:
		p.Code, p.Args = []byte(f.code), args
	case len(args) == 0 || args[0] == "-":
		if len(args) == 0 && a.Terminal(a.Stdin) {
			return p, false, usagef("there is no program: give -c CODE, a FILE, - for standard input, or -- COMMAND")
		}
		fromStdin = true
		p.Code, err = readCode(a.Stdin, "standard input")
		if len(args) > 0 {
			p.Args = args[1:]
		}
	default:
		file, p.Args = args[0], args[1:]
		p.Code, err = readCodeFile(file)
	}
	if err != nil {
		return p, fromStdin, err
	}
	p.Lang = f.lang
	if p.Lang == "" {
		p.Lang = sandbox.GuessLang(file, f.image)
	}
	if p.Lang == "" {
		return p, fromStdin, usagef("the program's language is not clear: add --lang python, node, shell or an interpreter of the image")
	}
	return p, fromStdin, nil
}

func readCodeFile(path string) ([]byte, error) {
	file, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("%w: give code with -c, a command of the image after --", err)
	}
	if err != nil {
		return nil, err
	}
	code, err := readCode(file, path)
	return code, errors.Join(err, file.Close())
}

func readCode(r io.Reader, name string) ([]byte, error) {
	code, err := io.ReadAll(io.LimitReader(r, maxCode+1))
	if err != nil {
		return nil, fmt.Errorf("read the program from %s: %w", name, err)
	}
	if len(code) > maxCode {
		return nil, fmt.Errorf("the program in %s has more than %d MiB: put big data into files of the sandbox instead", name, maxCode>>20)
	}
	return code, nil
}

// running is a run whose sandbox is up.
type running struct {
	app    *App
	flags  *runFlags
	box    *sandbox.Sandbox
	caught *interrupts
	stdin  io.Reader
}

func (r *running) finish(ctx context.Context, program sandbox.Program) (err error) {
	defer func() {
		if r.flags.keep {
			err = errors.Join(err, r.box.Close())
		} else if stopErr := r.box.Stop(ctx); stopErr != nil && err == nil {
			err = &exitError{ExitNoProgram, stopErr}
		}
	}()
	if r.flags.keep {
		if err := r.box.Keep(); err != nil {
			return r.app.runFailed(r.flags, r.box.ID, errors.Join(err, r.box.Stop(ctx)))
		}
		if !r.flags.json {
			r.app.say("sandbox %s is kept: adapter exec %s -- COMMAND, adapter stop %s", r.box.ID, r.box.ID[:8], r.box.ID[:8])
		}
	}
	if err := r.tellPublished(ctx); err != nil {
		return r.app.runFailed(r.flags, r.box.ID, err)
	}
	if r.flags.json {
		return r.captured(ctx, program)
	}
	result, err := r.start(ctx, program, r.app.Stdout, r.app.Stderr)
	return programEnd(ctx, result, err)
}

// tellPublished says where published ports are found.
func (r *running) tellPublished(ctx context.Context) error {
	if len(r.flags.network.publish) == 0 {
		return nil
	}
	published, err := r.box.Published(ctx)
	for _, p := range published {
		r.app.say("127.0.0.1:%d leads to port %d of the sandbox", p.Host, p.Guest)
	}
	return err
}

func (r *running) start(ctx context.Context, program sandbox.Program, stdout, stderr io.Writer) (guest.Result, error) {
	cmd := guest.Command{Argv: r.flags.command, Timeout: time.Duration(r.flags.timeout)}
	streams := guest.IO{Stdin: r.stdin, Stdout: stdout, Stderr: stderr, Signals: r.caught.forwardTo()}
	return r.app.withTerminal(&r.flags.program, &cmd, &streams, func() (guest.Result, error) {
		if r.flags.command != nil {
			result, err := r.box.Exec(ctx, cmd, streams)
			if err != nil {
				err = &sandbox.StepError{Step: "exec", Err: err}
			}
			return result, err
		}
		return r.box.Run(ctx, program, cmd, streams)
	})
}

// runReply is the reply of sandbox-libkrun::run.
type runReply struct {
	Stdout          string  `json:"stdout"`
	Stderr          string  `json:"stderr"`
	ExitCode        int     `json:"exit_code"`
	TimedOut        bool    `json:"timed_out"`
	DurationMs      int64   `json:"duration_ms"`
	Success         bool    `json:"success"`
	StdoutTruncated bool    `json:"stdout_truncated"`
	StderrTruncated bool    `json:"stderr_truncated"`
	SandboxID       *string `json:"sandbox_id,omitempty"`
}

func (r *running) captured(ctx context.Context, program sandbox.Program) error {
	var stdout, stderr sandbox.Capture
	result, err := r.start(ctx, program, &stdout, &stderr)
	if err != nil {
		return r.app.runFailed(r.flags, r.box.ID, interruptedOr(ctx, err))
	}
	reply := runReply{
		Stdout: stdout.Text(), Stderr: stderr.Text(), ExitCode: result.ExitCode,
		DurationMs: result.Duration.Milliseconds(), Success: result.ExitCode == 0,
		StdoutTruncated: stdout.Truncated(), StderrTruncated: stderr.Truncated(),
	}
	if r.flags.keep {
		reply.SandboxID = &r.box.ID
	}
	if err := r.app.printJSON(reply); err != nil {
		return &exitError{ExitNoProgram, err}
	}
	return programEnd(ctx, result, nil)
}

// runFailed is the end of a run whose sandbox or program did not come about;
// with --json the error's envelope goes to standard output. id is the sandbox's,
// empty where there is none.
func (a *App) runFailed(f *runFlags, id string, err error) error {
	end := programEnd(context.Background(), guest.Result{}, err)
	if !f.json {
		return end
	}
	step := "create"
	if failed := (*sandbox.StepError)(nil); errors.As(err, &failed) {
		step = failed.Step
	}
	if printErr := a.printJSON(fault.DuringRun(step, id, err)); printErr != nil {
		return errors.Join(end, printErr)
	}
	code := ExitNoProgram
	if exit := (*exitError)(nil); errors.As(end, &exit) {
		code = exit.code
	}
	return &exitError{code: code}
}

// programEnd turns how a program ended into this process's end.
func programEnd(ctx context.Context, result guest.Result, err error) error {
	err = interruptedOr(ctx, err)
	if cause := (interrupted{}); errors.As(err, &cause) {
		return &exitError{cause.exitCode(), err}
	}
	switch {
	case errors.Is(err, syscall.EPIPE):
		// Whoever read our output is gone; a shell shows this as SIGPIPE.
		return &exitError{code: 128 + int(syscall.SIGPIPE)}
	case errors.Is(err, fault.S200):
		return &exitError{ExitTimedOut, err}
	case err != nil:
		return &exitError{ExitNoProgram, err}
	case result.ExitCode != 0:
		return &exitError{code: result.ExitCode}
	}
	return nil
}

// interruptedOr returns the signal that ended ctx in place of the errors that
// this led to.
func interruptedOr(ctx context.Context, err error) error {
	if cause := (interrupted{}); err != nil && errors.As(context.Cause(ctx), &cause) {
		return cause
	}
	return err
}
