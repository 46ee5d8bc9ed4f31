package iii

import (
	"bytes"
	"encoding/json"
	"unicode/utf8"
)

// Types of messages, in the field "type".
const (
	typeInvoke       = "invokefunction"
	typeResult       = "invocationresult"
	typeRegister     = "registerfunction"
	typeReattach     = "reattach"
	typeWelcome      = "workerregistered"
	typeRejected     = "registrationrejected"
	typePing         = "ping"
	typePong         = "pong"
	typeConnectError = "error"
)

// Messages that we send. What is absent is left out, never null: newer engines
// refuse a null namespace.
type (
	invokeMessage struct {
		Type        string          `json:"type"`
		ID          string          `json:"invocation_id,omitempty"`
		Function    string          `json:"function_id"`
		Data        json.RawMessage `json:"data"`
		Action      *actionMessage  `json:"action,omitempty"`
		Metadata    json.RawMessage `json:"metadata,omitempty"`
		Namespace   string          `json:"namespace,omitempty"`
		Traceparent string          `json:"traceparent,omitempty"`
		Baggage     string          `json:"baggage,omitempty"`
	}

	actionMessage struct {
		Type string `json:"type"`
	}

	resultMessage struct {
		Type     string          `json:"type"`
		ID       string          `json:"invocation_id"`
		Function string          `json:"function_id"`
		Result   json.RawMessage `json:"result,omitempty"`
		Error    *errorMessage   `json:"error,omitempty"`
	}

	errorMessage struct {
		Code       string `json:"code"`
		Message    string `json:"message"`
		Stacktrace string `json:"stacktrace,omitempty"`
	}

	registerMessage struct {
		Type           string          `json:"type"`
		ID             string          `json:"id"`
		Description    string          `json:"description,omitempty"`
		RequestFormat  json.RawMessage `json:"request_format,omitempty"`
		ResponseFormat json.RawMessage `json:"response_format,omitempty"`
		Metadata       json.RawMessage `json:"metadata,omitempty"`
	}

	reattachMessage struct {
		Type     string `json:"type"`
		Previous string `json:"previous_worker_id"`
		Token    string `json:"reattach_token,omitempty"`
	}

	bareMessage struct {
		Type string `json:"type"`
	}

	// workerMessage is the payload of engine::workers::register. Without a pid
	// the engine does not list the worker, and Compose waits for it in vain.
	workerMessage struct {
		Runtime     string `json:"runtime"`
		Version     string `json:"version,omitempty"`
		Name        string `json:"name"`
		Description string `json:"description,omitempty"`
		OS          string `json:"os"`
		PID         int    `json:"pid"`
		Isolation   string `json:"isolation,omitempty"`
		Namespace   string `json:"namespace,omitempty"`
		// Features are what engines from 0.25 on may send; older ones pass it over.
		Features []string `json:"features"`
	}
)

// featureLargeMessages says that we take messages up to 64 MiB, in frames of any
// size: without it, engines judge by the SDK's version, which we have not.
const featureLargeMessages = "large-messages.v1"

// encode makes the text of a message: valid UTF-8, without escapes for HTML.
func encode(message any) ([]byte, error) {
	var buffer bytes.Buffer
	encoder := json.NewEncoder(&buffer)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(message); err != nil {
		return nil, err
	}
	text := bytes.TrimSuffix(buffer.Bytes(), []byte("\n"))
	// A raw value may hold any bytes in its strings, and a text frame that is not
	// UTF-8 ends the connection.
	if !utf8.Valid(text) {
		text = bytes.ToValidUTF8(text, []byte("\uFFFD"))
	}
	return text, nil
}

// A frame is a message that came, its fields by their exact names. Of a name that
// is there twice the last counts.
type frame map[string]json.RawMessage

// decode reads a message. It fails for what is not one JSON object.
func decode(text []byte) (frame, error) {
	var f frame
	err := json.Unmarshal(text, &f)
	return f, err
}

// text returns a field that is a string, else "".
func (f frame) text(name string) string {
	var s string
	if json.Unmarshal(f[name], &s) != nil {
		return ""
	}
	return s
}

// value returns a field that is there and not null, else nil.
func (f frame) value(name string) json.RawMessage {
	if v := f[name]; len(v) > 0 && string(v) != "null" {
		return v
	}
	return nil
}

// failure returns the error of a result; nil where there is none. One that is not
// of the form of an error has the code CodeUnknown.
func (f frame) failure() *Error {
	raw := f.value("error")
	if raw == nil {
		return nil
	}
	body, err := decode(raw)
	if err != nil || body.value("code") == nil || body.value("message") == nil {
		return &Error{Code: CodeUnknown, Message: "the result is an error that cannot be read"}
	}
	return &Error{Code: body.text("code"), Message: body.text("message"), Stacktrace: body.text("stacktrace")}
}
