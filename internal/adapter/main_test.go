package adapter_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// obj is a JSON object.
type obj = map[string]any

// envelope takes an error apart as clients do: the message's JSON from its first
// brace.
func envelope(t testing.TB, err error) obj {
	t.Helper()
	var remote *iii.Error
	if !errors.As(err, &remote) {
		t.Fatalf("%v is no error of the function", err)
	}
	if remote.Code != "invocation_failed" {
		t.Errorf("code %q on the wire", remote.Code)
	}
	at := strings.IndexByte(remote.Message, '{')
	if at < 0 {
		t.Fatalf("no object in %q", remote.Message)
	}
	var out obj
	if err := json.Unmarshal([]byte(remote.Message[at:]), &out); err != nil {
		t.Fatalf("%q: %v", remote.Message, err)
	}
	return out
}

// logBuffer is a log that can be read while it is written.
type logBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}
