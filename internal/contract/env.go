package contract

import (
	"encoding/json"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/strictjson"
)

// EnvShape is an environment in one of two shapes: an array of KEY=value, or an object.
// At most one of the fields is set.
type EnvShape struct {
	List []string
	Map  map[string]string
}

// DecodeStrict is strictjson.Decoder.
func (e *EnvShape) DecodeStrict(raw json.RawMessage, path string) error {
	*e = EnvShape{}
	switch strictjson.Kind(raw) {
	case "an array":
		return strictjson.Decode(raw, path, &e.List)
	case "an object":
		return strictjson.Decode(raw, path, &e.Map)
	}
	return strictjson.Expected("an object or an array of KEY=value", raw, path)
}

func (EnvShape) shape(*reflector) *schema {
	return &schema{
		Description: "Environment variables.",
		AnyOf: []*schema{
			{Type: "array", Items: &schema{Type: "string"}, Description: "Entries KEY=value; those without = are left out, the last of a key counts."},
			{Type: "object", Additional: &schema{Type: "string"}, Description: "Values by key. A key matches [A-Za-z_][A-Za-z0-9_]*."},
		},
	}
}
