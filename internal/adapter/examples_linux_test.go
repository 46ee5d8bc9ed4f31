package adapter_test

import (
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/contract"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/vm/vmtest"
)

// The examples of docs/functions.md, run in their order: what they show is what
// comes, but for ids and times.
func TestExamples(t *testing.T) {
	t.Parallel()
	vmtest.LockRunFiles(t)
	h := newHost(t, setup{})
	text, err := os.ReadFile("../../build/docs/examples.json")
	if err != nil {
		t.Fatal(err)
	}
	var examples []struct {
		Function       string
		Request, Reply json.RawMessage
	}
	// A fake has no /home/app of its own.
	if err := json.Unmarshal([]byte(strings.ReplaceAll(string(text), "/home/app", h.files)), &examples); err != nil {
		t.Fatal(err)
	}
	missing := map[string]bool{}
	for _, f := range contract.Functions() {
		missing[f.Name] = true
	}
	documented, id := "", ""
	for _, e := range examples {
		delete(missing, e.Function)
		request := json.RawMessage(strings.ReplaceAll(string(e.Request), orNone(documented), id))
		reply := h.ok(t, e.Function, request)
		var want obj
		if err := json.Unmarshal(e.Reply, &want); err != nil {
			t.Fatal(err)
		}
		if e.Function == "create" {
			documented, _ = want["sandbox_id"].(string)
			id, _ = reply["sandbox_id"].(string)
		}
		if e.Function == "fs::read" {
			want["content"] = reply["content"] // the channel's ids
		}
		same(t, e.Function, unvarying(reply), unvarying(want))
	}
	if len(missing) > 0 {
		t.Errorf("no example of %v", missing)
	}
}

func orNone(s string) string {
	if s == "" {
		return "\x00"
	}
	return s
}

// unvarying masks what is different each time.
func unvarying(v any) any {
	switch v := v.(type) {
	case obj:
		for key, member := range v {
			switch key {
			case "sandbox_id", "duration_ms", "mtime", "age_secs":
				v[key] = "varies"
			default:
				v[key] = unvarying(member)
			}
		}
	case []any:
		for i := range v {
			v[i] = unvarying(v[i])
		}
	}
	return v
}
