package contract

import (
	"encoding/json"
	"reflect"
	"slices"
	"strings"
)

// draft names the version of JSON Schema.
const draft = "http://json-schema.org/draft-07/schema#"

// schema is a JSON schema, as far as the contract uses it.
type schema struct {
	Draft       string             `json:"$schema,omitempty"`
	Title       string             `json:"title,omitempty"`
	Description string             `json:"description,omitempty"`
	Type        any                `json:"type,omitempty"` // a string or a []string
	Format      string             `json:"format,omitempty"`
	Minimum     *int               `json:"minimum,omitempty"`
	Default     json.RawMessage    `json:"default,omitempty"`
	Enum        []string           `json:"enum,omitempty"`
	Ref         string             `json:"$ref,omitempty"`
	AllOf       []*schema          `json:"allOf,omitempty"`
	AnyOf       []*schema          `json:"anyOf,omitempty"`
	OneOf       []*schema          `json:"oneOf,omitempty"`
	Items       *schema            `json:"items,omitempty"`
	Properties  map[string]*schema `json:"properties,omitempty"`
	Additional  *schema            `json:"additionalProperties,omitempty"`
	Required    []string           `json:"required,omitempty"`
	Definitions map[string]*schema `json:"definitions,omitempty"`
	Examples    []json.RawMessage  `json:"examples,omitempty"`
}

// shaped is a type whose schema does not follow from its Go type. The receiver's
// value does not matter.
type shaped interface{ shape(*reflector) *schema }

// reflector makes a schema of a Go type: field names are those of the tag json,
// descriptions those of the tag doc, and a field with required:"true" is required.
type reflector struct {
	definitions map[string]*schema
	// defaults tells to add the value that a field has as its default: in requests.
	defaults bool
	// extended tells to describe the fields that are extensions: tag extension.
	extended bool
}

// requestSchema describes a request that holds its defaults.
func requestSchema(req any, example string, extended bool) json.RawMessage {
	r := &reflector{definitions: map[string]*schema{}, defaults: true, extended: extended}
	root := r.root(req)
	if example != "" {
		root.Examples = []json.RawMessage{json.RawMessage(example)}
	}
	return mustEncode(root)
}

func responseSchema(resp any, extended bool) json.RawMessage {
	r := &reflector{definitions: map[string]*schema{}, extended: extended}
	return mustEncode(r.root(resp))
}

// mustEncode encodes what is fixed at compile time; a test encodes all of it.
func mustEncode(v any) json.RawMessage {
	text, err := Encode(v)
	if err != nil {
		panic(err)
	}
	return text
}

func (r *reflector) root(v any) *schema {
	root := r.object(reflect.ValueOf(v))
	root.Draft, root.Title = draft, reflect.TypeOf(v).Name()
	if len(r.definitions) > 0 {
		root.Definitions = r.definitions
	}
	return root
}

func (r *reflector) object(v reflect.Value) *schema {
	out := &schema{Type: "object"}
	for _, field := range reflect.VisibleFields(v.Type()) {
		if field.Anonymous || field.Tag.Get("extension") != "" && !r.extended {
			continue
		}
		if out.Properties == nil {
			out.Properties = map[string]*schema{}
		}
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		required := field.Tag.Get("required") == "true"
		if !r.defaults { // a reply has every field that cannot be null, and no extension unasked
			required = field.Type.Kind() != reflect.Pointer && field.Tag.Get("extension") == ""
		}
		property := r.property(field)
		if required {
			out.Required = append(out.Required, name)
		} else if r.defaults && property.plain() {
			property.Default = defaultOf(v.FieldByIndex(field.Index))
		}
		out.Properties[name] = property
	}
	slices.Sort(out.Required)
	return out
}

// property describes a field without its default.
func (r *reflector) property(field reflect.StructField) *schema {
	out := r.typed(field.Type)
	doc := field.Tag.Get("doc")
	if out.Ref != "" && doc != "" {
		out = &schema{AllOf: []*schema{out}} // what stands beside a $ref is ignored
	}
	out.Description = doc
	return out
}

// plain reports whether s is for values without definitions in them: the contract
// gives defaults of those alone.
func (s *schema) plain() bool {
	return s.Type != nil && (s.Items == nil || s.Items.Type != nil)
}

func defaultOf(v reflect.Value) json.RawMessage {
	if v.Kind() == reflect.Slice && v.IsNil() {
		return json.RawMessage("[]")
	}
	return mustEncode(v.Interface())
}

// typed describes a type. Structs and shaped types become definitions.
func (r *reflector) typed(t reflect.Type) *schema {
	switch t.Kind() {
	case reflect.Pointer:
		return nullable(r.typed(t.Elem()))
	case reflect.Slice:
		return &schema{Type: "array", Items: r.typed(t.Elem())}
	case reflect.Bool:
		return &schema{Type: "boolean"}
	case reflect.Uint32, reflect.Uint64:
		return &schema{Type: "integer", Format: t.Kind().String(), Minimum: new(int)}
	case reflect.Int32, reflect.Int64:
		return &schema{Type: "integer", Format: t.Kind().String()}
	}
	if t == reflect.TypeFor[string]() {
		return &schema{Type: "string"}
	}
	return r.define(t)
}

func nullable(s *schema) *schema {
	if s.Ref != "" {
		return &schema{AnyOf: []*schema{s, {Type: "null"}}}
	}
	s.Type = []any{s.Type, "null"}
	return s
}

// define refers to a type's definition, which it makes where it is missing.
func (r *reflector) define(t reflect.Type) *schema {
	name, zero := t.Name(), reflect.Zero(t)
	if _, known := r.definitions[name]; !known {
		if s, ok := reflect.TypeAssert[shaped](zero); ok {
			r.definitions[name] = s.shape(r)
		} else {
			r.definitions[name] = r.object(zero)
		}
	}
	return &schema{Ref: "#/definitions/" + name}
}
