package vmtest

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/guest"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/layout"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm"
)

// clientEnv makes a test program play a client that is killed; see PlayClient.
const clientEnv = "VMTEST_CLIENT"

// client is what such a client does.
type client struct {
	Roots layout.Roots
	ID    string
	// Deed is one of deeds.
	Deed string
}

// deeds are what a client is killed in the middle of.
func deeds() []string { return []string{"attach", "read", "write", "stuck", "calls"} }

// mark is in the command line of every program that a client to be killed has
// run in the VM.
func (c client) mark() string { return "vmtest-client-of-" + c.ID }

// PlayClient does not return in a process that the suite has started as a client
// to be killed. It is the first call of the TestMain of a package that runs the
// suite.
func PlayClient() {
	text := os.Getenv(clientEnv)
	if text == "" {
		return
	}
	var c client
	err := json.Unmarshal([]byte(text), &c)
	if err == nil {
		err = c.run()
	}
	fmt.Fprintln(os.Stderr, "client:", err)
	os.Exit(1) //nolint:forbidigo // this is main
}

// run connects, does its deed, tells when it is in the middle of it, and goes on
// for ever.
func (c client) run() error {
	ctx := context.Background()
	m, err := vm.New(vm.Config{Roots: c.Roots, Log: Discard()}).Attach(ctx, c.ID)
	if err != nil {
		return err
	}
	middle := newGate()
	close(middle.open)
	go func() {
		<-middle.arrived
		_, _ = io.WriteString(os.Stdout, "ready\n")
	}()
	program := func(script string, streams guest.IO) error {
		cmd := Shell(script)
		cmd.Argv = append(cmd.Argv, c.mark())
		_, err := m.Guest().Exec(ctx, cmd, streams)
		return err
	}
	switch c.Deed {
	case "read":
		return program("cat /dev/zero", guest.IO{Stdout: middle})
	case "write":
		return program("head -c 1000000 | wc -c; cat >/dev/null", guest.IO{Stdin: newNoise(1 << 50), Stdout: middle})
	case "stuck":
		return program("cat /dev/zero", guest.IO{Stdout: writers(func(p []byte) (int, error) {
			_, _ = middle.Write(p)
			select {}
		})})
	case "calls":
		for {
			if _, err := m.Guest().Hello(ctx, "vmtest"); err != nil {
				return err
			}
			_, _ = middle.Write(nil)
		}
	}
	_, _ = middle.Write(nil)
	select {}
}

type writers func([]byte) (int, error)

func (w writers) Write(p []byte) (int, error) { return w(p) }

// testReconnect kills clients of a kept VM again and again, in the middle of what
// they do. Other clients must not notice, the next one must find everything as it
// was, and nothing of the killed may stay.
func testReconnect(t *testing.T, e *Env) {
	l := e.Launcher(t)
	req := e.Request()
	req.Lifetime, req.IdleTimeout = vm.Detached, time.Hour
	m := e.Launch(t, l, req)
	if err := m.Release(vm.Label{}); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := m.Stop(e.Context(t), 0); err != nil {
			t.Errorf("stop: %v", err)
		}
		e.CheckEmpty(t)
	}()
	r := &running{Env: e, machine: m}
	source := r.newSource(t)
	witness := r.startTalk(t, m.Guest())
	reconnect(t, e, l, m.ID(), source)
	before := r.openFiles(t)
	for i := range e.load(t).Reconnects {
		c := client{Roots: e.Roots, ID: m.ID(), Deed: deeds()[i%len(deeds())]}
		if err := c.startAndKill(e.Context(t)); err != nil {
			t.Fatalf("client %d, killed in %s: %v", i+1, c.Deed, err)
		}
		rounds := witness.rounds.Load()
		reconnect(t, e, l, m.ID(), source)
		Eventually(t, e.Patience, "an answer to another client", func() bool { return witness.rounds.Load() > rounds })
	}
	r.checkOpenFiles(t, before)
	left := fmt.Sprintf("grep -l '[v]%s' /proc/[0-9]*/cmdline 2>/dev/null", strings.TrimPrefix(client{ID: m.ID()}.mark(), "v"))
	Eventually(t, e.Patience, "end of the killed clients' programs", func() bool { return r.exec(t, Shell(left), nil).stdout == "" })
	t.Logf("another client had %d round trips meanwhile", witness.rounds.Load())
	witness.end(t)
	source.remove(t, r)
}

// startAndKill returns when the client was killed in the middle of its deed.
func (c client) startAndKill(ctx context.Context) error {
	task, err := json.Marshal(c)
	if err != nil {
		return err
	}
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, exe)
	cmd.Env = append(os.Environ(), clientEnv+"="+string(task))
	var said strings.Builder
	cmd.Stderr = &said
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	_, err = io.ReadFull(stdout, make([]byte, len("ready\n")))
	_ = cmd.Process.Kill() // the wait tells whether it had ended before
	_ = cmd.Wait()
	if err != nil || cmd.ProcessState.String() != "signal: killed" {
		return fmt.Errorf("%v (%w): %s", cmd.ProcessState, err, said.String())
	}
	return nil
}

// reconnect attaches to a VM and sends something there and back.
func reconnect(t *testing.T, e *Env, l *vm.Launcher, id string, from *source) {
	t.Helper()
	m, err := l.Attach(e.Context(t), id)
	if err != nil {
		t.Fatal(err)
	}
	r := &running{Env: e, machine: m}
	streamIn(t, r, 1<<20)
	from.streamOut(t, r, 1<<20)
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
}
