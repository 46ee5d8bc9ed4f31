package adapter

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/config"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
)

const (
	// readTimeout bounds one read of the configuration.
	readTimeout = 15 * time.Second
	// workerPatience is how long the configuration worker may take to appear, and
	// workerRetry how long to wait before it is asked again.
	workerPatience = 10 * time.Second
	workerRetry    = 250 * time.Millisecond
)

// ConfigError is a configuration that cannot be read or used.
type ConfigError struct {
	// Name is the entry's.
	Name string
	Err  error
}

func (e *ConfigError) Error() string {
	return fmt.Sprintf("configuration entry %q: %v", e.Name, e.Err)
}

// Unwrap returns the cause.
func (e *ConfigError) Unwrap() error { return e.Err }

// readConfig reads the configuration entry once there is a connection. An entry
// that is not there, or null, is the default configuration. Errors are of type
// *ConfigError, but for the end of ctx or of the client.
func readConfig(ctx context.Context, client *iii.Client, name string, log *slog.Logger) (*config.Config, error) {
	value, err := readEntry(ctx, client, name)
	var refused *iii.Error
	switch {
	case errors.As(err, &refused) && refused.Code == iii.CodeNotFound:
		log.Warn("there is no configuration entry: the defaults hold, which allow no image", "entry", name)
		value = []byte("{}")
	case err != nil && (ctx.Err() != nil || errors.Is(err, iii.ErrClosed)):
		return nil, err
	case err != nil:
		return nil, &ConfigError{Name: name, Err: fmt.Errorf("it cannot be read: %w", err)}
	case value == nil:
		log.Warn("the configuration entry is null: the defaults hold, which allow no image", "entry", name)
		value = []byte("{}")
	}
	cfg, err := config.Parse(value)
	if err != nil {
		return nil, &ConfigError{Name: name, Err: err}
	}
	return cfg, nil
}

// readEntry asks the configuration worker, which may be starting still, for the
// entry's value; nil is null.
func readEntry(ctx context.Context, client *iii.Client, name string) (json.RawMessage, error) {
	request, err := json.Marshal(map[string]string{"id": name})
	if err != nil {
		return nil, err
	}
	var since time.Time
	for {
		if err := client.Connected(ctx); err != nil {
			return nil, err
		}
		if since.IsZero() {
			since = time.Now()
		}
		reply, err := client.Invoke(ctx, iii.Request{
			Function: "configuration::get", Namespace: iii.DefaultNamespace, Data: request, Timeout: readTimeout,
		})
		var refused *iii.Error
		missing := errors.As(err, &refused) && refused.Code == iii.CodeFunctionNotFound
		switch {
		case err == nil:
			return entryValue(reply)
		case errors.Is(err, iii.ErrDisconnected):
			since = time.Time{} // another engine, or the same one anew
		case !missing || time.Since(since) > workerPatience:
			return nil, err
		}
		select {
		case <-time.After(workerRetry):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func entryValue(reply json.RawMessage) (json.RawMessage, error) {
	var entry struct {
		Value json.RawMessage `json:"value"`
	}
	if err := json.Unmarshal(reply, &entry); err != nil {
		return nil, errors.New("the configuration worker's reply is not an object")
	}
	if value := bytes.TrimSpace(entry.Value); !bytes.Equal(value, []byte("null")) && len(value) > 0 {
		return value, nil
	}
	return nil, nil
}
