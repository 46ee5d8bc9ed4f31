package strictjson_test

import (
	"encoding/json"
	"errors"
	"reflect"
	"runtime"
	"strings"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/strictjson"
)

type document struct {
	Name   string            `json:"name" required:"true"`
	Count  uint32            `json:"count"`
	Big    uint64            `json:"big"`
	Delta  int32             `json:"delta"`
	On     bool              `json:"on"`
	Maybe  *uint32           `json:"maybe"`
	Label  *string           `json:"label"`
	Words  []string          `json:"words"`
	Inner  []inner           `json:"inner"`
	Limits map[string]inner  `json:"limits"`
	Labels map[string]string `json:"labels"`
}

type inner struct {
	Path string `json:"path" required:"true"`
}

func TestUnmarshal_Values(t *testing.T) {
	t.Parallel()
	seven, label := uint32(7), "l"
	tests := map[string]document{
		`{"name":"a"}`:                               {Name: "a", Count: 5},
		`{"name":"a","count":0}`:                     {Name: "a"},
		`{"name":"a","count":4294967295}`:            {Name: "a", Count: 1<<32 - 1},
		`{"name":"a","big":18446744073709551615}`:    {Name: "a", Count: 5, Big: 1<<64 - 1},
		`{"name":"a","delta":-3}`:                    {Name: "a", Count: 5, Delta: -3},
		`{"name":"a","maybe":null,"label":null}`:     {Name: "a", Count: 5},
		`{"name":"a","maybe":7,"label":"l"}`:         {Name: "a", Count: 5, Maybe: &seven, Label: &label},
		`{"name":"a","name":"b"}`:                    {Name: "b", Count: 5},
		`{"name":"a","Count":9,"unknown":{"x":[1]}}`: {Name: "a", Count: 5},
		` { "name" : "\u00e9\ud83d\ude00\ufffd" } `:  {Name: "é😀\uFFFD", Count: 5},
		`{"name":"\\ud800"}`:                         {Name: `\ud800`, Count: 5},
		`{"name":"a","words":[],"inner":[{"path":"p","more":1}]}`: {
			Name: "a", Count: 5, Words: []string{}, Inner: []inner{{Path: "p"}},
		},
		`{"name":"a","limits":{"k":{"path":"q"}},"labels":{"":"v"}}`: {
			Name: "a", Count: 5, Limits: map[string]inner{"k": {Path: "q"}}, Labels: map[string]string{"": "v"},
		},
	}
	for text, want := range tests {
		got := document{Count: 5}
		if err := strictjson.Unmarshal([]byte(text), &got); err != nil {
			t.Errorf("%s: %v", text, err)
		} else if !reflect.DeepEqual(got, want) {
			t.Errorf("%s: got %+v, want %+v", text, got, want)
		}
	}
}

func TestUnmarshal_NamesTheField(t *testing.T) {
	t.Parallel()
	tests := map[string]struct{ path, problem string }{
		`{}`:                                      {"name", "missing"},
		`{"NAME":"a"}`:                            {"name", "required"},
		`{"name":null}`:                           {"name", "must be a string, not null"},
		`{"name":3}`:                              {"name", "not a number"},
		`{"name":"a","count":null}`:               {"count", "not null"},
		`{"name":"a","count":"5"}`:                {"count", "not a string"},
		`{"name":"a","count":1.0}`:                {"count", "an integer from 0 to 4294967295"},
		`{"name":"a","count":1e3}`:                {"count", "integer"},
		`{"name":"a","count":-1}`:                 {"count", "integer"},
		`{"name":"a","count":-0}`:                 {"count", "integer"},
		`{"name":"a","count":4294967296}`:         {"count", "integer"},
		`{"name":"a","big":18446744073709551616}`: {"big", "to 18446744073709551615"},
		`{"name":"a","delta":2147483648}`:         {"delta", "from -2147483648 to 2147483647"},
		`{"name":"a","on":"true"}`:                {"on", "must be a boolean, not a string"},
		`{"name":"a","on":null}`:                  {"on", "not null"},
		`{"name":"a","maybe":false}`:              {"maybe", "not a boolean"},
		`{"name":"a","words":"x"}`:                {"words", "must be an array"},
		`{"name":"a","words":["x",null]}`:         {"words[1]", "not null"},
		`{"name":"a","inner":[{"path":"p"},{}]}`:  {"inner[1].path", "missing"},
		`{"name":"a","inner":[[]]}`:               {"inner[0]", "must be an object, not an array"},
		`{"name":"a","limits":{"k":null}}`:        {`limits["k"]`, "not null"},
		`{"name":"a","labels":[]}`:                {"labels", "must be an object"},
		`{"name":"\ud800"}`:                       {"name", "Unicode"},
		`{"name":"\udc00\ud800"}`:                 {"name", "Unicode"},
		"{\"name\":\"\xff\"}":                     {"name", "Unicode"},
		`null`:                                    {"", "must be an object, not null"},
		`[]`:                                      {"", "must be an object"},
		``:                                        {"", "is not JSON"},
		`{"name":"a"} x`:                          {"", "is not JSON"},
		strings.Repeat("[", 1<<20):                {"", "is not JSON"},
	}
	for text, want := range tests {
		var got document
		err := strictjson.Unmarshal([]byte(text), &got)
		var e *strictjson.Error
		if !errors.As(err, &e) {
			t.Errorf("%.60s: error %v", text, err)
		} else if e.Path != want.path || !strings.Contains(e.Problem, want.problem) {
			t.Errorf("%.60s: %q %q, want %q %q", text, e.Path, e.Problem, want.path, want.problem)
		}
	}
}

// either takes a string or an array of them.
type either struct{ words []string }

func (e *either) DecodeStrict(raw json.RawMessage, path string) error {
	if strictjson.Kind(raw) == "an array" {
		return strictjson.Decode(raw, path, &e.words)
	}
	if strictjson.Kind(raw) != "a string" {
		return strictjson.Expected("a string or an array of strings", raw, path)
	}
	e.words = make([]string, 1)
	return strictjson.Decode(raw, path, &e.words[0])
}

func TestUnmarshal_Decoder(t *testing.T) {
	t.Parallel()
	var got struct {
		E *either `json:"e"`
	}
	if err := strictjson.Unmarshal([]byte(`{"e":"x"}`), &got); err != nil || !reflect.DeepEqual(got.E.words, []string{"x"}) {
		t.Errorf("%v %v", got.E, err)
	}
	if err := strictjson.Unmarshal([]byte(`{"e":["x",1]}`), &got); err == nil || !strings.Contains(err.Error(), "e[1]: must be a string") {
		t.Errorf("error %v", err)
	}
	if err := strictjson.Unmarshal([]byte(`{"e":null}`), &got); err != nil || got.E != nil {
		t.Errorf("%v %v", got.E, err)
	}
}

func FuzzUnmarshal(f *testing.F) {
	f.Add([]byte(`{"name":"\ud83d\ude00","count":5,"inner":[{"path":"p"}],"limits":{"k":{"path":"q"}}}`))
	f.Add([]byte(`{"name":"\ud8`))
	f.Fuzz(func(t *testing.T, data []byte) {
		var got document
		if err := strictjson.Unmarshal(data, &got); err != nil {
			return
		}
		// What is accepted here, encoding/json accepts as well, with the same result.
		want := document{}
		if err := json.Unmarshal(data, &want); err != nil {
			t.Fatalf("%q: accepted, but %v", data, err)
		}
	})
}

// What a document has many of is not copied over and over: callers choose it. Not
// parallel, as it counts what the process allocates.
func TestUnmarshal_TakesLittleMemory(t *testing.T) {
	for name, text := range map[string]string{
		"items":  `{"name":"a","words":["","\u0061"` + strings.Repeat(`,""`, 300_000) + `]}`,
		"fields": `{"name":"a"` + strings.Repeat(`,"x":[{}]`, 100_000) + `}`,
		"depth":  `{"name":"a","x":` + strings.Repeat(`{"x":`, 9000) + `1` + strings.Repeat(`}`, 9000) + `}`,
		"text":   `{"name":"` + strings.Repeat("x", 1<<20) + `"}`,
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		var got document
		err := strictjson.Unmarshal([]byte(text), &got)
		runtime.ReadMemStats(&after)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if took := int(after.TotalAlloc - before.TotalAlloc); took > 8*len(text) {
			t.Errorf("%s: %d bytes took %d", name, len(text), took)
		}
	}
}
