package contract_test

import (
	"encoding/json"
	"errors"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/contract"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/fault"
)

// structure is the contract's functions without their descriptions.
func structure(t *testing.T) map[string]map[string]any {
	t.Helper()
	text, err := os.ReadFile("testdata/structure.json")
	if err != nil {
		t.Fatal(err)
	}
	var functions []map[string]any
	if err := json.Unmarshal(text, &functions); err != nil {
		t.Fatal(err)
	}
	out := map[string]map[string]any{}
	for _, f := range functions {
		name, _ := f["name"].(string)
		out[strings.TrimPrefix(name, contract.Prefix)] = f
	}
	return out
}

func TestFunctions_AreThoseOfTheContract(t *testing.T) {
	t.Parallel()
	var ours, want []string
	for _, f := range contract.Functions() {
		ours = append(ours, f.Name)
	}
	for name := range structure(t) {
		if !strings.HasPrefix(name, "worker::") {
			want = append(want, name)
		}
	}
	slices.Sort(ours)
	slices.Sort(want)
	if !slices.Equal(ours, want) || len(ours) != 17 {
		t.Errorf("got %q, want %q", ours, want)
	}
}

func TestSchemas_EqualTheContractsStructurally(t *testing.T) {
	t.Parallel()
	want := structure(t)
	for _, f := range contract.Functions() {
		for key, text := range map[string]json.RawMessage{"request_schema": f.Request, "response_schema": f.Response} {
			var ours any
			if err := json.Unmarshal(text, &ours); err != nil {
				t.Fatalf("%s: %v", f.Name, err)
			}
			if n := undescribed(ours); n > 0 && key == "request_schema" {
				t.Errorf("%s: %d fields without a description", f.Name, n)
			}
			for _, difference := range differences("", withoutDescriptions(ours), want[f.Name][key]) {
				t.Errorf("%s %s: %s", f.Name, key, difference)
			}
		}
		if f.Description == "" {
			t.Errorf("%s has no description", f.Name)
		}
	}
}

func withoutDescriptions(v any) any {
	switch v := v.(type) {
	case map[string]any:
		out := map[string]any{}
		for key, member := range v {
			if _, text := member.(string); key != "description" || !text {
				out[key] = withoutDescriptions(member)
			}
		}
		return out
	case []any:
		out := []any{}
		for _, item := range v {
			out = append(out, withoutDescriptions(item))
		}
		return out
	}
	return v
}

// undescribed counts a request's own fields that have no description.
func undescribed(schema any) (n int) {
	root, _ := schema.(map[string]any)
	properties, _ := root["properties"].(map[string]any)
	for _, p := range properties {
		if property, _ := p.(map[string]any); property["description"] == nil {
			n++
		}
	}
	return n
}

// differences tells where two documents differ; arrays of required fields and of
// types are sets.
func differences(at string, got, want any) []string {
	g, gotObject := got.(map[string]any)
	w, wantObject := want.(map[string]any)
	if gotObject && wantObject {
		var out []string
		for key := range w {
			if _, ok := g[key]; !ok {
				out = append(out, at+"/"+key+" is missing")
				continue
			}
			out = append(out, differences(at+"/"+key, g[key], w[key])...)
		}
		for key := range g {
			if _, ok := w[key]; !ok {
				out = append(out, at+"/"+key+" is not in the contract")
			}
		}
		return out
	}
	if strings.HasSuffix(at, "/required") || strings.HasSuffix(at, "/type") {
		got, want = sorted(got), sorted(want)
	}
	if !reflect.DeepEqual(got, want) {
		gotText, _ := json.Marshal(got)
		wantText, _ := json.Marshal(want)
		return []string{at + ": got " + string(gotText) + ", want " + string(wantText)}
	}
	return nil
}

func sorted(v any) any {
	list, ok := v.([]any)
	if !ok {
		return v
	}
	var out []string
	for _, item := range list {
		s, _ := item.(string)
		out = append(out, s)
	}
	slices.Sort(out)
	return out
}

// decoders has each function's request type.
func decoders() map[string]func(json.RawMessage) (any, error) {
	return map[string]func(json.RawMessage) (any, error){
		"create": as[contract.CreateRequest], "exec": as[contract.ExecRequest], "stop": as[contract.StopRequest],
		"list": as[contract.ListRequest], "catalog::list": as[contract.CatalogListRequest], "run": as[contract.RunRequest],
		"fs::ls": as[contract.LsRequest], "fs::stat": as[contract.StatRequest], "fs::mkdir": as[contract.MkdirRequest],
		"fs::rm": as[contract.RmRequest], "fs::chmod": as[contract.ChmodRequest], "fs::mv": as[contract.MvRequest],
		"fs::grep": as[contract.GrepRequest], "fs::sed": as[contract.SedRequest], "fs::write": as[contract.WriteRequest],
		"fs::read": as[contract.ReadRequest], "adapter::info": as[contract.AdapterInfoRequest],
	}
}

func as[Req any](payload json.RawMessage) (any, error) { return contract.Decode[Req](payload) }

// property is what a schema says of one field.
type property struct {
	Type    any             `json:"type"`
	Format  string          `json:"format"`
	AnyOf   []any           `json:"anyOf"`
	AllOf   []any           `json:"allOf"`
	Default json.RawMessage `json:"default"`
	Items   struct {
		Type string `json:"type"`
		Ref  string `json:"$ref"`
	} `json:"items"`
}

func (p property) nullable() bool {
	types, _ := p.Type.([]any)
	return slices.Contains(types, any("null")) || len(p.AnyOf) > 0
}

func (p property) kind() string {
	if types, ok := p.Type.([]any); ok {
		kind, _ := types[0].(string)
		return kind
	}
	kind, _ := p.Type.(string)
	return kind
}

type request struct {
	Properties map[string]property `json:"properties"`
	Required   []string            `json:"required"`
	Examples   []map[string]any    `json:"examples"`
}

// minimal is the smallest request that decodes.
func (r request) minimal() map[string]any {
	out := map[string]any{}
	for _, name := range r.Required {
		out[name] = "x"
	}
	return out
}

// wrongFor are values that a field must refuse, by the contract's schema.
func (p property) wrongFor() []string {
	var wrong []string
	switch p.kind() {
	case "string":
		wrong = []string{`1`, `true`, `[]`, `{}`, `"\ud800"`}
	case "boolean":
		wrong = []string{`1`, `"true"`, `[]`, `{}`}
	case "integer":
		wrong = []string{`"5"`, `1.0`, `1e3`, `-1`, `true`, `[]`, `18446744073709551616`}
		if p.Format == "uint32" {
			wrong = append(wrong, `4294967296`)
		}
	case "array":
		wrong = []string{`"x"`, `1`, `{}`, `[null]`, `[1]`}
	default: // an environment, or the content of a file
		wrong = []string{`1`, `true`, `[1]`, `{"k":1}`}
	}
	if !p.nullable() {
		wrong = append(wrong, "null")
	}
	return wrong
}

func TestDecode_AgreesWithTheSchemaOnEveryField(t *testing.T) {
	t.Parallel()
	decode := decoders()
	for name, function := range structure(t) {
		if strings.HasPrefix(name, "worker::") {
			continue
		}
		var schema request
		text, _ := json.Marshal(function["request_schema"])
		if err := json.Unmarshal(text, &schema); err != nil {
			t.Fatal(err)
		}
		try := func(change func(map[string]any)) error {
			payload := schema.minimal()
			change(payload)
			text, _ := json.Marshal(payload)
			_, err := decode[name](text)
			return err
		}
		if err := try(func(m map[string]any) { m["unknown"] = []any{nil}; m["_caller_worker_id"] = "w" }); err != nil {
			t.Errorf("%s: the smallest request: %v", name, err)
		}
		for _, example := range schema.Examples {
			text, _ := json.Marshal(example)
			if _, err := decode[name](text); err != nil {
				t.Errorf("%s: the contract's example: %v", name, err)
			}
		}
		for _, field := range schema.Required {
			err := try(func(m map[string]any) { delete(m, field) })
			expectField(t, name+" without "+field, err, field)
			if err != nil && !strings.Contains(err.Error(), "missing") {
				t.Errorf("%s without %s: %v", name, field, err)
			}
		}
		for field, p := range schema.Properties {
			for _, value := range p.wrongFor() {
				err := try(func(m map[string]any) { m[field] = json.RawMessage(value) })
				expectField(t, name+" with "+field+"="+value, err, field)
			}
			if p.nullable() {
				if err := try(func(m map[string]any) { m[field] = nil }); err != nil {
					t.Errorf("%s with %s=null: %v", name, field, err)
				}
			}
		}
	}
}

func expectField(t *testing.T, what string, err error, field string) {
	t.Helper()
	if !errors.Is(err, fault.S001) || !strings.Contains(err.Error(), field) {
		t.Errorf("%s: got %v, want S001 that names the field", what, err)
	}
}

// The defaults that a request decodes to are those of the schema.
func TestDecode_Defaults(t *testing.T) {
	t.Parallel()
	decode := decoders()
	for name, function := range structure(t) {
		if strings.HasPrefix(name, "worker::") {
			continue
		}
		var schema request
		text, _ := json.Marshal(function["request_schema"])
		if err := json.Unmarshal(text, &schema); err != nil {
			t.Fatal(err)
		}
		payload, _ := json.Marshal(schema.minimal())
		req, err := decode[name](payload)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		text, _ = json.Marshal(req)
		var got map[string]any
		if err := json.Unmarshal(text, &got); err != nil {
			t.Fatal(err)
		}
		for field, p := range schema.Properties {
			if p.Default == nil {
				continue
			}
			var want any
			if err := json.Unmarshal(p.Default, &want); err != nil {
				t.Fatal(err)
			}
			empty, _ := want.([]any)
			if !reflect.DeepEqual(got[field], want) && (got[field] != nil || len(empty) > 0) {
				t.Errorf("%s: %s is %v, want %v", name, field, got[field], want)
			}
		}
	}
}

func TestDecode_PayloadThatIsNoObject(t *testing.T) {
	t.Parallel()
	fieldless := []string{"list", "catalog::list", "adapter::info"}
	for name, decode := range decoders() {
		for _, payload := range []string{`[]`, `"x"`, `1`, `true`} {
			if _, err := decode(json.RawMessage(payload)); !errors.Is(err, fault.S001) {
				t.Errorf("%s of %s: %v", name, payload, err)
			}
		}
		for _, payload := range []string{`null`, ` null `, ``} {
			_, err := decode(json.RawMessage(payload))
			if slices.Contains(fieldless, name) && err != nil {
				t.Errorf("%s has no fields, but %q is %v", name, payload, err)
			}
			if !slices.Contains(fieldless, name) && !errors.Is(err, fault.S001) {
				t.Errorf("%s of %q: %v", name, payload, err)
			}
		}
	}
}

func TestDecode_Environment(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]contract.EnvShape{
		``:                     {},
		`,"env":[]`:            {List: []string{}},
		`,"env":{}`:            {Map: map[string]string{}},
		`,"env":["A=b","C"]`:   {List: []string{"A=b", "C"}},
		`,"env":{"A":"b=c"}`:   {Map: map[string]string{"A": "b=c"}},
		`,"env":[],"env":{}`:   {Map: map[string]string{}},
		`,"ENV":{"A":"other"}`: {},
	} {
		req, err := contract.Decode[contract.CreateRequest](json.RawMessage(`{"image":"python"` + text + `}`))
		if err != nil || !reflect.DeepEqual(req.Env, want) {
			t.Errorf("%s: %+v, %v", text, req.Env, err)
		}
	}
	_, err := contract.Decode[contract.CreateRequest](json.RawMessage(`{"image":"python","env":{"A":null}}`))
	expectField(t, "a null value", err, "env")
}

func TestDecode_FileBody(t *testing.T) {
	t.Parallel()
	const head = `{"sandbox_id":"i","path":"/p"`
	decode := func(rest string) (contract.WriteRequest, error) {
		return contract.Decode[contract.WriteRequest](json.RawMessage(head + rest + `}`))
	}
	for text, want := range map[string]*contract.WriteContent{
		``:                 nil,
		`,"content":null`:  nil,
		`,"content":""`:    {},
		`,"content":"a\n"`: {Text: "a\n"},
		`,"content":{"channel_id":"c","access_key":"k","direction":"read","x":1}`: {
			Channel: &contract.StreamChannelRef{ChannelID: "c", AccessKey: "k", Direction: "read"},
		},
		`,"content":{"channel_id":"c","access_key":"k","direction":"write"}`: {
			Channel: &contract.StreamChannelRef{ChannelID: "c", AccessKey: "k", Direction: "write"},
		},
	} {
		if req, err := decode(text); err != nil || !reflect.DeepEqual(req.Content, want) {
			t.Errorf("%s: %+v, %v", text, req.Content, err)
		}
	}
	for text, field := range map[string]string{
		`,"content":{}`: "content.channel_id",
		`,"content":{"channel_id":"c","access_key":"k","direction":"both"}`: "content.direction",
		`,"content":{"channel_id":"c","access_key":1,"direction":"read"}`:   "content.access_key",
		`,"content":["x"]`:   "content",
		`,"content_b64":[1]`: "content_b64",
	} {
		_, err := decode(text)
		expectField(t, text, err, field)
	}
}

func TestEncode_ShowsAllKeys(t *testing.T) {
	t.Parallel()
	code := int32(0)
	for _, test := range []struct {
		reply any
		want  string
	}{
		{
			contract.RunResponse{ExecResponse: contract.ExecResponse{Stdout: "<a&b>", ExitCode: &code, Success: true}},
			`{"stdout":"<a&b>","stderr":"","exit_code":0,"timed_out":false,"duration_ms":0,"success":true,"stdout_truncated":false,"stderr_truncated":false}`,
		},
		{
			contract.ListResponse{Sandboxes: []contract.SandboxSummary{{SandboxID: "i", Image: "python"}}},
			`{"sandboxes":[{"sandbox_id":"i","name":null,"image":"python","age_secs":0,"exec_in_progress":false,"exec_in_flight":0,"exec_slots_free":0,"stopped":false}]}`,
		},
		{contract.FsSedFileResult{Path: "/p", Success: true}, `{"path":"/p","replacements":0,"success":true}`},
		{contract.StatResponse{Name: "n", Mode: "0644"}, `{"name":"n","is_dir":false,"size":0,"mode":"0644","mtime":0,"is_symlink":false}`},
	} {
		got, err := contract.Encode(test.reply)
		if err != nil || string(got) != test.want {
			t.Errorf("got %s (%v), want %s", got, err, test.want)
		}
	}
}

func FuzzDecode(f *testing.F) {
	for _, function := range contract.Functions() {
		var schema request
		if err := json.Unmarshal(function.Request, &schema); err != nil {
			f.Fatal(err)
		}
		for _, example := range schema.Examples {
			text, _ := json.Marshal(example)
			f.Add(function.Name, text)
		}
	}
	f.Add("exec", []byte(`{"sandbox_id":"x","sandbox_id":"\ud800","env":{"a":"b"}}`))
	decode := decoders()
	f.Fuzz(func(t *testing.T, name string, payload []byte) {
		if decode[name] == nil {
			t.Skip("SKIPPED: no such function")
		}
		if _, err := decode[name](payload); err != nil && !errors.Is(err, fault.S001) {
			t.Errorf("%s of %q: %v is not S001", name, payload, err)
		}
	})
}
