package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/cleanup"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii/iiitest"
)

const (
	// callTimeout bounds every call: with a VM's boot, or 200 MiB, in it.
	callTimeout = 5 * time.Minute
	// registerTimeout bounds a worker's way to its functions.
	registerTimeout = time.Minute
	// endTimeout is how long a program may take to end when it is asked to.
	endTimeout = 15 * time.Second
	// prefix is that of the adapter's functions.
	prefix = "sandbox-libkrun::"
)

// served is the adapter as a process, serving on an engine in this one, and a
// caller of its functions.
type served struct {
	engine  *iiitest.Engine
	client  *iii.Client
	adapter *child
}

// serve starts an engine with the entry as its configuration, the adapter with
// env besides the environment, and a caller. The steps that undo it are added to
// undo. Sandboxes are kept below dir.
func serve(ctx context.Context, undo *cleanup.Stack, bin, dir, entry string, env ...string) (*served, error) {
	engine, err := iiitest.Start(iiitest.Options{
		Configuration: map[string]json.RawMessage{"sandbox-libkrun": json.RawMessage(entry)},
		Log:           slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return nil, err
	}
	undo.Add(func() error { engine.Close(); return nil })
	client, err := iii.Open(iii.Options{URL: engine.URL(), Name: "bench", Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		return nil, err
	}
	undo.Add(func() error { return client.Close(context.Background()) })
	cmd := exec.Command(filepath.Join(bin, "adapter"), "serve")
	cmd.Env = append(os.Environ(), "III_URL="+engine.URL(), "III_WORKER_NAME=", "III_NAMESPACE=", "III_CONFIG_NAME=",
		"III_SANDBOX_STATE_DIR="+dir+"/state", "III_SANDBOX_RUN_DIR="+dir+"/run")
	cmd.Env = append(cmd.Env, env...)
	adapter, err := startChild(cmd)
	if err != nil {
		return nil, err
	}
	undo.Add(func() error { return adapter.end(func() { _ = cmd.Process.Signal(syscall.SIGTERM) }) })
	s := &served{engine: engine, client: client, adapter: adapter}
	return s, s.await(ctx, adapter, prefix+"adapter::info")
}

// await waits until the worker that is a child offers a function.
func (s *served) await(ctx context.Context, worker *child, function string) error {
	ctx, cancel := context.WithTimeout(ctx, registerTimeout)
	defer cancel()
	go func() {
		select {
		case <-worker.done:
			cancel()
		case <-ctx.Done():
		}
	}()
	if err := s.engine.AwaitFunction(ctx, function); err != nil {
		return fmt.Errorf("%w: %s", err, worker.tail())
	}
	return nil
}

// call calls a function of the adapter, below its prefix, and reads its result
// into reply.
func (s *served) call(ctx context.Context, function string, payload, reply any) error {
	data, err := json.Marshal(payload)
	if err != nil {
		return err
	}
	raw, err := s.client.Invoke(ctx, iii.Request{Function: prefix + function, Data: data, Timeout: callTimeout})
	if err != nil {
		return fmt.Errorf("%s: %w", function, err)
	}
	return json.Unmarshal(raw, reply)
}

// create makes a sandbox and returns its id.
func (s *served) create(ctx context.Context, o options) (string, error) {
	var made struct {
		ID string `json:"sandbox_id"`
	}
	err := s.call(ctx, "create", map[string]any{"image": o.image, "cpus": o.cpus, "memory_mb": o.memory}, &made)
	return made.ID, err
}

// configuration is an entry that allows the image.
func configuration(o options) (string, error) {
	entry := map[string]any{"image_allowlist": []string{o.image}}
	if !slices.Contains([]string{"python", "node"}, o.image) {
		entry["custom_images"] = map[string]string{o.image: "registry.invalid/" + o.image}
	}
	text, err := json.Marshal(entry)
	return string(text), err
}

// child is a program that runs beside this one, and not longer.
type child struct {
	cmd    *exec.Cmd
	output *os.File
	done   chan struct{}
	err    error // of its end, valid once done is closed
}

func startChild(cmd *exec.Cmd) (*child, error) {
	output, err := os.CreateTemp("", "iii-bench-*.log")
	if err != nil {
		return nil, err
	}
	if err := os.Remove(output.Name()); err != nil {
		return nil, errors.Join(err, output.Close())
	}
	c := &child{cmd: cmd, output: output, done: make(chan struct{})}
	cmd.Stdout, cmd.Stderr, cmd.SysProcAttr = output, output, dieWithParent()
	started := make(chan error, 1)
	go func() {
		defer close(c.done)
		runtime.LockOSThread() // see dieWithParent
		err := cmd.Start()
		started <- err
		if err == nil {
			c.err = cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		return nil, errors.Join(err, output.Close())
	}
	return c, nil
}

// end asks the program to end and waits for it.
func (c *child) end(ask func()) error {
	ask()
	timer := time.NewTimer(endTimeout)
	defer timer.Stop()
	select {
	case <-c.done:
	case <-timer.C:
		_ = c.cmd.Process.Kill()
		<-c.done
		c.err = fmt.Errorf("it did not end within %v", endTimeout)
	}
	var err error
	if c.err != nil {
		err = fmt.Errorf("%s: %w: %s", filepath.Base(c.cmd.Path), c.err, c.tail())
	}
	return errors.Join(err, c.output.Close())
}

// tail is the end of what the program has printed.
func (c *child) tail() string {
	const most = 4 << 10
	end, err := c.output.Seek(0, io.SeekEnd)
	if err != nil {
		return err.Error()
	}
	text := make([]byte, min(end, most))
	if _, err := c.output.ReadAt(text, end-int64(len(text))); err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(text))
}
