package iiitest

import (
	"bytes"
	"encoding/json"
	"errors"
	"unicode/utf8"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
)

// A message is what a worker sent, its fields by their exact names.
type message map[string]json.RawMessage

func decode(text []byte) (message, error) {
	var m message
	err := json.Unmarshal(text, &m)
	return m, err
}

func (m message) text(name string) string {
	var s string
	if json.Unmarshal(m[name], &s) != nil {
		return ""
	}
	return s
}

// value returns a field that is there and not null, else nil.
func (m message) value(name string) json.RawMessage {
	if v := m[name]; len(v) > 0 && string(v) != "null" {
		return v
	}
	return nil
}

// raw makes the JSON of a value that has one.
func raw(value any) json.RawMessage {
	var buffer bytes.Buffer
	encoder := json.NewEncoder(&buffer)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(value); err != nil {
		return json.RawMessage("null")
	}
	text := bytes.TrimSuffix(buffer.Bytes(), []byte("\n"))
	if !utf8.Valid(text) {
		text = bytes.ToValidUTF8(text, []byte("\uFFFD"))
	}
	return text
}

// An outcome is how a call ended, in JSON: result or failure.
type outcome struct {
	result, failure json.RawMessage
}

func failed(code, text string) outcome {
	return outcome{failure: raw(map[string]string{"code": code, "message": text})}
}

// outcomeOf puts what a function of the engine returned into JSON.
func outcomeOf(result json.RawMessage, err error) outcome {
	var e *iii.Error
	switch {
	case errors.As(err, &e):
		body := map[string]string{"code": e.Code, "message": e.Message}
		if e.Stacktrace != "" {
			body["stacktrace"] = e.Stacktrace
		}
		return outcome{failure: raw(body)}
	case err != nil:
		return failed("invocation_error", err.Error())
	}
	return outcome{result: result}
}

// resultMessage is the message that tells a caller how its call ended. What is
// null is left out.
func resultMessage(id, function string, o outcome) []byte {
	m := map[string]any{"type": "invocationresult", "invocation_id": id, "function_id": function}
	if o.failure != nil {
		m["error"] = withoutNullStacktrace(o.failure)
	} else if len(o.result) > 0 && string(o.result) != "null" {
		m["result"] = o.result
	}
	return raw(m)
}

// withoutNullStacktrace leaves a null stacktrace out, on which Node's client would
// give up.
func withoutNullStacktrace(failure json.RawMessage) json.RawMessage {
	body, err := decode(failure)
	if err != nil || string(body["stacktrace"]) != "null" {
		return failure
	}
	delete(body, "stacktrace")
	return raw(body)
}

// withCaller adds the id of the caller to data that is an object, behind whatever
// else it holds.
func withCaller(data json.RawMessage, id string) json.RawMessage {
	text := bytes.TrimSpace(data)
	if len(text) == 0 || text[0] != '{' {
		return data
	}
	head := bytes.TrimSpace(text[:len(text)-1])
	out := append(make([]byte, 0, len(text)+64), head...)
	if len(head) > 1 {
		out = append(out, ',')
	}
	out = append(out, `"_caller_worker_id":"`...)
	out = append(out, id...)
	return append(out, `"}`...)
}
