package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/spf13/cobra"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
)

// closeTimeout bounds the goodbye after a call.
const closeTimeout = time.Second

// A trigger is one `engine trigger`.
type trigger struct {
	function  string
	pairs     []string
	json      string
	address   string
	port      int
	timeoutMs int64
	namespace string
}

func (p program) triggerCommand(helpErr *error) *cobra.Command {
	t := trigger{}
	cmd := &cobra.Command{
		Use:     "trigger FUNCTION [KEY=VALUE ...]",
		Aliases: []string{"t"},
		Short:   "Call a function and print its result",
		Long: "Calls a function and prints its result as JSON. A VALUE that is JSON is sent as such, any other as a string.\n" +
			"With --json the payload is that; KEY=VALUE then replace members of it.\n" +
			"`engine trigger FUNCTION --help` describes the function.",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return errors.New("name a function, as in engine trigger sandbox-libkrun::list")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			t.function, t.pairs = args[0], args[1:]
			data, err := payload(t.pairs, t.json, cmd.Flags().Changed("json"))
			if err != nil {
				return err
			}
			result, err := p.call(cmd.Context(), t, iii.Request{Function: t.function, Data: data})
			if err != nil || string(result) == "null" {
				return err
			}
			return p.print(result)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&t.json, "json", "", "payload")
	flags.StringVar(&t.address, "address", "localhost", "host of the engine")
	flags.IntVar(&t.port, "port", defaultPort, "port of the engine")
	flags.Int64Var(&t.timeoutMs, "timeout-ms", iii.DefaultTimeout.Milliseconds(), "how long to wait for the result")
	flags.StringVarP(&t.namespace, "namespace", "n", p.getenv("III_NAMESPACE"), "namespace of the function")
	usage := cmd.HelpFunc()
	cmd.SetHelpFunc(func(cmd *cobra.Command, args []string) {
		names := cmd.Flags().Args()
		if len(names) == 0 {
			usage(cmd, args)
			return
		}
		t.function = names[0]
		*helpErr = p.describe(cmd.Context(), t)
	})
	return cmd
}

// payload makes the payload of KEY=VALUE pairs and, where given, of --json.
func payload(pairs []string, text string, given bool) (json.RawMessage, error) {
	if given && !json.Valid([]byte(text)) {
		return nil, errors.New("--json is not JSON")
	}
	if given && len(pairs) == 0 {
		return json.RawMessage(text), nil
	}
	members := map[string]json.RawMessage{}
	if given {
		if err := json.Unmarshal([]byte(text), &members); err != nil || members == nil {
			return nil, errors.New("--json must be an object where KEY=VALUE is given too")
		}
	}
	for _, pair := range pairs {
		key, value, ok := strings.Cut(pair, "=")
		if !ok || key == "" {
			return nil, fmt.Errorf("%q is not of the form KEY=VALUE", pair)
		}
		if !json.Valid([]byte(value)) {
			quoted, err := json.Marshal(value)
			if err != nil {
				return nil, err
			}
			value = string(quoted)
		}
		members[key] = json.RawMessage(value)
	}
	return json.Marshal(members)
}

// call calls a function as a worker of its own. What the caller is told of an
// error is printed already when it returns errTold.
func (p program) call(ctx context.Context, t trigger, r iii.Request) (json.RawMessage, error) {
	client, err := iii.Open(iii.Options{
		URL: "ws://" + net.JoinHostPort(t.address, strconv.Itoa(t.port)),
		// Two at a time must not have the same name.
		Name:      "iii-cli:trigger:" + uuid.NewString(),
		Namespace: t.namespace,
		Log:       slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return nil, err
	}
	defer func() {
		bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
		defer cancel()
		_ = client.Close(bounded)
	}()
	r.Timeout = time.Duration(max(t.timeoutMs, 1)) * time.Millisecond
	result, err := client.Invoke(ctx, r)
	var remote *iii.Error
	switch {
	case errors.As(err, &remote):
		return nil, p.tell(remote)
	case errors.Is(err, iii.ErrTimeout):
		return nil, fmt.Errorf("Timed out waiting for the engine at %s:%d after %d ms", t.address, t.port, t.timeoutMs) //nolint:staticcheck // The words of `iii trigger`.
	case errors.Is(err, iii.ErrClosed) && client.Err() != nil:
		return nil, client.Err()
	}
	return result, err
}

// tell prints an error that came from the function or the engine.
func (p program) tell(e *iii.Error) error {
	body := struct {
		Code       string  `json:"code"`
		Message    string  `json:"message"`
		Stacktrace *string `json:"stacktrace"`
	}{Code: e.Code, Message: e.Message}
	if e.Stacktrace != "" {
		body.Stacktrace = &e.Stacktrace
	}
	var text bytes.Buffer
	encoder := json.NewEncoder(&text)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(body); err != nil {
		return err
	}
	if _, err := fmt.Fprintf(p.stderr, "Error: %s", text.String()); err != nil {
		return err
	}
	return errTold
}

// print prints a result, indented.
func (p program) print(result json.RawMessage) error {
	var text bytes.Buffer
	if err := json.Indent(&text, result, "", "  "); err != nil {
		return err
	}
	_, err := fmt.Fprintln(p.stdout, text.String())
	return err
}

// describe prints what the engine knows of a function.
func (p program) describe(ctx context.Context, t trigger) error {
	query := map[string]string{"function_id": t.function}
	if t.namespace != "" {
		query["namespace"] = t.namespace
	}
	data, err := json.Marshal(query)
	if err != nil {
		return err
	}
	raw, err := p.call(ctx, t, iii.Request{Function: "engine::functions::info", Data: data})
	if err != nil {
		return err
	}
	var info struct {
		Description string          `json:"description"`
		Schema      json.RawMessage `json:"request_schema"`
	}
	if err := json.Unmarshal(raw, &info); err != nil {
		return fmt.Errorf("the description of %s: %w", t.function, err)
	}
	if _, err := fmt.Fprintf(p.stdout, "%s\n%s\n\nPayload:\n", t.function, info.Description); err != nil {
		return err
	}
	return p.print(info.Schema)
}
