package cli

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/spf13/cobra"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/adapter"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/config"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/contract"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/sandbox"
)

func (a *App) serveCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "serve",
		Short: "Serve the sandbox functions on an iii engine",
		Long: `serve connects to the iii engine, registers the functions sandbox-libkrun::* and serves
them until SIGTERM, SIGINT or SIGHUP; its sandboxes end with it. It is also what adapter
does without a command.

The engine is the one at III_URL (ws://127.0.0.1:49134), with III_TOKEN as credentials
where it wants some; the configuration entry is the one that III_CONFIG_NAME names
(sandbox-libkrun). III_WORKER_NAME, III_NAMESPACE and III_ISOLATION say which worker to
be. It ends with 0 after a signal, with 2 when the configuration cannot be used, and
with 1 when the engine refuses the worker.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.serve(cmd.Context()) },
	}
}

func (a *App) serve(ctx context.Context) error {
	ctx, caught := catchInterrupts(ctx)
	defer caught.Close()
	log := a.serveLogger()
	options := iii.FromEnv(a.Getenv, contract.Adapter)
	options.Log = log
	log.Info("serving the sandbox functions (adapter --help lists other commands)", "worker", options.Name, "version", a.Version)
	err := adapter.Serve(ctx, adapter.Config{
		Engine: options, ConfigName: adapter.EntryName(a.Getenv), Version: a.Version, Log: log,
		Extensions: a.Getenv("III_SANDBOX_EXTENSIONS") == "1",
		Start: func(cfg *config.Config) (adapter.Core, error) {
			manager, err := a.manager(cfg, log)
			if err != nil {
				return nil, err
			}
			return manager, nil
		},
	})
	if bad := (*adapter.ConfigError)(nil); errors.As(err, &bad) {
		return &exitError{ExitConfig, err}
	}
	return err
}

// manager makes the core.
func (a *App) manager(cfg *config.Config, log *slog.Logger) (*sandbox.Manager, error) {
	roots, err := a.roots()
	if err != nil {
		return nil, err
	}
	ports, err := hostPorts(a.Getenv)
	if err != nil {
		return nil, fmt.Errorf("start: %w", err)
	}
	launcher, images, err := a.machinery(roots, log)
	if err != nil {
		return nil, fmt.Errorf("start: %w", err)
	}
	return sandbox.Start(sandbox.Config{
		Launcher: launcher, Images: images, Catalog: cfg.Catalog, Log: log,
		AutoInstall: cfg.AutoInstall, MaxSandboxes: cfg.MaxSandboxes, MaxExecs: cfg.MaxExecs,
		MaxExecTimeoutMs: cfg.MaxExecTimeoutMs, DefaultIdleTimeoutSecs: cfg.DefaultIdleTimeoutSecs,
		DefaultCPUs: cfg.DefaultCPUs, DefaultMemoryMiB: cfg.DefaultMemoryMiB,
		HostPorts: ports,
	}), nil
}

// serveLogger writes one line for each call.
func (a *App) serveLogger() *slog.Logger {
	level := slog.LevelInfo
	if a.verbose {
		level = slog.LevelDebug
	}
	return slog.New(slog.NewTextHandler(a.Stderr, &slog.HandlerOptions{Level: level}))
}
