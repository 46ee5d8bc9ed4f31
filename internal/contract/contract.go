// Package contract is the surface that callers of the functions see: the requests
// and replies of sandbox-libkrun::*, their decoding, and their JSON schemas as
// they are registered with the engine.
//
// Names, types, defaults, examples and formats are those of the sandbox contract
// 1.1 and cannot be chosen here. A request's Go type is the one source of both its
// decoding and its schema, so that the two cannot differ.
package contract

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/strictjson"
)

// Adapter is the adapter's name and Prefix what its functions' ids begin with.
const (
	Adapter = "sandbox-libkrun"
	Prefix  = Adapter + "::"
)

// The version of the contract that the functions keep.
const (
	Major = 1
	Minor = 1
)

// Function describes one function.
type Function struct {
	// Name is the id without Prefix.
	Name string
	// Description is what the engine shows of it.
	Description string
	// Request and Response are JSON schemas, draft 7.
	Request, Response json.RawMessage
}

// Functions returns every function as the contract has it, in the order of the
// documentation.
func Functions() []Function { return functions(false) }

// Extended returns the same functions with this adapter's extensions in their
// schemas.
func Extended() []Function { return functions(true) }

func functions(extended bool) []Function {
	return []Function{
		described[CreateRequest, CreateResponse](extended, "create", createText, createExample),
		described[ExecRequest, ExecResponse](extended, "exec", execText, execExample),
		described[StopRequest, StopResponse](extended, "stop", stopText, ""),
		described[ListRequest, ListResponse](extended, "list", listText, ""),
		described[CatalogListRequest, CatalogListResponse](extended, "catalog::list", catalogText, ""),
		described[RunRequest, RunResponse](extended, "run", runText, runExample),
		described[LsRequest, LsResponse](extended, "fs::ls", lsText, lsExample),
		described[StatRequest, StatResponse](extended, "fs::stat", statText, statExample),
		described[MkdirRequest, MkdirResponse](extended, "fs::mkdir", mkdirText, mkdirExample),
		described[RmRequest, RmResponse](extended, "fs::rm", rmText, rmExample),
		described[ChmodRequest, ChmodResponse](extended, "fs::chmod", chmodText, chmodExample),
		described[MvRequest, MvResponse](extended, "fs::mv", mvText, mvExample),
		described[GrepRequest, GrepResponse](extended, "fs::grep", grepText, grepExample),
		described[SedRequest, SedResponse](extended, "fs::sed", sedText, sedExample),
		described[WriteRequest, WriteResponse](extended, "fs::write", writeText, writeExample),
		described[ReadRequest, ReadResponse](extended, "fs::read", readText, readExample),
		described[AdapterInfoRequest, AdapterInfo](extended, "adapter::info", infoText, ""),
	}
}

func described[Req, Resp any](extended bool, name, text, example string) Function {
	var req Req
	var resp Resp
	applyDefaults(&req)
	return Function{
		Name: name, Description: text,
		Request: requestSchema(req, example, extended), Response: responseSchema(resp, extended),
	}
}

// defaulted is a request whose fields have defaults that are not zero.
type defaulted interface{ applyDefaults() }

func applyDefaults(req any) {
	if d, ok := req.(defaulted); ok {
		d.applyDefaults()
	}
}

// Decode decodes a request; fields that are not given have their defaults. One
// that does not decode is S001 and names the field. Req is a request of this
// package.
func Decode[Req any](payload json.RawMessage) (Req, error) {
	var req Req
	applyDefaults(&req)
	// A caller without a payload may send null or nothing at all.
	if _, empty := any(req).(fieldless); empty && absent(payload) {
		return req, nil
	}
	err := strictjson.Unmarshal(payload, &req)
	var wrong *strictjson.Error
	switch {
	case err == nil:
		return req, nil
	case !errors.As(err, &wrong):
		return req, fault.InvalidRequest("%v", err)
	case wrong.Path == "":
		return req, fault.InvalidRequest("the payload %s", wrong.Problem)
	}
	return req, fault.InvalidRequest("%s %s", wrong.Path, wrong.Problem)
}

// fieldless is a request that has no fields.
type fieldless interface{ fieldless() }

func absent(payload json.RawMessage) bool {
	payload = bytes.TrimSpace(payload)
	return len(payload) == 0 || string(payload) == "null"
}

// Encode encodes a reply, with '<', '>' and '&' as they are.
func Encode(reply any) (json.RawMessage, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(reply); err != nil {
		return nil, fmt.Errorf("encode the reply: %w", err)
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}
