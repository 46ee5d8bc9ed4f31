package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime/debug"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/agent"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/agent/boot"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/agent/procs"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/agentlink"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/rpcbuffers"
)

// version is stamped by the build.
var version = "0.2.0-dev"

// The guest's memory is its user's: the heap, a few MiB, grows by little before
// it is collected, and above memoryLimit by less. Only during the first calmAfter
// nothing is collected below memoryLimit: a boot makes a few MiB, and on an
// emulated CPU each collection in it takes longer than what it frees is worth.
const (
	gcPercent   = 40
	memoryLimit = 32 << 20
	calmAfter   = 5 * time.Second
)

func main() {
	// The kernel passes on words of its command line; there is none for us.
	if os.Getpid() != 1 {
		fmt.Printf("guest-agent %s, protocol %d: it runs as PID 1 of a guest only\n", version, agentlink.ProtocolVersion)
		if len(os.Args) != 2 || os.Args[1] != "--version" {
			os.Exit(2)
		}
		return
	}
	rpcbuffers.Use()
	debug.SetMemoryLimit(memoryLimit)
	debug.SetGCPercent(-1)
	boot.CatchSignals()
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{ReplaceAttr: short}))
	if err := run(log); err != nil {
		boot.Fatal(os.Stderr, err)
	}
}

// short keeps the console's lines short: it is slow, and the host stamps them.
func short(_ []string, a slog.Attr) slog.Attr {
	if a.Key == slog.TimeKey || a.Key == slog.LevelKey {
		return slog.Attr{}
	}
	return a
}

// run returns only what ended the VM out of order.
func run(log *slog.Logger) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	guest, err := boot.Boot(ctx, log)
	if err != nil {
		return err
	}
	table := procs.Open(procs.All)
	if err := table.Group(boot.ControlGroups); err != nil {
		guest.Warnings = append(guest.Warnings, fmt.Sprintf("control groups: %v", err))
	}
	service := agent.New(agent.Config{
		Log:        log,
		Version:    version,
		Table:      table,
		Env:        guest.Env,
		Kernel:     guest.Kernel,
		Boot:       guest.Agent,
		Warnings:   guest.Warnings,
		SetClock:   boot.SetClock,
		OnShutdown: guest.Quiesce,
	})
	fmt.Fprintf(os.Stderr, "agent: up, kernel %d ms, agent %d ms\n", guest.Kernel.Milliseconds(), guest.Agent.Milliseconds())
	for _, warning := range guest.Warnings {
		log.Warn("boot went on without", "what", warning)
	}
	time.AfterFunc(calmAfter, func() {
		debug.SetGCPercent(gcPercent)
		guest.FreeModules()
	})
	go func() {
		<-service.Done()
		cancel()
	}()
	if err := agent.Serve(ctx, guest.Listener, service.Register, agent.NewFiles(log).Register); err != nil {
		return fmt.Errorf("link to the shim: %w", err)
	}
	select {
	case <-service.Done():
		guest.PowerOff()
	default:
	}
	return errors.New("link to the shim: it ended without a shutdown")
}
