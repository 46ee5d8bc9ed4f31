// Package adapter serves the sandbox functions on an iii engine: it registers them,
// reads the configuration, decodes calls, hands them to the core, and encodes
// replies and errors. What the functions do lives in package sandbox.
//
// The functions are registered before anything else is looked at, so that a slow
// host or a slow configuration never keeps the engine from seeing the worker;
// calls that come too early wait. No payload is traced or logged, whatever
// III_DISABLE_TRACE_PAYLOADS says.
package adapter

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/config"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/contract"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/sandbox"
)

const (
	// earlyCall is how long a call may wait for the configuration.
	earlyCall = 15 * time.Second
	// shutdownGrace is how long sandboxes, and the calls under way in them, may take
	// to end in order when the adapter stops. What may follow, 3 s until killed
	// sandboxes are gone and 3 s of the client's, still fits into the 10 s that
	// Compose gives.
	shutdownGrace = 3 * time.Second
	// answerGrace is between the last answers and the end of the connection: the
	// engine handles each message in a task of its own, and drops an answer that
	// the end of its worker overtakes.
	answerGrace = 50 * time.Millisecond
)

// Core is what serves the functions once the configuration is known; a
// *sandbox.Manager is one.
type Core interface {
	sandbox.Functions
	// Close ends all sandboxes, see sandbox.Manager.Close.
	Close(ctx context.Context) error
}

// Config is what Serve works with; all fields but Extensions and MaxDownloads are
// required.
type Config struct {
	// Engine says which worker to be, see iii.FromEnv. Serve adds the functions.
	Engine iii.Options
	// ConfigName is the configuration entry to read.
	ConfigName string
	// Version is that of the build.
	Version string
	// Extensions puts this adapter's extensions of the contract into the registered
	// schemas, and lets callers publish ports of the host.
	Extensions bool
	// Start makes the core for a configuration. It is called once.
	Start func(*config.Config) (Core, error)
	// MaxDownloads bounds the files of fs::read that are on their way; 0 is 128. One
	// that nobody reads counts for some minutes, unless it fits into its channel
	// (4 MiB).
	MaxDownloads int
	// Log gets one line for each call, without anything of its payload but the id
	// of the sandbox.
	Log *slog.Logger
}

// EntryName is the configuration entry that the environment names in
// III_CONFIG_NAME, or the adapter's own.
func EntryName(getenv func(string) string) string {
	if name := getenv("III_CONFIG_NAME"); name != "" {
		return name
	}
	return contract.Adapter
}

// server is one run of Serve.
type server struct {
	cfg    Config
	client *iii.Client
	// transfers are the downloads under way; they end with life.
	transfers sync.WaitGroup
	life      context.Context //nolint:containedctx // the lifetime of the server itself
	// downloads holds one for each of them, at most Config.MaxDownloads.
	downloads chan struct{}

	// started is closed once core or failure is set.
	started chan struct{}
	core    Core
	failure error
}

// Serve runs the adapter until ctx ends, which is no error. It fails with a
// *ConfigError when the configuration cannot be used, with an *iii.RejectedError
// when the engine refuses the worker, and with whatever Config.Start returned. All
// sandboxes have ended when it returns; it takes less than 10 s for that.
func Serve(ctx context.Context, cfg Config) (err error) {
	life, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	if cfg.MaxDownloads <= 0 {
		cfg.MaxDownloads = defaultMaxDownloads
	}
	s := &server{cfg: cfg, life: life, started: make(chan struct{}), downloads: make(chan struct{}, cfg.MaxDownloads)}
	options := cfg.Engine
	options.Functions = s.functions()
	options.Description = "Runs untrusted code in microVMs."
	options.Version = cfg.Version
	options.Fault = clientFault
	if s.client, err = iii.Open(options); err != nil {
		return err
	}
	err = s.run(ctx)
	return errors.Join(err, s.shutdown(ctx, end))
}

// run returns when the adapter is to stop, with nil where ctx is the reason.
func (s *server) run(ctx context.Context) error {
	starting, cancel := context.WithCancel(ctx)
	failed := make(chan error, 1)
	go s.start(starting, failed)
	defer func() {
		cancel()
		<-s.started
	}()
	select {
	case err := <-failed:
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, iii.ErrClosed):
			<-s.client.Done()
			return s.client.Err()
		}
		return err
	case <-s.client.Done():
		return s.client.Err()
	case <-ctx.Done():
		s.cfg.Log.Info("stopping", "reason", context.Cause(ctx))
		return nil
	}
}

// start reads the configuration and makes the core.
func (s *server) start(ctx context.Context, failed chan<- error) {
	defer close(s.started)
	cfg, err := readConfig(ctx, s.client, s.cfg.ConfigName, s.cfg.Log)
	if err == nil {
		s.core, err = s.cfg.Start(cfg)
	}
	if err != nil {
		s.failure = err
		failed <- err
	}
}

// ready waits for the core, for as long as a call may.
func (s *server) ready(ctx context.Context) (Core, error) {
	timer := time.NewTimer(earlyCall)
	defer timer.Stop()
	select {
	case <-s.started:
		if s.failure != nil {
			return nil, fault.NotReady(errors.New("its configuration or its host is at fault, see its log"))
		}
		return s.core, nil
	case <-ctx.Done():
		return nil, fault.ShuttingDown()
	case <-timer.C:
		return nil, fault.NotReady(fmt.Errorf("its configuration was not read within %v", earlyCall))
	}
}

// shutdown ends the sandboxes, with them the calls under way, which are answered,
// and then the connection.
func (s *server) shutdown(ctx context.Context, end context.CancelFunc) error {
	closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownGrace)
	defer cancel()
	var err error
	if s.core != nil { // run has waited for the start
		err = s.core.Close(closing)
	}
	end()
	<-time.After(answerGrace)
	err = errors.Join(err, s.client.Close(closing))
	s.transfers.Wait() // no call is left that could begin one
	return err
}
