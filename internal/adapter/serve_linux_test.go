package adapter_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/contract"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii/iiitest"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/vmtest"
)

func TestServe_RegistersTheContractsFunctions(t *testing.T) {
	t.Parallel()
	h := newHost(t, setup{})
	registered := map[string]iiitest.RegisteredFunction{}
	for _, f := range h.engine.Functions() {
		registered[f.ID] = f
	}
	for _, f := range contract.Functions() { // without the extensions
		got, ok := registered["sandbox-libkrun::"+f.Name]
		if !ok {
			t.Errorf("%s is not registered", f.Name)
			continue
		}
		if !bytes.Equal(got.RequestFormat, f.Request) || !bytes.Equal(got.ResponseFormat, f.Response) || string(got.Metadata) != "{}" || got.Description != f.Description {
			t.Errorf("%s: %+v", f.Name, got)
		}
	}
	if len(registered) != 17 {
		t.Errorf("%d functions", len(registered))
	}
	for _, w := range h.engine.Workers() {
		if w.Name == "sandbox-libkrun" && !w.Listed {
			t.Error("the worker is not listed: it told no pid")
		}
	}
	same(t, "adapter::info", h.ok(t, "adapter::info", obj{}), obj{
		"adapter": "sandbox-libkrun", "adapter_version": "0.2.0", "contract": obj{"major": 1, "minor": 1},
	})
	for _, function := range []string{"adapter::info", "list", "catalog::list"} {
		h.ok(t, function, json.RawMessage("null"))
		h.ok(t, function, obj{"unknown": nil})
		h.fails(t, function, json.RawMessage(`[]`), "S001")
	}
}

func TestServe_AnswersEarlyCallsOnceItHasStarted(t *testing.T) {
	t.Parallel()
	slow := make(chan struct{})
	h := newHost(t, setup{start: func(ctx context.Context) error {
		select {
		case <-slow:
		case <-ctx.Done():
		}
		return nil
	}})
	answered := make(chan error, 1)
	go func() {
		_, err := h.invoke("create", obj{"image": "python"})
		answered <- err
	}()
	h.ok(t, "adapter::info", obj{})
	eventually(t, "arrival of the call", func() bool { return h.engine.Pending() == 1 })
	close(slow)
	if err := <-answered; err != nil {
		t.Error(err)
	}
}

func TestServe_NameTakenIsForGood(t *testing.T) {
	t.Parallel()
	h := newHost(t, setup{})
	h.stop(nil)
	if err := h.wait(); err != nil {
		t.Fatal(err)
	}
	first, err := iii.Open(iii.Options{URL: h.engine.URL(), Name: "sandbox-libkrun", Log: vmtest.Logger(t)})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = first.Close(h.ctx()) }()
	if err := h.engine.Await(h.ctx(), func() bool { return len(h.engine.Workers()) == 2 }); err != nil {
		t.Fatal(err)
	}
	second := *h
	second.served = make(chan struct{})
	second.serve(setup{})
	err = second.wait()
	var rejected *iii.RejectedError
	if !errors.As(err, &rejected) || !strings.Contains(err.Error(), "III_WORKER_NAME") {
		t.Errorf("%v", err)
	}
	second.err = nil // as wanted
}

// The contract's known limit: who registers a function first gets its calls.
func TestServe_SquattedFunctionLeavesTheOthers(t *testing.T) {
	t.Parallel()
	h := newHost(t, setup{})
	h.stop(nil)
	if err := h.wait(); err != nil {
		t.Fatal(err)
	}
	squatter, err := iii.Open(iii.Options{
		URL: h.engine.URL(), Name: "squatter", Log: vmtest.Logger(t),
		Functions: []iii.Function{{ID: "sandbox-libkrun::create", Handler: func(context.Context, iii.Invocation) (json.RawMessage, error) {
			return json.RawMessage(`{"sandbox_id":"squatted"}`), nil
		}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = squatter.Close(h.ctx()) }()
	if err := h.engine.AwaitFunction(h.ctx(), "sandbox-libkrun::create"); err != nil {
		t.Fatal(err)
	}
	again := *h
	again.served, again.log = make(chan struct{}), &logBuffer{}
	again.serve(setup{})
	if err := h.engine.AwaitFunction(h.ctx(), "sandbox-libkrun::adapter::info"); err != nil {
		t.Fatal(err)
	}
	again.ok(t, "list", obj{})
	if out := again.ok(t, "create", obj{"image": "python"}); out["sandbox_id"] != "squatted" {
		t.Errorf("%v", out)
	}
	eventually(t, "warning about the function", func() bool {
		return strings.Contains(again.log.String(), "sandbox-libkrun::create") && strings.Contains(again.log.String(), "another worker has this function")
	})
}

// SIGTERM: calls under way are answered, sandboxes end, the connection is closed
// with 1000. How long that may take is TestServe_EndsWithinTenSeconds.
func TestServe_StopsInOrder(t *testing.T) {
	t.Parallel()
	engineLog := &logBuffer{}
	h := newHost(t, setup{engine: iiitest.Options{Log: slog.New(slog.NewTextHandler(engineLog, &slog.HandlerOptions{Level: slog.LevelDebug}))}})
	id := h.create(t)
	answered := make(chan error, 1)
	up := h.dir(t, nil) + "/up"
	go func() {
		_, err := h.invoke("exec", shell(id, "trap '' TERM; touch "+up+"; sleep 1000"))
		answered <- err
	}()
	eventually(t, "start of the program", func() bool { return exists(up) })
	reading := h.ok(t, "fs::read", at(id, h.file(t, "big", strings.Repeat("x", 8<<20)))) // a download that nobody takes
	if err := h.end(); err != nil {
		t.Error(err)
	}
	if e := envelope(t, <-answered); e["code"] != "S300" {
		t.Errorf("the call under way: %v", e)
	}
	eventually(t, "close with 1000", func() bool { return strings.Contains(engineLog.String(), "close_code=1000") })
	data, texts := h.download(t, reading["content"])
	if len(data) >= 8<<20 {
		t.Errorf("%d bytes came, texts %q", len(data), texts)
	}
}

func TestServe_SandboxesSurviveTheEngine(t *testing.T) {
	t.Parallel()
	h := newHost(t, setup{})
	id := h.create(t)
	address := h.engine.Address()
	h.engine.Close()
	engine, err := iiitest.Start(iiitest.Options{Address: address, Log: vmtest.Logger(t)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(engine.Close)
	h.engine = engine
	if err := engine.AwaitFunction(h.ctx(), "sandbox-libkrun::adapter::info"); err != nil {
		t.Fatal(err)
	}
	if out := h.sh(t, id, "echo survived"); out["stdout"] != "survived\n" {
		t.Errorf("%v", out)
	}
	if n := len(engine.Functions()); n != 17 {
		t.Errorf("%d functions are registered", n)
	}
}

// Nothing of a payload or a reply is logged, at any level.
func TestServe_LogsNothingOfPayloads(t *testing.T) {
	t.Parallel()
	h := newHost(t, setup{})
	const secret = "s3cr3t"
	id := h.create(t, obj{"env": obj{"TOKEN": secret}, "name": secret})
	h.sh(t, id, "echo "+secret+"; cat >&2", obj{"stdin": "czNjcjN0", "env": obj{"A": secret}})
	path := h.dir(t, nil) + "/" + secret
	h.ok(t, "fs::write", at(id, path, obj{"content": secret}))
	h.ok(t, "fs::read", at(id, path))
	h.ok(t, "fs::grep", at(id, path, obj{"pattern": secret}))
	h.fails(t, "exec", obj{"sandbox_id": id, "cmd": secret + " x", "args": []string{secret}}, "S001")
	h.fails(t, "exec", obj{"sandbox_id": secret, "cmd": "true"}, "S001")
	h.fails(t, "exec", shell(id, "sleep 100 # "+secret, obj{"timeout_ms": 50}), "S200")
	h.fails(t, "exec", obj{"sandbox_id": id, "argv": []string{secret + "\x00"}}, "S300")
	garbage := h.file(t, secret, "\x7fELF")
	if err := os.Chmod(garbage, 0o755); err != nil {
		t.Fatal(err)
	}
	h.fails(t, "exec", obj{"sandbox_id": id, "argv": []string{garbage}}, "S300", secret)
	h.fails(t, "fs::rm", at(id, path+"/x"), "S216")
	h.fails(t, "create", obj{"image": "python", "env": obj{"1" + secret: ""}}, "S001")
	h.fails(t, "run", obj{"image": "python", "code": secret, "lang": secret + " x"}, "S001")
	if err := h.end(); err != nil {
		t.Error(err)
	}
	for _, line := range strings.Split(h.log.String(), "\n") {
		if strings.Contains(line, secret) || strings.Contains(line, "czNjcjN0") {
			t.Errorf("logged: %s", line)
		}
	}
	for _, want := range []string{
		"function=sandbox-libkrun::exec sandbox_id=" + id + " success=true duration_ms=",
		"function=sandbox-libkrun::create sandbox_id=" + id + " success=true",
		"error_code=S200 error_type=execution retryable=false",
		`function=sandbox-libkrun::exec sandbox_id="" success=false`,
	} {
		if !strings.Contains(h.log.String(), want) {
			t.Errorf("not logged: %s", want)
		}
	}
}

func TestServe_HostilePayloads(t *testing.T) {
	t.Parallel()
	h := newHost(t, setup{})
	id := h.create(t)
	deep := strings.Repeat(`{"a":`, 5000) + "1" + strings.Repeat("}", 5000)
	for payload, code := range map[string]string{
		`{"sandbox_id":"` + id + `","cmd":"true","x":` + deep + `}`:                                 "",
		`{"sandbox_id":"x","sandbox_id":"` + id + `","cmd":"true"}`:                                 "",
		`{"sandbox_id":"` + id + `","cmd":"\ud800"}`:                                                "S001",
		`{"sandbox_id":"` + id + `","cmd":` + deep + `}`:                                            "S001",
		`{"sandbox_id":"` + id + `","SANDBOX_ID":1,"cmd":"true","":[]}`:                             "",
		`{"sandbox_id":"` + id + `","argv":["true","` + strings.Repeat("x", 9<<20) + `"]}`:          "S300",
		`{"sandbox_id":"` + id + `","cmd":"true","timeout_ms":18446744073709551615}`:                "",
		`{"sandbox_id":"` + id + `","cmd":"true","timeout_ms":18446744073709551616}`:                "S001",
		`{"sandbox_id":"` + strings.Repeat("x", 1<<20) + `","cmd":"true"}`:                          "S001",
		`{"sandbox_id":"` + id + `","cmd":"true","env":{"` + strings.Repeat("k", 1<<20) + `-":""}}`: "S001",
	} {
		if code == "" {
			h.ok(t, "exec", json.RawMessage(payload))
			continue
		}
		e := h.fails(t, "exec", json.RawMessage(payload), code)
		if message := fmt.Sprint(e["message"]); len(message) > 16<<10 {
			t.Errorf("a message of %d bytes", len(message))
		}
	}
	h.fails(t, "exec", json.RawMessage(`"text"`), "S001")
}
