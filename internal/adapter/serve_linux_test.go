package adapter_test

import (
	"encoding/json"
	"testing"
)

func TestServe_Smoke(t *testing.T) {
	t.Parallel()
	h := newHost(t, setup{})
	id := h.create(t)
	reply := h.sh(t, id, "echo hi")
	if reply["stdout"] != "hi\n" {
		text, _ := json.Marshal(reply)
		t.Error(string(text))
	}
}
