package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/guest"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/shimdriver"
)

// timedLibrary is the directory of the libkrun that tells when it is called.
const timedLibrary = "/opt/timed"

// launches are those of our VMs, one at a time.
type launches struct {
	roots        layout.Roots
	plain, tells *vm.Launcher

	mu      sync.Mutex
	spawned time.Time // when the shim was started last
}

// spawnClock is a driver that notes when it starts a shim.
type spawnClock struct {
	vm.Driver
	l *launches
}

func (s spawnClock) Start(ctx context.Context, spec *bootspec.Spec, lock *os.File) (vm.Process, error) {
	s.l.mu.Lock()
	s.l.spawned = time.Now()
	s.l.mu.Unlock()
	return s.Driver.Start(ctx, spec, lock)
}

func newLaunches(roots layout.Roots, getenv func(string) string) (*launches, error) {
	l := &launches{roots: roots}
	log := slog.New(slog.DiscardHandler)
	timed := func(key string) string {
		if key == "III_LIBKRUN_PATH" {
			return timedLibrary
		}
		return getenv(key)
	}
	for launcher, env := range map[**vm.Launcher]func(string) string{&l.plain: getenv, &l.tells: timed} {
		driver, err := shimdriver.New(shimdriver.Config{VMM: bootspec.Libkrun, Roots: roots, Log: log, Getenv: env})
		if err != nil {
			return nil, err
		}
		*launcher = vm.New(vm.Config{Driver: spawnClock{driver, l}, Roots: roots, Log: log})
	}
	return l, nil
}

// boot is the time from the request for a VM to the end of its first program.
func (l *launches) boot(ctx context.Context, req vm.Request) (took time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, once)
	defer cancel()
	begin := time.Now()
	m, err := l.plain.Launch(ctx, req)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, m.Kill()) }()
	if err := first(ctx, m); err != nil {
		return 0, err
	}
	return time.Since(begin), nil
}

// first runs the program that the others run too.
func first(ctx context.Context, m *vm.Machine) error {
	var said strings.Builder
	result, err := m.Guest().Exec(ctx, guest.Command{Argv: []string{"/bin/sh", "-c", "echo ready"}}, guest.IO{Stdout: &said})
	if err == nil && said.String() != "ready\n" {
		err = fmt.Errorf("the first program: %+v, %q", result, said.String())
	}
	return err
}

// parts is where the time of one boot goes: until each point, from the one before,
// but for enter, which counts from the spawn of the shim.
type parts struct {
	prepare, shim, child, context, configure, build, kernel, agent, hello, exec time.Duration

	enter time.Duration
}

// timed boots with the libkrun that tells when it is called.
func (l *launches) timed(ctx context.Context, req vm.Request) (p parts, err error) {
	ctx, cancel := context.WithTimeout(ctx, once)
	defer cancel()
	begin := time.Now()
	m, err := l.tells.Launch(ctx, req)
	if err != nil {
		return p, err
	}
	defer func() { err = errors.Join(err, m.Kill()) }()
	launched := time.Now()
	if err := first(ctx, m); err != nil {
		return p, err
	}
	end := time.Now()
	status, err := m.Status(ctx)
	if err != nil {
		return p, err
	}
	told, err := toldTimes(l.roots.Machine(m.ID()).ShimLog())
	if err != nil {
		return p, err
	}
	spawned := l.lastSpawn()
	main := status.Running.Add(-m.Info().AgentTime)
	kernel := main.Add(-m.Info().KernelTime)
	return parts{
		prepare: spawned.Sub(begin), shim: status.Started.Sub(spawned), child: told["loaded"].Sub(status.Started),
		context: told["context"].Sub(told["loaded"]), configure: told["enter"].Sub(told["context"]),
		build: kernel.Sub(told["enter"]), kernel: m.Info().KernelTime, agent: m.Info().AgentTime,
		hello: launched.Sub(status.Running), exec: end.Sub(launched), enter: told["enter"].Sub(spawned),
	}, nil
}

func (l *launches) lastSpawn() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.spawned
}

// toldTimes reads what the library printed.
func toldTimes(path string) (map[string]time.Time, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	told := map[string]time.Time{}
	for lines := bufio.NewScanner(file); lines.Scan(); {
		_, line, found := strings.Cut(lines.Text(), "krun-time ")
		var what string
		var at int64
		if _, err := fmt.Sscanf(line, "%s %d", &what, &at); found && err == nil {
			told[what] = time.Unix(0, at)
		}
	}
	for _, what := range []string{"loaded", "context", "enter"} {
		if told[what].IsZero() {
			return nil, fmt.Errorf("%s does not say when libkrun was at %q", path, what)
		}
	}
	return told, nil
}
