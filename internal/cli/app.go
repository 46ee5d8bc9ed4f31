// Package cli is the command line of the adapter: flags in, output and exit code
// out. What the commands do lives in the packages it calls.
package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/imagestore"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/sandbox"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
)

// Exit codes of the commands that do not end with a program's own.
const (
	ExitOK = 0
	// ExitFault: the command could not do its work.
	ExitFault = 1
	// ExitUsage: the command line is wrong.
	ExitUsage = 2
	// ExitConfig: serve cannot use its configuration (contract's README).
	ExitConfig = 2
	// ExitTimedOut: run or exec ended the program at its time limit, as
	// timeout(1) does.
	ExitTimedOut = 124
	// ExitNoProgram: run or exec failed before or around the program, as docker
	// run does.
	ExitNoProgram = 125
)

// App is what the command line stands on. All fields are required.
type App struct {
	Version string
	Stdin   *os.File
	Stdout  io.Writer
	Stderr  io.Writer
	// Terminal tells whether a stream is a terminal.
	Terminal func(stream any) bool
	Getenv   func(string) string
	// NewDriver makes what boots VMs; vmm is "auto", "qemu" or "libkrun".
	NewDriver func(vmm string, roots layout.Roots, log *slog.Logger) (vm.Driver, error)

	vmm     string
	verbose bool
}

// exitError carries an exit code up to Execute; err may be nil: nothing is
// printed then.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit %d", e.code)
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

// usageError marks what the user typed wrong.
type usageError struct{ error }

func usagef(format string, args ...any) error {
	return usageError{fmt.Errorf(format, args...)}
}

// Execute runs one command line (without the program's name) and returns the
// exit code. Signals end ctx; run and exec hand the first one to their program.
func (a *App) Execute(ctx context.Context, args []string) int {
	root := a.command()
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return ExitOK
	}
	code := ExitFault
	if usage := (usageError{}); errors.As(err, &usage) {
		code = ExitUsage
	}
	if exit := (*exitError)(nil); errors.As(err, &exit) {
		code = exit.code
		err = exit.err
	}
	if err != nil {
		a.printError(err)
	}
	return code
}

func (a *App) printError(err error) {
	a.say("adapter: %v", err)
	// The notes speak of the functions' fields; here the flags say the same.
	if f := (*fault.Error)(nil); errors.As(err, &f) && f.FixNote != "" && f.Code == fault.S100 {
		a.say("  or a source: oci:DIR[:TAG], docker-archive:FILE, or a registry reference with its host")
	}
}

// say writes one line for the user on standard error. There is nowhere to report
// that standard error is gone.
func (a *App) say(format string, args ...any) {
	_, _ = fmt.Fprintf(a.Stderr, format+"\n", args...)
}

func (a *App) printJSON(v any) error {
	enc := json.NewEncoder(a.Stdout)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

func (a *App) command() *cobra.Command {
	root := &cobra.Command{
		Use:   "adapter",
		Short: "Run untrusted code in microVMs",
		Long: `adapter boots microVMs from container images and runs programs in them.

  adapter run --image python -c 'print(6*7)'

Without a command it does what serve does: it serves the sandbox functions on an iii
engine.

Exit codes: run and exec end with the program's own code (128 + the signal that
ended it, 127 not found, 126 not allowed), 124 when its time ran out, 125 when the
sandbox itself failed; every other command with 0 or 1 (failed). Wrong usage ends any
of them with 2.`,
		Version:       a.Version,
		SilenceUsage:  true,
		SilenceErrors: true,
		// As the engine's Compose starts its workers.
		RunE: func(cmd *cobra.Command, _ []string) error { return a.serve(cmd.Context()) },
		Args: noSuchCommand,
	}
	root.SetOut(a.Stdout)
	root.SetErr(a.Stderr)
	root.SetVersionTemplate("{{.Version}}\n")
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usagef("%w: see %s --help", err, cmd.CommandPath())
	})
	flags := root.PersistentFlags()
	a.vmm = a.Getenv("III_SANDBOX_VMM")
	flags.Var((*vmmFlag)(&a.vmm), "vmm", "what runs the VMs: auto, libkrun or qemu (default auto; III_SANDBOX_VMM)")
	flags.Lookup("vmm").DefValue = "" // the text names it
	flags.BoolVarP(&a.verbose, "verbose", "v", false, "log what happens to standard error")
	root.AddCommand(a.serveCommand(), a.runCommand(), a.execCommand(), a.lsCommand(), a.stopCommand(),
		a.imageCommand(), a.vmmCommand(), a.doctorCommand())
	root.InitDefaultVersionFlag()
	root.Flags().Lookup("version").Usage = "print the version"
	root.InitDefaultCompletionCmd()
	for _, cmd := range root.Commands() {
		if cmd.Name() == "completion" {
			cmd.Args, cmd.RunE = noSuchCommand, func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
		}
	}
	return root
}

// noSuchCommand refuses what follows a command that has others below it, and says
// which one it may have been.
func noSuchCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	hint := ""
	cmd.SuggestionsMinimumDistance = 2
	if names := cmd.SuggestionsFor(args[0]); len(names) > 0 {
		hint = "; did you mean " + strings.Join(names, " or ") + "?"
	}
	return usagef("unknown command %q: see %s --help%s", args[0], cmd.CommandPath(), hint)
}

func (a *App) logger() *slog.Logger {
	level := slog.LevelWarn
	if a.verbose {
		level = slog.LevelDebug
	}
	return slog.New(slog.NewTextHandler(a.Stderr, &slog.HandlerOptions{Level: level}))
}

func (a *App) roots() (layout.Roots, error) { return layout.FromEnvironment(a.Getenv) }

// imageLayouts is where OCI layouts named like images lie.
func (a *App) imageLayouts(roots layout.Roots) string {
	if dir := a.Getenv("III_SANDBOX_IMAGE_DIR"); dir != "" {
		return dir
	}
	return roots.ImageLayouts()
}

// hasLayout reports whether an image of this name lies in the layouts' folder.
func (a *App) hasLayout(roots layout.Roots, name string) bool {
	if name == "" || name != filepath.Base(name) || name == "." || name == ".." {
		return false
	}
	_, err := os.Stat(filepath.Join(a.imageLayouts(roots), name, "index.json"))
	return err == nil
}

func (a *App) images(roots layout.Roots) (*imagestore.Store, error) {
	// The kernels lie there too.
	if err := layout.MakePrivate(roots.Cache); err != nil {
		return nil, fmt.Errorf("image store: %w", err)
	}
	return imagestore.Open(roots.Images(), imagestore.Options{
		Log: a.logger(), LayoutDir: a.imageLayouts(roots),
		InsecureRegistries: strings.FieldsFunc(a.Getenv("III_INSECURE_REGISTRIES"), func(r rune) bool { return r == ',' || r == ' ' }),
	})
}

// system is what the sandbox commands work with.
type system struct {
	roots   layout.Roots
	manager *sandbox.Keeper
}

func (a *App) system() (*system, error) {
	roots, err := a.roots()
	if err != nil {
		return nil, err
	}
	ports, err := hostPorts(a.Getenv)
	if err != nil {
		return nil, err
	}
	launcher, images, err := a.machinery(roots, a.logger())
	if err != nil {
		return nil, err
	}
	return &system{roots: roots, manager: sandbox.NewKeeper(launcher, images, ports)}, nil
}

// machinery is what sandboxes are made with.
func (a *App) machinery(roots layout.Roots, log *slog.Logger) (*vm.Launcher, *imagestore.Store, error) {
	driver, err := a.NewDriver(a.vmm, roots, log)
	if err != nil {
		return nil, nil, err
	}
	images, err := a.images(roots)
	if err != nil {
		return nil, nil, err
	}
	return vm.New(vm.Config{Driver: driver, Roots: roots, Log: log, Version: a.Version}), images, nil
}
