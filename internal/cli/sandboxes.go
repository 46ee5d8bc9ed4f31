package cli

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/guest"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/sandbox"
)

type execFlags struct {
	env     []string
	workdir string
	timeout durationFlag
	program programFlags
}

func (a *App) execCommand() *cobra.Command {
	f := &execFlags{}
	cmd := &cobra.Command{
		Use:   "exec [flags] SANDBOX [--] COMMAND [ARG...]",
		Short: "Run a command in a kept sandbox",
		Long: `exec runs a command in a sandbox that run --keep left behind, named by its id, the
beginning of its id, or its name. It ends with the command's exit code.`,
		Example: `  adapter exec 3f2a ls -l /tmp
  adapter exec -it 3f2a sh`,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.exec(cmd.Context(), f, args)
		},
		ValidArgsFunction: a.completeSandboxes,
	}
	flags := cmd.Flags()
	flags.StringArrayVarP(&f.env, "env", "e", nil, "KEY=value for the command, or KEY to pass yours on (repeatable)")
	flags.StringVarP(&f.workdir, "workdir", "w", "", "directory to run in (default /)")
	flags.Var(&f.timeout, "timeout", "time the command may run, as in 30s (default: no limit)")
	f.program.register(cmd)
	return cmd
}

func (a *App) exec(ctx context.Context, f *execFlags, args []string) (err error) {
	if len(args) < 2 {
		return usagef("name a sandbox and a command, as in adapter exec 3f2a ls -l /")
	}
	if err := f.program.check(a); err != nil {
		return err
	}
	env, err := environment(f.env, a.Getenv)
	if err != nil {
		return err
	}
	command := args[1:]
	if command[0] == "--" {
		command = command[1:]
	}
	if len(command) == 0 {
		return usagef("there is no command after --")
	}
	ctx, caught := catchInterrupts(ctx)
	defer caught.Close()
	box, err := a.open(ctx, args[0])
	if err != nil {
		return programEnd(ctx, guest.Result{}, err)
	}
	defer func() { err = errors.Join(err, box.Close()) }()
	cmd := guest.Command{Argv: command, Env: env, Workdir: f.workdir, Timeout: time.Duration(f.timeout)}
	streams := guest.IO{
		Stdin: a.stdin(&f.program, false), Stdout: a.Stdout, Stderr: a.Stderr, Signals: caught.forwardTo(),
	}
	result, err := a.withTerminal(&f.program, &cmd, &streams, func() (guest.Result, error) {
		return box.Exec(ctx, cmd, streams)
	})
	return programEnd(ctx, result, err)
}

func (a *App) open(ctx context.Context, key string) (*sandbox.Sandbox, error) {
	sys, err := a.system()
	if err != nil {
		return nil, err
	}
	return sys.manager.Open(ctx, key)
}

func (a *App) lsCommand() *cobra.Command {
	var asJSON, quiet bool
	cmd := &cobra.Command{
		Use:   "ls",
		Short: "List the kept sandboxes",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			sys, err := a.system()
			if err != nil {
				return err
			}
			kept, err := sys.manager.List(cmd.Context())
			if err != nil {
				return err
			}
			switch {
			case asJSON:
				if kept == nil {
					kept = []sandbox.Info{}
				}
				return a.printJSON(kept)
			case quiet:
				for _, k := range kept {
					if _, err := fmt.Fprintln(a.Stdout, k.ID); err != nil {
						return err
					}
				}
				return nil
			}
			return a.printSandboxes(kept)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.Flags().BoolVarP(&quiet, "quiet", "q", false, "print the ids alone")
	return cmd
}

func (a *App) printSandboxes(kept []sandbox.Info) error {
	table := tabwriter.NewWriter(a.Stdout, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(table, "ID\tNAME\tIMAGE\tCPUS\tMEMORY\tAGE\tIDLE TIMEOUT")
	for _, k := range kept {
		_, _ = fmt.Fprintf(table, "%s\t%s\t%s\t%d\t%d MiB\t%s\t%s\n", k.ID, dash(k.Name), k.Image, k.CPUs, k.MemoryMiB,
			time.Since(k.Created).Round(time.Second), k.IdleTimeout)
	}
	return table.Flush()
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func (a *App) stopCommand() *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:   "stop (SANDBOX... | --all)",
		Short: "Stop kept sandboxes; nothing of them is left",
		RunE: func(cmd *cobra.Command, args []string) error {
			if all == (len(args) > 0) {
				return usagef("name the sandboxes to stop, or give --all")
			}
			return a.stop(cmd.Context(), args, all)
		},
		ValidArgsFunction: a.completeSandboxes,
	}
	cmd.Flags().BoolVar(&all, "all", false, "stop every kept sandbox")
	return cmd
}

func (a *App) stop(ctx context.Context, keys []string, all bool) error {
	sys, err := a.system()
	if err != nil {
		return err
	}
	if all {
		kept, err := sys.manager.List(ctx)
		if err != nil {
			return err
		}
		for _, k := range kept {
			keys = append(keys, k.ID)
		}
	}
	errs := make([]error, len(keys))
	var stops sync.WaitGroup
	for i, key := range keys {
		stops.Go(func() {
			if err := sys.manager.Stop(ctx, key); err != nil {
				errs[i] = fmt.Errorf("stop %s: %w", key, err)
			}
		})
	}
	stops.Wait()
	for i, key := range keys {
		if errs[i] == nil {
			if _, err := fmt.Fprintln(a.Stdout, key); err != nil {
				return err
			}
		}
	}
	return errors.Join(errs...)
}

func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usagef("%s takes no arguments, got %q", cmd.CommandPath(), args[0])
	}
	return nil
}
